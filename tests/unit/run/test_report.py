"""The report's numbers against counts and intervals worked by hand."""

import numpy as np
import pytest

from verl_opsd.evaluation.report import rate, standings, telemetry
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade
from verl_opsd.verl_adapter.guards import kl_rows


def episode(name: str, passed: tuple[bool, bool], merge: str = "clean", patches=("a", "b"), outcome: str = "scored") -> Episode:
    status = {f"agent{i + 1}": "applied" if p else "skipped" for i, p in enumerate(patches)}
    features = tuple(FeatureGrade(i + 1, ok, 3 if ok else 1, 0 if ok else 2, 0 if ok else 1) for i, ok in enumerate(passed))
    agents = tuple(AgentOutcome(f"agent{i + 1}", i + 1, "Submitted", 3, p, i, True) for i, p in enumerate(patches))
    grade = Grade(merge, "naive", status, features) if outcome == "scored" else None
    return Episode(name, "repo", 1, (1, 2), "train", "c", outcome, (), agents, grade, "none", 0)


def test_standings_count_scored_episodes_only():
    got = standings(
        [
            episode("a", (True, True)),
            episode("b", (True, False), patches=("a", "")),
            episode("c", (False, False), merge="conflicts"),
            episode("d", (False, False), outcome="infra:engine_died"),
        ]
    )
    assert got["episodes"] == {"ran": 4, "scored": 3, "outcomes": {"scored": 3, "infra:engine_died": 1}}
    assert got["merges"] == {"clean": 1, "clean (a patch was empty)": 1, "conflicts": 1}
    assert (got["features"]["passed"], got["features"]["total"]) == (3, 6)
    assert (got["pairs"]["passed"], got["pairs"]["total"]) == (1, 3)
    assert got["agents"]["non_empty_patches"]["passed"] == 5
    assert got["agents"]["messages_sent"] == 3


def test_wilson_interval_of_five_in_ten():
    low, high = rate(5, 10)["ci95"]
    z = 1.959963984540054
    centre, half = (0.5 + z * z / 20) / (1 + z * z / 10), z * np.sqrt(0.025 + z * z / 400) / (1 + z * z / 10)
    assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-9)
    assert (round(low, 3), round(high, 3)) == (0.237, 0.763)


def test_nothing_scored_has_no_interval():
    assert rate(0, 0) == {"passed": 0, "total": 0, "rate": None, "ci95": None}


def test_quarters_follow_training_order_over_rounds(tmp_path):
    for n, values in ((1, [4.0, 4.0, 2.0, 2.0]), (2, [1.0, 1.0, 0.0, 0.0])):
        np.savez(tmp_path / f"{n:05d}.npz", divergence=np.array(values, np.float32), agree=np.array([1, 0, 1, 1], np.float32))
    got = telemetry(tmp_path)
    assert got["kl_by_quarter"] == [4.0, 2.0, 1.0, 0.0]
    assert got["agreement_by_quarter"] == [0.5, 1.0, 0.5, 1.0]
    assert got["kl_by_round"] == [3.0, 0.5]
    assert (got["kl_mean"], got["kl_max_over_mean"], got["loss_positions"]) == (1.75, pytest.approx(4 / 1.75), 8)


def test_publish_divergence_is_the_definition():
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.5, 0.25, 0.25]])
    want = (p * np.log(p / q)).sum()
    assert kl_rows(np.log(p).astype(np.float32), np.log(q).astype(np.float32)) == pytest.approx(want, rel=1e-6)
    assert kl_rows(np.log(p), np.log(p)) == 0
