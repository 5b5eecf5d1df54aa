"""Every named loss composes into the loss that its name says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_opsd.config import ThresholdConfig
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip
from verl_opsd.distill.weights import SurprisalGate, Threshold

FOLDER = Path(__file__).parents[3] / "hydra_conf" / "loss"
NAMED = {
    "reverse_kl": LossSpec(),
    "anchored": LossSpec(),
    "forward_kl": LossSpec("forward_kl"),
    "jsd": LossSpec("jsd", beta=0.5),
    "topk_union": LossSpec(support="union_topk", top_k=20),
    "masked_005": LossSpec(weights=(Threshold(0.05),)),
    "gated": LossSpec(weights=(SurprisalGate(1.0, -4.0),)),
    "sampled_pg": LossSpec("policy_gradient", trust=(0.5, 2.0)),
}


@pytest.fixture(scope="module")
def parsed() -> Iterator[Any]:
    from hydra import compose, initialize_config_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=opd"])
        patch.setenv("OPSD_RUN_DIR", "/run")
        patch.setenv("OPSD_RAY_TMP", "/ray")
        import verl  # noqa: F401

        from verl_opsd.verl_adapter.launch import parse

        with initialize_config_module("verl.trainer.config", version_base=None):
            yield lambda *overrides: parse(compose("ppo_trainer", ["+recipe=opd", *overrides]))


def test_every_preset_is_here() -> None:
    assert {f.stem for f in FOLDER.glob("*.yaml")} == {*NAMED, "_base"}


@pytest.mark.parametrize("name", NAMED)
def test_preset_is_the_loss_of_its_name(name: str, parsed: Any) -> None:
    loss = parsed(f"loss={name}").loss
    assert loss.spec() == NAMED[name]
    assert (loss.anchor, loss.task_reward_coef, loss.drift) == (0.5 if name == "anchored" else 0.0, 0.0, False)


@pytest.mark.parametrize(("taken", "in_the_head", "divided"), [("current", True, True), ("collection", False, False)])
def test_where_the_threshold_is_taken_decides_who_applies_it(parsed: Any, taken: str, in_the_head: bool, divided: bool) -> None:
    from verl_opsd.verl_adapter.objective import loss_of

    opsd = parsed("loss=masked_005", f"opsd.loss.threshold.taken={taken}", "opsd.loss.threshold.denominator=kept")
    assert opsd.loss.threshold == ThresholdConfig(0.05, taken, "kept")  # type: ignore[arg-type]
    loss = loss_of(opsd, True, PpoClip())
    assert loss.spec.weights == ((Threshold(0.05),) if in_the_head else ()) and loss.divide_by_kept is divided
    assert not loss.anchor and loss.task_reward is None


def test_drift_and_reward_reach_the_engine(parsed: Any) -> None:
    from verl_opsd.verl_adapter.objective import loss_of

    opsd = parsed("opsd.loss.drift=true", "opsd.loss.task_reward_coef=0.1")
    loss = loss_of(opsd, False, PpoClip(0.1, 0.3, 4.0))
    assert loss.anchor and loss.task_reward == PpoClip(0.1, 0.3, 4.0) and loss.reference == "initial"
