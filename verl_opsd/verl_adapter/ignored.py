"""Keys of verl that distillation, or a warm start, reads nowhere: a value other than the recipe's is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.keys import leaves, listed_keys

_PPO = "the objective is opsd.loss.divergence; PPO's clipped term of the episodes' reward is opsd.loss.task_reward_coef"
_ADVANTAGE = "advantages are the reward minus the mean of the round's other episodes: opsd.loss.task_reward_coef"
_KL = "a pull towards the student's own base is opsd.loss.anchor"
_RATIO = "importance ratios are used by opsd.loss.divergence=policy_gradient, within opsd.loss.trust"
_FOLDER = "the model is the folder, or the hub's name, that model.path gives, as the launch checks read it; put it there"
_MADE = "verl makes it of model.path; leave it out"
_ENTROPY = "no entropy is made of whole logits here; leave it out"
_FSDP1 = "it is FSDP1's; leave it out"
_OTHER = "it is of another engine of verl's; leave it out"
_QUANTIZED = "weights are trained as they are; no export and no server would know of it"
_LINEAR = "an adapter binds linear modules: target_modules"
#: Ways out of keys that verl follows, and what stands around it doesn't.
FOLLOWED_IN_PART = (_FOLDER, _QUANTIZED, _LINEAR)
_MEGATRON = "it is Megatron's; set lora_rank, lora_alpha, target_modules and lora_adapter_path of the model"
_CLASS = "the class that reads the section is verl's own; leave it out"
#: Of verl's section of a model, both recipes.
_MODEL = {
    "_target_": _CLASS,
    **dict.fromkeys(("hf_config_path", "tokenizer_path", "custom_chat_template", "trust_remote_code"), _FOLDER),
    **dict.fromkeys(
        (
            "local_path", "local_hf_config_path", "local_tokenizer_path", "model_type", "load_tokenizer", "hf_config",
            "generation_config", "tokenizer", "processor", "architectures",
        ),
        _MADE,
    ),
    "target_parameters": _LINEAR,
    "fused_kernel_options": "fused kernels bypass the vocabulary head; leave it out",
    "tiled_mlp": "verl's FSDP engine reads it nowhere; lower data.max_token_len_per_gpu or ppo_max_token_len_per_gpu",
    "mtp": "heads for several tokens are neither trained nor served here; leave it out",
    "lora": _MEGATRON,
}  # fmt: skip
#: Of verl's section of an FSDP engine, both recipes.
_ENGINE = {
    "wrap_policy": _FSDP1,
    "use_orig_params": _FSDP1,
    "mixed_precision.buffer_dtype": _FSDP1,
    "entropy_from_logits_with_chunking": _ENTROPY,
    "entropy_from_logits_chunk_size": _ENTROPY,
    "entropy_checkpointing": _ENTROPY,
    "use_torch_compile": _ENTROPY,
    "dtype": "the precision of a forward is mixed_precision.param_dtype, that of the weights model_dtype",
    "qat": _QUANTIZED,
    "turbo_config": _OTHER,
    "router_replay": _OTHER,
    "use_fused_kernels": "it is taken from the model's section; leave it out",
    "use_remove_padding": "it is taken from the model's section; leave it out",
}
#: Of verl's section of an optimizer, both recipes.
_OPTIM = {
    "_target_": _CLASS,
    "warmup_style": "set lr_scheduler_type",
    "grad_clip": "set clip_grad",
    "total_training_steps": "verl puts the steps of the run there; leave it out",
}
_CHECKPOINT = {"_target_": _CLASS, "async_save": _OTHER, "strict": _OTHER}


def _below(section: str, keys: Mapping[str, str]) -> dict[str, str]:
    return {f"{section}.{k}": v for k, v in keys.items()}


#: Key, or a section with all below it -> what does the thing here.
IGNORED = {
    **_below("actor_rollout_ref.model", _MODEL),
    **_below("actor_rollout_ref.actor.fsdp_config", _ENGINE),
    **_below("actor_rollout_ref.actor.optim", _OPTIM),
    **_below("actor_rollout_ref.actor.checkpoint", _CHECKPOINT),
    "actor_rollout_ref.actor._target_": _CLASS,
    "actor_rollout_ref.actor.fsdp_config._target_": _CLASS,
    "actor_rollout_ref.actor.fsdp_config.strategy": "set actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.fsdp_config.forward_only": "the student is trained; leave it out",
    **dict.fromkeys(
        (
            f"actor_rollout_ref.actor.fsdp_config.{k}"
            for k in (
                "use_dynamic_bsz",
                "max_token_len_per_gpu",
                "micro_batch_size_per_gpu",
                "infer_max_token_len_per_gpu",
                "infer_micro_batch_size_per_gpu",
            )
        ),
        "set those of actor_rollout_ref.actor (updates) and actor_rollout_ref.rollout (log_prob_*: controls)",
    ),
    "actor_rollout_ref.actor.grad_clip": "set actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.qat": _QUANTIZED,
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": _ENTROPY,
    "actor_rollout_ref.actor.entropy_from_logits_chunk_size": _ENTROPY,
    "actor_rollout_ref.actor.entropy_checkpointing": _ENTROPY,
    "actor_rollout_ref.actor.use_torch_compile": _ENTROPY,
    "actor_rollout_ref.actor.rollout_n": "a row of data is one pair",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "set ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_infer_micro_batch_size_per_gpu": "set actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_infer_max_token_len_per_gpu": "set actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.actor.use_remove_padding": "set actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.use_prefix_grouper": "rows are packed one beside the other; leave it out",
    "actor_rollout_ref.actor.freeze_vision_tower": "of a multimodal model the text part alone is trained; leave it out",
    "actor_rollout_ref.actor.data_loader_seed": "steps take whole episodes in the order of their collection; leave it out",
    "actor_rollout_ref.actor.use_rollout_log_probs": _RATIO,
    **dict.fromkeys((f"actor_rollout_ref.actor.{k}" for k in ("engine", "model_config", "global_batch_info")), _MADE),
    "actor_rollout_ref.ref": _KL,
    "actor_rollout_ref.hybrid_engine": "rollouts take the trained weights from the same workers; leave it out",
    "actor_rollout_ref.nccl_timeout": "verl's workers read it nowhere; leave it out",
    "actor_rollout_ref.actor.loss_agg_mode": "set opsd.loss.reduction",
    "actor_rollout_ref.actor.loss_scale_factor": "coefficients are divided by what opsd.loss.reduction says",
    "actor_rollout_ref.actor.policy_loss": _PPO,
    "actor_rollout_ref.actor.tau_pos": _PPO,
    "actor_rollout_ref.actor.tau_neg": _PPO,
    "actor_rollout_ref.actor.clip_ratio": "set clip_ratio_low and clip_ratio_high, which opsd.loss.task_reward_coef reads",
    "actor_rollout_ref.actor.shuffle": "steps take whole episodes in the order of their collection: opsd.loss.episodes_per_update",
    "actor_rollout_ref.actor.kl_loss_coef": _KL,
    "actor_rollout_ref.actor.kl_loss_type": _KL,
    "actor_rollout_ref.actor.calculate_entropy": "entropy is measured at every policy position: telemetry/ROUND.npz",
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "what is measured at every policy position is in telemetry/ROUND.npz",
    "trainer.esi_redundant_time": "a checkpoint is written every trainer.save_freq steps",
    "algorithm.adv_estimator": _ADVANTAGE,
    "algorithm.gamma": _ADVANTAGE,
    "algorithm.lam": _ADVANTAGE,
    "algorithm.norm_adv_by_std_in_grpo": _ADVANTAGE,
    "algorithm.use_pf_ppo": _ADVANTAGE,
    "algorithm.pf_ppo": _ADVANTAGE,
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_ctrl": _KL,
    "algorithm.rollout_correction": _RATIO,
}
_STORED = "rows are stored ids and masks, trained on whole; `opsd corpus render` makes them of text"
_DRAWN = "rows follow the schedule of opsd.phases, the same number on every rank"
_TORCHRUN = "ranks are those that torchrun starts: --nnodes, --nproc_per_node"
#: The same for a warm start.
IGNORED_BY_WARM_START = {
    "data.messages_key": _STORED,
    "data.tools_key": _STORED,
    "data.enable_thinking_key": _STORED,
    "data.enable_thinking_default": _STORED,
    "data.apply_chat_template_kwargs": _STORED,
    "data.ignore_input_ids_mismatch": _STORED,
    "data.max_length": _STORED,
    "data.truncation": _STORED,
    "data.use_shm": "rows are read from the corpus' own folder; leave it out",
    "data.balance_dp_token": _DRAWN,
    "trainer.balance_batch": _DRAWN,
    **_below("model", _MODEL),
    **_below("engine", _ENGINE),
    **_below("optim", _OPTIM),
    **_below("checkpoint", _CHECKPOINT),
    "engine.infer_max_token_len_per_gpu": "set data.max_token_len_per_gpu",
    "engine.infer_micro_batch_size_per_gpu": "set data.micro_batch_size_per_gpu",
    "trainer.nnodes": _TORCHRUN,
    "trainer.n_gpus_per_node": _TORCHRUN,
    "trainer.seed": "set opsd.seed (the order of rows), and engine.seed (an adapter's first weights)",
}
#: What the recipes set: verl wants values that go without a critic and without old log-probabilities, and would compile what is not run.
RECIPE = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.rollout_correction.bypass_mode": True,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "engine.use_torch_compile": False,
}
#: What is as good as verl's default.
SAME = {"mixed_precision.buffer_dtype": ("fp32", "float32")}


def check_ignored(config: DictConfig, ignored: Mapping[str, str] = IGNORED, reference: Mapping[str, Any] | None = None) -> None:
    """Compares keys that nothing reads with verl's defaults; references as they are written.

    Args:
        ignored: key -> what does the thing here.
        reference: the defaults; None: of the PPO trainer.

    Raises:
        OpsdError: one has another value.
    """
    reference = listed_keys() if reference is None else reference
    composed = OmegaConf.to_container(config, resolve=False)
    for key, way_out in ignored.items():
        given, usual = (leaves(_at(root, key), key) for root in (composed, reference))
        for name, value in given.items():
            expected: Any = RECIPE.get(name, usual.get(name))
            if value not in (expected, *next((v for k, v in SAME.items() if name.endswith(k)), ())):
                nowhere = "this recipe reads it nowhere; it would be ignored in silence"
                partly = "verl would follow it, and the launch checks, exports or servers would not"
                rule = partly if way_out in FOLLOWED_IN_PART else nowhere
                raise OpsdError(f"{name}={OmegaConf.select(config, name)}", f"{rule} (usual value {expected})", way_out)


def _at(root: Any, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    for name in key.split("."):
        root = root.get(name) if isinstance(root, dict) else None
    return root
