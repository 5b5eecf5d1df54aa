"""Keys of verl that contradict this project's, each refused with the key to set instead."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.distill.policy import PpoClip
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter.place import require_writable
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS, SCRIPTED
from verl_opsd.verl_adapter.values import check_values

#: Folders that verl writes into.
WRITTEN = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
#: What a group sets; given by itself it would be a label that nothing follows.
LABELS = {
    "opsd.scale": "scale=",
    "opsd.recipe": "+recipe=",
    "opsd.mode": "+recipe=opd, +recipe=opd_offline or +recipe=full_eval",
    "opsd.student": "scale=",
}


def data_file(run: RunDir, name: str) -> Path:
    """verl's prompt file of a run: ``train`` or ``val``."""
    return run.path / "data" / f"{name}.parquet"


def check_verl_keys(config: DictConfig, opsd: OpsdConfig) -> None:
    """Refuses verl's keys that contradict ours.

    Raises:
        OpsdError: naming the key, the rule and the key to set instead.
    """
    check_labels(config, LABELS)
    check_model_keys(config, "actor_rollout_ref.model")
    check_values(config)
    check_loggers(config.trainer)
    check_device(config.trainer, f"scale={opsd.scale}", opsd.scale)
    _check_lengths(config, opsd)
    rollout_ref = config.actor_rollout_ref
    check_dtypes(
        rollout_ref.actor.fsdp_config, "actor_rollout_ref.actor.fsdp_config", rollout_ref.model, "actor_rollout_ref.model"
    )
    _check_server(config.actor_rollout_ref.rollout)
    _check_task_reward(config, opsd)
    _check_sequences(config, opsd)
    rollout, actor, model = (config.actor_rollout_ref[k] for k in ("rollout", "actor", "model"))
    c = opsd.contract
    for where, node in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        got, want = (node.temperature, node.top_p, node.top_k), (c.temperature, c.top_p, c.top_k)
        if got != want:
            raise OpsdError(
                f"actor_rollout_ref.{where} samples with temperature, top_p, top_k = {got}",
                f"the contract says {want}; training and evaluation sample as the contract says",
                "change opsd.contract instead",
            )
    files = (str(config.data.train_files), str(config.data.val_files))
    own_files = tuple(str(data_file(RunDir.from_env(), name)) for name in ("train", "val"))
    agent = (rollout.agent.default_agent_loop, OmegaConf.select(rollout, "agent.agent_loop_manager_class"))
    rules = [
        (
            not config.trainer.use_v1,
            "trainer.use_v1=false",
            "verl's older trainer would run PPO and none of this",
            "leave it out",
        ),
        (
            files != own_files,
            f"data.train_files, val_files = {files}",
            "the pairs of opsd.tasks are what is run; files of another place would take their place in silence",
            "leave both out and set opsd.tasks",
        ),
        (
            agent != ("opsd_pair", None),
            f"actor_rollout_ref.rollout.agent.default_agent_loop, agent_loop_manager_class = {agent}",
            "an episode is a pair that opsd_pair runs, grades and stores",
            "leave both out",
        ),
        (actor.strategy != "fsdp2", f"actor.strategy={actor.strategy}", "the engine runs under FSDP2 only", "set it to fsdp2"),
        (model.lora.merge, "model.lora.merge=true", "a bf16 merge loses almost all of a small update", "set it to false"),
        (
            not _is_opsd_trainer(config.trainer.v1.trainer_mode),
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}",
            "a recipe of this project runs OpsdTrainer, or a registered subclass of it",
            "leave the key out, or name the module that registers the subclass in VERL_USE_EXTERNAL_MODULES",
        ),
        (
            bool(config.distillation.enabled),
            "distillation.enabled=true",
            "verl's own distillation would run beside this one",
            "leave it out",
        ),
        (
            bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
            "use_kl_loss or use_kl_in_reward",
            "the anchor is opsd.loss.anchor; verl's KL terms are not part of this loss and would be ignored",
            "set opsd.loss.anchor",
        ),
        (rollout.n != 1 or rollout.val_kwargs.n != 1, "rollout.n != 1", "a row of data is one pair", "leave rollout.n at 1"),
        (
            bool(model.use_fused_kernels or actor.use_fused_kernels),
            f"model.use_fused_kernels={model.use_fused_kernels}, actor.use_fused_kernels={actor.use_fused_kernels}",
            "fused kernels bypass the vocabulary head, in which this loss is made",
            "leave both out",
        ),
        (
            opsd.activations.keep != "verl" and (not model.enable_gradient_checkpointing or model.enable_activation_offload),
            f"opsd.activations.keep={opsd.activations.keep} with actor_rollout_ref.model.enable_gradient_checkpointing="
            f"{model.enable_gradient_checkpointing} enable_activation_offload={model.enable_activation_offload}",
            "one side says which layers are checkpointed and where their inputs wait",
            "set enable_gradient_checkpointing=true and enable_activation_offload=false (opsd.activations.offload does it), or "
            "opsd.activations.keep=verl",
        ),
        (opsd.mode == "offline" and not opsd.corpus, "no corpus", "offline training reads a stored corpus", "corpus=RUN_DIR"),
        (opsd.mode != "offline" and bool(opsd.corpus), f"opsd.corpus={opsd.corpus}", "only offline reads it", "remove it"),
        (
            not 1 <= rollout.agent.num_workers <= c.concurrency,
            f"rollout.agent.num_workers={rollout.agent.num_workers} with contract.concurrency={c.concurrency}",
            "every worker runs at least one pair at a time, and all together no more than the contract says",
            "set it between 1 and opsd.contract.concurrency",
        ),
        (
            actor.ppo_epochs != opsd.loss.epochs,
            f"actor.ppo_epochs={actor.ppo_epochs}",
            "epochs of this loss are opsd.loss.epochs",
            "set opsd.loss.epochs",
        ),
        (
            actor.ppo_mini_batch_size != config.data.train_batch_size,
            f"actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}",
            "optimizer steps count episodes: opsd.loss.episodes_per_update",
            "set opsd.loss.episodes_per_update",
        ),
        (
            bool(config.critic.enable or config.reward.reward_model.enable),
            f"critic.enable={config.critic.enable}, reward.reward_model.enable={config.reward.reward_model.enable}",
            "episodes are graded by their hidden tests, and this loss reads no value function",
            "leave both out",
        ),
        (
            opsd.mode == "evaluate" and not (config.trainer.val_only and config.trainer.val_before_train),
            f"trainer.val_only={config.trainer.val_only}, val_before_train={config.trainer.val_before_train} with full_eval",
            "an evaluation trains nothing",
            "leave both out",
        ),
        (actor.entropy_coeff != 0, f"actor.entropy_coeff={actor.entropy_coeff}", "not a term of this loss", "leave it at 0"),
    ]
    for broken, what, rule, way_out in rules:
        if broken:
            raise OpsdError(what, rule, way_out)


