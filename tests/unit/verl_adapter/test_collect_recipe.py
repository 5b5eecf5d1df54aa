"""The recipe for collecting: a full-set evaluation of a training subset."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf


def test_the_recipe_composes_and_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra import compose, initialize_config_module

    monkeypatch.setattr("sys.argv", ["test", "+recipe=collect"])
    monkeypatch.setenv("OPSD_RUN_DIR", "/run")
    monkeypatch.setenv("OPSD_RAY_TMP", "/ray")
    import verl  # noqa: F401

    from verl_opsd.cooperbench.dataset import load_subset
    from verl_opsd.verl_adapter.launch import parse

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["+recipe=collect", "scale=local", "opsd.evaluation.seeds=3"])
        opsd = parse(config)
    assert (opsd.recipe, opsd.mode, opsd.tasks.train) == ("collect", "evaluate", None)
    assert (opsd.evaluation.seeds, opsd.evaluation.alone) == (3, False)
    assert OmegaConf.select(config, "trainer.val_only") is True
    held = {p.repo for p in load_subset("pocket_eval", split="eval")}
    assert held.isdisjoint(p.repo for p in load_subset(opsd.tasks.eval))
