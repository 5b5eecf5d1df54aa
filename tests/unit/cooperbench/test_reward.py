"""What an episode earns, and pairs that are given up after the same fault came back."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_opsd.cooperbench.quarantine import Quarantine, signature
from verl_opsd.cooperbench.reward import RewardConfig, rewards
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens.records import AgentOutcome, FeatureGrade, Grade


def agent(n: int, status: str = "Submitted", patch: str = "diff", steps: int = 10) -> AgentOutcome:
    return AgentOutcome(f"agent{n}", n, status, steps, patch, 0, True)


def grade(one: bool, two: bool, merge: str = "clean", strict: tuple[bool | None, bool | None] = (None, None)) -> Grade:
    passed = zip((1, 2), (one, two), strict, strict=True)
    features = tuple(FeatureGrade(f, p, 1, 0, 0, "", s) for f, p, s in passed)
    return Grade(merge, "naive", {"agent1": "applied", "agent2": "applied"}, features)


BOTH = (agent(1), agent(2))


@pytest.mark.parametrize(
    ("graded", "total"),
    [
        (grade(True, True), 1.0),
        (grade(True, False), 0.5),
        (grade(False, False), 0.0),
        (grade(True, True, strict=(True, False)), 0.5),
        (grade(False, False, "conflicts", strict=(True, True)), 1.0),
    ],
)
def test_the_reward_is_half_a_point_a_feature_and_nothing_else(graded: Grade, total: float) -> None:
    assert rewards(graded, BOTH, RewardConfig(), 20) == {"task": total, "total": total}


@pytest.mark.parametrize(
    ("shaped", "term", "value"),
    [
        ({"clean_merge": 0.1}, "shaped_clean_merge", 0.1),
        ({"submitted": 0.2}, "shaped_submitted", 0.1),
        ({"non_empty": 0.2}, "shaped_non_empty", 0.1),
        ({"steps": 0.4}, "shaped_steps", -0.4 * 15 / 20),
    ],
)
def test_each_shaped_term_by_hand(shaped: dict[str, float], term: str, value: float) -> None:
    """agent2 ran into its limit of 20 steps with nothing to hand in; agent1 took 10."""
    found = rewards(grade(True, False), (agent(1), agent(2, "LimitsExceeded", " ", 20)), RewardConfig(**shaped), 20)
    assert found == pytest.approx({"task": 0.5, term: value, "total": 0.5 + value})


def test_a_conflict_is_no_clean_merge() -> None:
    assert rewards(grade(False, False, "conflicts"), BOTH, RewardConfig(clean_merge=0.1), 20)["total"] == 0.0


@pytest.mark.parametrize("shaped", [{"steps": -0.1}, {"clean_merge": 0.5}, {"submitted": 0.3, "non_empty": 0.2}])
def test_shaped_terms_are_never_worth_a_feature(shaped: dict[str, float]) -> None:
    with pytest.raises(OpsdError, match=r"below 0\.5"):
        RewardConfig(**shaped)


def fault(what: str, kind: str = "grader_died") -> InfraFault:
    return InfraFault(kind, what, "rule", "way out")


def test_a_fault_that_comes_back_unchanged_ends_a_pair(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    assert quarantine.fault("a") is None
    quarantine.note("a", fault("pair 12 in /tmp/x1/y: exit 3 of deadbeef01"))
    quarantine.note("b", fault("pair 12 in /tmp/x1/y: exit 3 of deadbeef01"))
    quarantine.note("a", fault("another text"))
    assert quarantine.fault("a") is None
    quarantine.note("a", fault("pair 7 in /var/z: exit 4 of 0badcafe99"))  # the same but for numbers and paths
    found = Quarantine(tmp_path).fault("a")  # any process of the run
    assert found is not None and found.kind == "quarantined" and "grader_died: pair # in #" in found.what
    assert quarantine.fault("b") is None
    quarantine.path.unlink()
    assert quarantine.fault("a") is None


@pytest.mark.parametrize(
    "kind", ["engine_died", "sandbox_unreachable", "message_store", "teacher_died", "endpoint_died", "quarantined"]
)
def test_what_is_no_fault_of_a_pair_gives_none_up(tmp_path: Path, kind: str) -> None:
    quarantine = Quarantine(tmp_path)
    for _ in range(5):
        quarantine.note("a", fault("down", kind))
    assert quarantine.fault("a") is None and not quarantine.path.exists()


def test_another_kind_is_another_fault() -> None:
    assert signature(fault("x", "preflight:git")) != signature(fault("x", "preflight:gh"))