def _is_opsd_trainer(mode: str) -> bool:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_opsd.verl_adapter.trainer import OpsdTrainer

    return issubclass(TRAINER_REGISTRY.get(mode, object), OpsdTrainer)


def _given(config: DictConfig) -> set[str]:
    """Keys on the command line."""
    return {o.lstrip("+~").split("=")[0] for o in OmegaConf.select(config, "hydra.overrides.task") or ()}


def check_model_keys(config: DictConfig, key: str) -> None:
    """Keys of an adapter that is not made, and libraries that are not there.

    Args:
        key: name of verl's section of the model.

    Raises:
        OpsdError: see above.
    """
    model, made = OmegaConf.select(config, key), ("target_modules", "exclude_modules")
    path = OmegaConf.select(model, "lora_adapter_path")
    unread = made if path is not None else ("lora_alpha", *made) if model.lora_rank == 0 else ()
    if twice := sorted(_given(config) & {f"{key}.{k}" for k in unread}):
        raise OpsdError(
            f"{twice[0]}={OmegaConf.select(config, twice[0])} with {key}.lora_rank={model.lora_rank} lora_adapter_path={path}",
            "no adapter is made of it; it would be ignored in silence",
            f"leave it out, or set {key}.lora_rank without lora_adapter_path",
        )
    if not isinstance(model.override_config, DictConfig):
        raise OpsdError(f"{key}.override_config={model.override_config}", "it is a group of keys", "set keys below it")
    if model.use_liger and importlib.util.find_spec("liger_kernel") is None:
        raise OpsdError(
            f"{key}.use_liger=true, and liger-kernel is not installed",
            "verl takes kernels from it",
            "install it, or leave it out",
        )
    names = model.external_lib
    for name in [names] if not isinstance(names, ListConfig) else names:
        try:
            found = name is None or importlib.util.find_spec(name) is not None
        except (ImportError, ValueError, AttributeError):
            found = False
        if not found:
            raise OpsdError(
                f"{key}.external_lib={names}", "it is a module that can be imported, or a list of them", "correct it"
            )


