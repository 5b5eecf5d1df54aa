"""Estimates derived by hand, and what a limit refuses."""

from __future__ import annotations

import dataclasses

import pytest
from omegaconf import OmegaConf

from verl_opsd.config import BudgetConfig, OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.spent import spent, spent_rows
from verl_opsd.evidence.chain import lines
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import Episode
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
def test_a_limit_refuses_and_names_itself(name, above, tmp_path):
    budget = {"minutes_per_pair": 6.0, "sandbox_usd_per_hour": 0.2}
    found = estimate(config(), opsd(budget=budget), 5)
    with pytest.raises(OpsdError, match=f"opsd.budget.{name}={above:g}"):
        require_within(found, BudgetConfig(**budget, **{name: above}))
    require_within(found, BudgetConfig(**budget, **{name: above * 1.2}))
    run = RunDir(tmp_path)
    record(run, found, BudgetConfig(**budget, **{name: above * 1.2}))
    rows = {x["gate"]: (x["threshold"], x["verdict"]) for x in lines(tmp_path)}
    assert rows[f"budget.{name[4:]}"] == (above * 1.2, "pass")
    assert [verdict for limit, verdict in rows.values() if limit is None] == ["recorded", "recorded"]


def test_what_was_measured_stands_beside_the_estimate(tmp_path):
    """Two episodes of 6 and 12 minutes at the same time, three sandboxes each; an evaluation of 3 minutes; 4 devices."""
    budget = {"minutes_per_pair": 6.0, "sandbox_usd_per_hour": 0.2}
    run = RunDir(tmp_path)
    assert spent(run, [], 0.2, collects=True) == {} and list(spent_rows({})) == []
    record(run, estimate(config(steps=1, batch=2, every=-1), opsd(budget=budget), 5), BudgetConfig(**budget))
    for stage, minutes in (("collect", 12), ("score", 7), ("evaluate", 3)):
        with run.stage(1, stage, started=1000.0, ended=1000.0 + 60 * minutes):
            pass
    played = [
        Episode(n, "r", 1, (1, 2), "train", "c", "scored", (), (), None, {}, 0, t_start=1000.0, t_end=1000.0 + 60 * m)
        for n, m in (("a", 6), ("b", 12))
    ]
    found = spent(run, played, 0.2, collects=True)["figures"]
    assert {k: v["estimated"] for k, v in found.items()} == pytest.approx(
        {"episodes": 2, "minutes": 6.0, "hours": 0.1, "gpu_hours": 0.4, "sandbox_hours": 0.6, "sandbox_usd": 0.12}
    )
    assert {k: v["measured"] for k, v in found.items()} == pytest.approx(
        {"episodes": 2, "minutes": 9.0, "hours": 0.25, "gpu_hours": 1.0, "sandbox_hours": 0.9, "sandbox_usd": 0.18}
    )
    assert spent(run, played, 0.2, collects=False)["figures"]["hours"]["measured"] == pytest.approx(0.05)
    words = dict(spent_rows(spent(run, played, 0.0, collects=True)))
    assert words["episodes"] == "2 estimated, 2 measured" and words["GPU hours"] == "about 0.400 estimated, 1.000 measured"


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(BudgetConfig)])
def test_values_below_zero_are_refused(field):
    with pytest.raises(OpsdError, match=f"opsd.budget.{field}"):
        opsd(budget={field: -1.0})
