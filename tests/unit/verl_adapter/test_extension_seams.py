"""What a user's own module may add is accepted, everything else is refused before a run starts."""

from __future__ import annotations

import dataclasses

import pytest
from opsd_section import SECTION

from verl_opsd.config import LossConfig, OpsdConfig
from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.distill import divergence
from verl_opsd.distill.loss import ANALYTIC
from verl_opsd.errors import OpsdError


def test_only_trainers_of_this_project_are_modes() -> None:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_opsd.verl_adapter.contradictions import _is_opsd_trainer
    from verl_opsd.verl_adapter.trainer import OpsdTrainer

    class Own(OpsdTrainer):
        pass

    TRAINER_REGISTRY["own_of_this_test"] = Own
    try:
        accepted = {mode for mode in ("opsd", "own_of_this_test", "sync", "misspelt") if _is_opsd_trainer(mode)}
    finally:
        del TRAINER_REGISTRY["own_of_this_test"]
    assert accepted == {"opsd", "own_of_this_test"}


@pytest.mark.parametrize("name", ["peer_specs", "peer_spec+", ""])
def test_an_unknown_brief_stops_before_the_first_episode(name: str) -> None:
    from verl_opsd.models.tiny import ensure_tiny
    from verl_opsd.paths import cache_dir
    from verl_opsd.verl_adapter.brief_checks import check_briefs

    student = str(ensure_tiny(cache_dir() / "models"))

    pairs = load_subset("pocket_train", POCKET_DIR)
    good = OpsdConfig.parse(SECTION)
    check_briefs(good, pairs, student)
    with pytest.raises(OpsdError, match="unknown"):
        check_briefs(dataclasses.replace(good, brief=dataclasses.replace(good.brief, name=name)), pairs, student)


def test_a_divergence_is_known_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LossConfig(divergence="own")
    with pytest.raises(OpsdError, match="VERL_USE_EXTERNAL_MODULES"):
        config.spec()
    monkeypatch.setitem(ANALYTIC, "own", lambda logp, logq, spec: divergence.reverse_kl(logp, logq))
    assert config.spec().divergence == "own"


def test_an_estimator_whose_gradient_is_noise_is_no_choice_of_a_run() -> None:
    with pytest.raises(OpsdError, match=r"opsd\.loss\.divergence"):
        LossConfig(divergence="k1").spec()


def test_sampled_estimators_state_their_range_and_clip() -> None:
    spec = LossConfig(divergence="policy_gradient", trust=(0.5, 2.0)).spec()
    assert (spec.trust, spec.max_log_ratio, spec.sampled) == ((0.5, 2.0), None, True)
    assert LossConfig(divergence="k3", max_log_ratio=20.0).spec().max_log_ratio == 20.0
    for wrong in ({}, {"trust": (0.5,)}, {"trust": (2.0, 0.5)}):
        with pytest.raises(OpsdError, match="trust"):
            LossConfig(divergence="policy_gradient", **wrong).spec()
