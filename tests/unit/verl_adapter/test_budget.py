"""Estimates derived by hand, and what a limit refuses."""

from __future__ import annotations

import dataclasses

import pytest
from omegaconf import OmegaConf

from verl_opsd.config import BudgetConfig, OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.budget import estimate, record, require_within

SECTION = {
    "recipe": "opd",
    "scale": "gpu2",
    "mode": "online",
    "tasks": {"dataset": "pocket", "train": "a", "eval": "b"},
    "brief": {"name": "peer_spec"},
    "teacher": {"kind": "device", "path": "m", "devices": 2},
    "loss": {},
    "contract": {"concurrency": 4, "wall_limit_s": 3600.0, "grade_timeout_s": 300.0},
}


def config(steps=3, batch=10, every=3, before=False, gpus=2, nodes=1):
    trainer = {"total_training_steps": steps, "test_freq": every, "val_before_train": before}
    return OmegaConf.create(
        {"trainer": trainer | {"n_gpus_per_node": gpus, "nnodes": nodes}, "data": {"train_batch_size": batch}}
    )


def opsd(**changes) -> OpsdConfig:
    return OpsdConfig.parse({**SECTION, **changes})


def test_figures_by_hand():
    """Three rounds of ten pairs, four at once: three waves each; one evaluation of five pairs: two waves. 11 waves of 6 minutes."""
    found = estimate(config(), opsd(budget={"minutes_per_pair": 6.0, "sandbox_usd_per_hour": 0.2}), 5)
    assert (found.train, found.evaluation, found.bound) == (30, 5, False)
    assert found.hours == pytest.approx(1.1)
    assert (found.gpus, found.gpu_hours) == (4, pytest.approx(4.4))  # two of the student, two of the teacher
    assert found.sandbox_hours == pytest.approx(10.5)  # 35 pairs x 3 sandboxes x 0.1 h
    assert found.sandbox_usd == pytest.approx(2.1)


def test_without_a_measurement_the_contract_bounds_it():
    found = estimate(config(steps=1, batch=1, every=-1), opsd(), 5)
    assert (found.train, found.evaluation, found.bound) == (1, 0, True)
    assert found.minutes == 80.0  # an hour of an agent, and four test runs of five minutes
    assert "at most 1.33" in found.text()


@pytest.mark.parametrize(
    ("change", "train", "evaluation"),
    [
        ({"before": True}, 30, 10),
        ({"every": 1}, 30, 15),
        ({"every": -1}, 30, 0),
        ({"steps": 6, "every": 3}, 60, 10),
    ],
)
def test_episodes(change, train, evaluation):
    found = estimate(config(**change), opsd(), 5)
    assert (found.train, found.evaluation) == (train, evaluation)


def test_offline_runs_collect_for_evaluation_only_and_a_host_has_no_gpus():
    found = estimate(config(), opsd(mode="offline", corpus="x"), 5)
    assert (found.train, found.evaluation) == (0, 5)
    local = opsd(scale="local", teacher={}, budget={"minutes_per_pair": 60.0})
    assert estimate(config(nodes=2), local, 5).gpu_hours == 0
    assert estimate(config(nodes=2), opsd(teacher={}), 5).gpus == 4


@pytest.mark.parametrize(("name", "above"), [("max_hours", 1.0), ("max_gpu_hours", 4.0), ("max_sandbox_usd", 2.0)])
def test_a_limit_refuses_and_names_itself(name, above):
    budget = {"minutes_per_pair": 6.0, "sandbox_usd_per_hour": 0.2}
    found = estimate(config(), opsd(budget=budget), 5)
    with pytest.raises(OpsdError, match=f"opsd.budget.{name}={above:g}"):
        require_within(found, BudgetConfig(**budget, **{name: above}))
    require_within(found, BudgetConfig(**budget, **{name: above * 1.2}))
    rows = []

    class Run:
        def evidence(self, gate, value, threshold, passed, detail=""):
            rows.append((gate, threshold, passed))

    record(Run(), found, BudgetConfig(**budget, **{name: above * 1.2}))
    assert (f"budget.{name[4:]}", above * 1.2, True) in rows
    assert [passed for gate, limit, passed in rows if limit is None] == [None, None]  # recorded, and nothing depends on it


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(BudgetConfig)])
def test_values_below_zero_are_refused(field):
    with pytest.raises(OpsdError, match=f"opsd.budget.{field}"):
        opsd(budget={field: -1.0})