def check_labels(config: DictConfig, labels: Mapping[str, str]) -> None:
    """
    Args:
        labels: key -> the group that sets it.

    Raises:
        OpsdError: one was set by itself.
    """
    for key in sorted(_given(config) & set(labels)):
        raise OpsdError(
            f"{key}={OmegaConf.select(config, key)} on the command line",
            "it names the group that was composed; set alone it would call one thing another",
            f"choose the group: {labels[key]}",
        )


def check_loggers(trainer: DictConfig) -> None:
    """
    Raises:
        OpsdError: one that verl has not.
    """
    from verl.utils.tracking import Tracking

    given = trainer.logger
    loggers = [given] if isinstance(given, str) else list(given) if isinstance(given, ListConfig) else [str(given)]
    unknown = sorted(set(map(str, loggers)) - set(Tracking.supported_backend))
    if unknown:
        raise OpsdError(
            f"trainer.logger={loggers}",
            f"verl logs to {', '.join(sorted(Tracking.supported_backend))}",
            f"leave out {', '.join(unknown)}",
        )


def check_device(trainer: DictConfig, chosen: str, scale: str) -> None:
    """
    Raises:
        OpsdError: another device than that of the scale.
    """
    if trainer.device not in ("cpu", "cuda") or (trainer.device == "cpu") == scale.startswith("gpu"):
        raise OpsdError(
            f"trainer.device={trainer.device} with {chosen}",
            "the scale names the device: cpu for those without an accelerator",
            "leave trainer.device out",
        )


def check_dtypes(engine: DictConfig, key: str, model: DictConfig, model_key: str) -> None:
    """Precisions in which a step would be lost.

    Args:
        engine, model: verl's sections of the engine and of what it trains. key, model_key: their names.

    Raises:
        OpsdError: float16, or all parameters as bf16 weights.
    """
    dtypes = {
        "model_dtype": engine.get("model_dtype"),
        "mixed_precision.param_dtype": OmegaConf.select(engine, "mixed_precision.param_dtype"),
        "dtype": engine.get("dtype"),
    }
    mixed = engine.get("mixed_precision")
    if mixed is not None and (null := [k for k, v in mixed.items() if v is None]):
        raise OpsdError(
            f"{key}.mixed_precision.{null[0]}=null", "it is the name of a precision", "name one, or leave the key out"
        )
    half = sorted(k for k, v in dtypes.items() if str(v) in ("fp16", "float16"))
    if half:
        raise OpsdError(
            f"{key}.{half[0]}={dtypes[half[0]]}",
            "gradients of this loss are made in the forward pass, where verl's loss scaler does not reach: in float16 they would be 0",
            "use bf16 or fp32",
        )
    if model.lora_rank == 0 and str(dtypes["model_dtype"]) in ("bf16", "bfloat16"):
        raise OpsdError(
            f"{model_key}.lora_rank=0 with {key}.model_dtype=bf16",
            "the optimizer would step bf16 weights, which round a small update away",
            f"set {key}.model_dtype=fp32, whose forwards are still bf16",
        )


def check_padded(engine: DictConfig, key: str, model: DictConfig, model_key: str) -> None:
    """
    Raises:
        OpsdError: passes of a fixed length that are not packed.
    """
    if engine.pad_to_length and not model.use_remove_padding:
        raise OpsdError(
            f"{key}.pad_to_length={engine.pad_to_length} with {model_key}.use_remove_padding=false",
            f"packed passes alone are padded to a multiple of {key}.pad_to_length_bucket; it would be ignored in silence",
            "leave one of the two out",
        )


