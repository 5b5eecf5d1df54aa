"""verl's keys that distillation reads nowhere are refused by name, each with the key that does the thing here."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.ignored import check_ignored


@pytest.fixture(scope="module")
def composed() -> Any:
    from hydra import compose, initialize_config_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=opd"])
        patch.setenv("OPSD_RUN_DIR", "/run")
        patch.setenv("OPSD_RAY_TMP", "/ray")
        import verl  # noqa: F401

        with initialize_config_module("verl.trainer.config", version_base=None):
            yield {r: compose("ppo_trainer", [f"+recipe={r}"]) for r in ("opd", "opd_offline")}


@pytest.mark.parametrize("recipe", ["opd", "opd_offline"])
def test_the_recipes_own_values_pass(recipe: str, composed: Any) -> None:
    check_ignored(composed[recipe])


CHANGED = {
    "actor_rollout_ref.actor.loss_agg_mode": ("seq-mean-token-sum", "opsd.loss.reduction"),
    "actor_rollout_ref.actor.loss_scale_factor": (100, "opsd.loss.reduction"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("gspo", "opsd.loss.divergence"),
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": (0.2, "opsd.loss.divergence"),
    "actor_rollout_ref.actor.tau_pos": (0.5, "opsd.loss.divergence"),
    "actor_rollout_ref.actor.tau_neg": (0.5, "opsd.loss.divergence"),
    "actor_rollout_ref.actor.clip_ratio": (0.1, "clip_ratio_low"),
    "actor_rollout_ref.actor.shuffle": (True, "opsd.loss.episodes_per_update"),
    "actor_rollout_ref.actor.kl_loss_coef": (0.1, "opsd.loss.anchor"),
    "actor_rollout_ref.actor.kl_loss_type": ("k2", "opsd.loss.anchor"),
    "actor_rollout_ref.actor.calculate_entropy": (True, "telemetry"),
    "actor_rollout_ref.actor.calculate_sum_pi_squared": (True, "telemetry"),
    "trainer.esi_redundant_time": (60, "trainer.save_freq"),
    "algorithm.adv_estimator": ("gae", "opsd.loss.task_reward_coef"),
    "algorithm.gamma": (0.9, "opsd.loss.task_reward_coef"),
    "algorithm.lam": (0.9, "opsd.loss.task_reward_coef"),
    "algorithm.norm_adv_by_std_in_grpo": (False, "opsd.loss.task_reward_coef"),
    "algorithm.use_pf_ppo": (True, "opsd.loss.task_reward_coef"),
    "algorithm.pf_ppo.weight_pow": (3.0, "opsd.loss.task_reward_coef"),
    "algorithm.kl_penalty": ("abs", "opsd.loss.anchor"),
    "algorithm.kl_ctrl.kl_coef": (0.1, "opsd.loss.anchor"),
    "algorithm.rollout_correction.rollout_is": ("token", "opsd.loss.trust"),
    "algorithm.rollout_correction.bypass_mode": (False, "opsd.loss.trust"),
}


@pytest.mark.parametrize("key", CHANGED)
def test_another_value_is_refused_with_the_way_out(key: str, composed: Any) -> None:
    value, way_out = CHANGED[key]
    config = composed["opd"].copy()
    OmegaConf.update(config, key, value)
    with pytest.raises(OpsdError, match="ignored in silence") as error:
        check_ignored(config)
    assert f"{key}={value}" in str(error.value) and way_out in str(error.value)
