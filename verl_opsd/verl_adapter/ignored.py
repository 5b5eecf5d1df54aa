"""Keys of verl that distillation, or a warm start, reads nowhere: a value other than the recipe's is refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.keys import leaves, listed_keys

_PPO = "the objective is opsd.loss.divergence; PPO's clipped term of the episodes' reward is opsd.loss.task_reward_coef"
_ADVANTAGE = "advantages are the reward minus the mean of the round's other episodes: opsd.loss.task_reward_coef"
_KL = "a pull towards the student's own base is opsd.loss.anchor"
_RATIO = "importance ratios are used by opsd.loss.divergence=policy_gradient, within opsd.loss.trust"
#: Key, or a section with all below it -> what does the thing here.
IGNORED = {
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
_MEGATRON = "it is Megatron's; set lora_rank, lora_alpha, target_modules and lora_adapter_path of the model"
_DRAWN = "rows follow the schedule of opsd.phases, the same number on every rank"
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
    "model.lora": _MEGATRON,
    "optim.total_training_steps": "steps are those of opsd.phases",
    "trainer.seed": "set opsd.seed (the order of rows), and engine.seed (an adapter's first weights)",
}
#: What the recipes set, since verl wants a value that goes without a critic and without old log-probabilities.
RECIPE = {"algorithm.adv_estimator": "grpo", "algorithm.rollout_correction.bypass_mode": True}


def check_ignored(config: DictConfig, ignored: Mapping[str, str] = IGNORED, reference: Mapping[str, Any] | None = None) -> None:
    """Compares keys that nothing reads with verl's defaults.

    Args:
        ignored: key -> what does the thing here.
        reference: the defaults; None: of the PPO trainer.

    Raises:
        OpsdError: one has another value.
    """
    reference = listed_keys() if reference is None else reference
    for key, way_out in ignored.items():
        below = OmegaConf.select(config, key)
        given = leaves(OmegaConf.to_container(below, resolve=True) if isinstance(below, DictConfig) else below, key)
        usual = leaves(functools.reduce(lambda node, name: node[name], key.split("."), reference), key)
        for name, value in given.items():
            expected: Any = RECIPE.get(name, usual.get(name))
            if value != expected:
                raise OpsdError(
                    f"{name}={value}",
                    f"this recipe reads it nowhere; it would be ignored in silence (usual value {expected})",
                    way_out,
                )