def check_shared(size: int, key: str, model: DictConfig, model_key: str) -> None:
    """Ranks that share a sequence do so under an attention that exchanges heads.

    Args:
        size: that many ranks. key, model_key: names of the sections that say so, and of the model's.

    Raises:
        OpsdError: another attention, or sequences that are not packed.
    """
    from verl_opsd.verl_adapter.ulysses import ATTENTION, is_right

    attention = model.override_config.get("attn_implementation", "flash_attention_2")
    if size > 1 and not is_right(attention):
        raise OpsdError(
            f"{key}.ulysses_sequence_parallel_size={size} with attn_implementation={attention}",
            "sequence parallelism under an attention that does not exchange heads gives wrong probabilities in silence",
            f"set it to 1, or use flash_attention_2 or {ATTENTION}",
        )
    if (size > 1 or attention == ATTENTION) and not model.use_remove_padding:
        raise OpsdError(
            f"model.use_remove_padding=false with {key}.ulysses_sequence_parallel_size={size} attn_implementation={attention}",
            "sequences that ranks share, and this attention, are packed",
            f"set {model_key}.use_remove_padding=true",
        )


def _check_sequences(config: DictConfig, opsd: OpsdConfig) -> None:
    """How sequences are laid out: shared between ranks, packed, and as many as one micro-batch takes."""
    actor, model, rollout = (config.actor_rollout_ref[k] for k in ("actor", "model", "rollout"))
    size = actor.ulysses_sequence_parallel_size
    check_shared(size, "actor", model, "actor_rollout_ref.model")
    check_padded(actor.fsdp_config, "actor_rollout_ref.actor.fsdp_config", model, "actor_rollout_ref.model")
    if actor.fsdp_config.get("ulysses_sequence_parallel_size", 1) not in (1, size):
        raise OpsdError(
            f"actor.fsdp_config.ulysses_sequence_parallel_size={actor.fsdp_config.ulysses_sequence_parallel_size} with "
            f"actor.ulysses_sequence_parallel_size={size}",
            "one number says how many ranks share a sequence",
            "set actor_rollout_ref.actor.ulysses_sequence_parallel_size alone",
        )
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        raise OpsdError(
            f"actor.use_dynamic_bsz={actor.use_dynamic_bsz} with rollout.log_prob_use_dynamic_bsz={rollout.log_prob_use_dynamic_bsz}",
            "updates and controls cut their rows in one way",
            "set actor_rollout_ref.actor.use_dynamic_bsz alone",
        )
    for key, limit in (
        ("actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        ("rollout.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
    ):
        if actor.use_dynamic_bsz and limit * size < opsd.contract.context_length:
            raise OpsdError(
                f"{key}={limit} on {size} ranks a sequence with opsd.contract.context_length={opsd.contract.context_length}",
                "a dynamic micro-batch holds one row at least, which may be as long as the contract's context",
                f"raise actor_rollout_ref.{key}, or set actor_rollout_ref.actor.use_dynamic_bsz=false",
            )


def _check_task_reward(config: DictConfig, opsd: OpsdConfig) -> None:
    actor, coef, batch = config.actor_rollout_ref.actor, opsd.loss.task_reward_coef, config.data.train_batch_size
    clip = PpoClip(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c)
    if coef == 0 and clip != PpoClip():
        raise OpsdError(
            f"actor.clip_ratio_low, _high, _c = {clip.low}, {clip.high}, {clip.dual} without opsd.loss.task_reward_coef",
            "they bound the importance ratio of the task reward's term, and nothing else reads them",
            "set opsd.loss.task_reward_coef, or leave them out",
        )
    if coef > 0 and opsd.mode == "online" and batch < 2:
        raise OpsdError(
            f"opsd.loss.task_reward_coef={coef} with data.train_batch_size={batch}",
            "an advantage compares an episode with the others of its round",
            "set data.train_batch_size to 2 or more, or opsd.loss.task_reward_coef=0",
        )


def _check_lengths(config: DictConfig, opsd: OpsdConfig) -> None:
    """Lengths and episodes of an update that would be ignored, or found wrong after the run has started."""
    context, batch, each = opsd.contract.context_length, config.data.train_batch_size, opsd.loss.episodes_per_update
    for key in ("max_prompt_length", "max_response_length"):
        if config.data[key] != context:
            raise OpsdError(
                f"data.{key}={config.data[key]} with opsd.contract.context_length={context}",
                "the contract says how long a prompt and a reply may be together",
                f"leave data.{key} out and set opsd.contract.context_length",
            )
    if config.actor_rollout_ref.rollout.max_model_len != context:
        raise OpsdError(
            f"actor_rollout_ref.rollout.max_model_len={config.actor_rollout_ref.rollout.max_model_len} with "
            f"opsd.contract.context_length={context}",
            "a server takes the tokens that the contract permits",
            "leave rollout.max_model_len out and set opsd.contract.context_length",
        )
    if opsd.mode == "online" and each is not None and each > batch:
        raise OpsdError(
            f"opsd.loss.episodes_per_update={each} with data.train_batch_size={batch}",
            "an update is made of episodes of one round",
            "lower it, raise data.train_batch_size, or leave it out: all of a round",
        )


def check_folders(config: DictConfig) -> None:
    """Folders that verl would look for, or write into, after the run has started.

    Raises:
        OpsdError: one of them is not there, or can't be made.
    """
    for key in WRITTEN:
        value = OmegaConf.select(config, key)
        if value is not None or key == WRITTEN[0]:
            require_writable(str(value), key)
    for key, needed in (
        ("trainer.resume_from_path", config.trainer.resume_mode == "resume_path"),
        (
            "actor_rollout_ref.model.lora_adapter_path",
            OmegaConf.select(config, "actor_rollout_ref.model.lora_adapter_path") is not None,
        ),
    ):
        value = OmegaConf.select(config, key)
        if needed and (not isinstance(value, str) or not Path(value).expanduser().is_dir()):
            raise OpsdError(f"{key}={value}", f"{key} is a folder that exists", "correct the path")


def _check_server(rollout: DictConfig) -> None:
    """Options of a rollout server: of ours all of them, of the others that they are not options of ours."""
    from verl.utils.config import omega_conf_to_dataclass

    filled = sorted(k for k, v in (rollout.engine_kwargs or {}).items() if v)
    section = "opsd" if rollout.name in OWN_BACKENDS else rollout.name
    if filled and filled != [section]:
        raise OpsdError(
            f"actor_rollout_ref.rollout.engine_kwargs.{{{', '.join(filled)}}} with rollout.name={rollout.name}",
            f"this server reads engine_kwargs.{section} only",
            f"name the section {section}, or remove it",
        )
    if rollout.name not in OWN_BACKENDS:
        return
    from verl_opsd.verl_adapter.rollout.server import EngineOptions, check_rollout_config

    server = omega_conf_to_dataclass(rollout)
    check_rollout_config(server)
    options = EngineOptions.of(server)
    if rollout.name != SCRIPTED and options.script is not None:
        raise OpsdError(
            f"rollout.engine_kwargs.opsd.script={options.script} with rollout.name={rollout.name}",
            "the embedded server generates; a script would be ignored",
            f"set actor_rollout_ref.rollout.name={SCRIPTED}, or remove the script",
        )


def check_rounds(config: DictConfig, pairs: int) -> None:
    """All rounds that were asked for fit into the epochs over the training pairs.

    Args:
        pairs: training pairs; verl's prompt file holds them a whole number of times.

    Raises:
        OpsdError: verl would end before ``total_training_steps``.
    """
    rounds, batch, epochs = config.trainer.total_training_steps, config.data.train_batch_size, config.trainer.total_epochs
    possible = epochs * math.lcm(pairs, batch) // batch
    if possible < rounds:
        raise OpsdError(
            f"trainer.total_epochs={epochs} with total_training_steps={rounds}",
            f"{pairs} pairs in batches of {batch} end after {possible} rounds",
            "leave trainer.total_epochs out, or lower trainer.total_training_steps",
        )


def check_with_verl(config: DictConfig) -> None:
    """verl's own validation, which it runs after the run directory is made.

    Raises:
        OpsdError: with verl's message.
    """
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    plain = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    OmegaConf.resolve(plain)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(plain, use_reference_policy=need_reference_policy(plain), use_critic=need_critic(plain))
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        raise OpsdError(
            " ".join(str(error).split()) or repr(error), "verl refuses this configuration", "correct the keys it names"
        ) from error
