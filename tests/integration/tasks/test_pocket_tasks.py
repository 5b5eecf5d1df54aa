"""The shipped tasks through the project's own grader: gold passes, base fails, pairs merge as they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR, discover
from verl_opsd.cooperbench.feature_table import FeatureTable, load_table
from verl_opsd.cooperbench.grading import grade_pair, grade_patch
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.qualification import gold_merge, require_qualified
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.errors import OpsdError


def gold(pair: PairTask, feature_id: int) -> str:
    """The gold patch of a feature."""
    return (pair.task_dir / f"feature{feature_id}" / "feature.patch").read_text()


# Tests that pass with a feature's gold patch: those of the base tree plus the feature's own, counted by hand.
GOLD_TESTS = {
    "textkit": {1: 7 + 10, 2: 7 + 3, 3: 7 + 8},
    "ledger": {1: 4 + 4, 2: 4 + 4, 3: 4 + 4, 4: 4 + 3},
    "inifile": {1: 6 + 7, 2: 6 + 4, 3: 6 + 5},
    "routes": {1: 9 + 8, 2: 9 + 7, 3: 9 + 4, 4: 9 + 4},
    "spans": {1: 8 + 5, 2: 8 + 5, 3: 8 + 5, 4: 8 + 11},
}
MERGES = {
    **dict.fromkeys(("textkit/1+2", "textkit/2+3", "ledger/1+2", "ledger/1+3", "ledger/2+4"), "clean"),
    **dict.fromkeys(("inifile/1+2", "inifile/2+3", "routes/1+3", "routes/2+4", "routes/3+4"), "clean"),
    **dict.fromkeys(("spans/1+3", "spans/2+4", "spans/3+4"), "clean"),
    **dict.fromkeys(("textkit/1+3", "ledger/3+4", "inifile/1+3", "routes/1+2", "spans/1+2"), "conflicts"),
}


def test_every_feature_is_qualified_with_the_counts_of_its_tests(
    qualified: tuple[Path, dict[str, FeatureTable]],
) -> None:
    _, tables = qualified
    counts = {name: {f: row.gold_tests for f, row in table.rows.items()} for name, table in tables.items()}
    assert counts == GOLD_TESTS
    assert {row.verdict for table in tables.values() for row in table.rows.values()} == {"qualified"}


def test_the_table_is_kept_and_satisfies_the_requirement(
    qualified: tuple[Path, dict[str, FeatureTable]], pairs: dict[str, PairTask]
) -> None:
    cache, tables = qualified
    require_qualified(pairs.values(), cache)
    assert load_table(load_prepared(cache, "pocket_ledger_task", 1)) == tables["ledger"]


def test_the_table_of_merges_covers_every_pair(pairs: dict[str, PairTask]) -> None:
    assert set(MERGES) == set(pairs)


@pytest.mark.parametrize("name", sorted(MERGES))
def test_gold_pair(name: str, pairs: dict[str, PairTask], qualified: tuple[Path, dict[str, FeatureTable]]) -> None:
    cache, _ = qualified
    pair = pairs[name]
    prepared = load_prepared(cache, pair.repo, pair.task_id)
    grade = grade_pair(pair, prepared, *(gold(pair, f) for f in pair.features))
    clean = MERGES[name] == "clean"
    assert grade.merge == MERGES[name] == gold_merge(pair, prepared)
    assert grade.apply_status == {"agent1": "applied", "agent2": "applied"}
    assert tuple(f.feature_id for f in grade.features) == pair.features
    assert grade.reward == (1.0 if clean else 0.0)
    library = name.split("/")[0]
    assert [f.tests_passed for f in grade.features] == [GOLD_TESTS[library][f] if clean else 0 for f in pair.features]
    assert [f.exit_code for f in grade.features] == ([0, 0] if clean else [None, None])


@pytest.mark.parametrize("task", discover(POCKET_DIR), ids=lambda t: t.repo)
def test_the_combined_patch_passes_every_suite(task: object, qualified: tuple[Path, dict[str, FeatureTable]]) -> None:
    cache, _ = qualified
    prepared: PreparedTask = load_prepared(cache, task.repo, task.task_id)
    combined = (task.task_dir / "combined.patch").read_text()
    for feature_id in task.features:
        assert grade_patch(task.task_dir, feature_id, prepared, combined).passed


@pytest.mark.parametrize("name", ["ledger/1+3", "ledger/3+4"])
def test_the_plain_process_sandbox_gives_the_same_grade(
    name: str, pairs: dict[str, PairTask], prepared: dict[str, PreparedTask]
) -> None:
    pair = pairs[name]
    patches = [gold(pair, f) for f in pair.features]
    grade = grade_pair(pair, prepared["ledger"], *patches, backend="process", allow_unsafe=True)
    assert (grade.merge, grade.reward) == (MERGES[name], 1.0 if MERGES[name] == "clean" else 0.0)
    with pytest.raises(OpsdError, match="isolates nothing"):
        grade_pair(pair, prepared["ledger"], *patches, backend="process")


def test_one_agent_may_do_all_the_work(pairs: dict[str, PairTask], prepared: dict[str, PreparedTask]) -> None:
    """Conflicting pair: the harness takes the first agent's patch alone when it passes both suites, the strict grade either's."""
    pair = pairs["textkit/1+3"]
    combined = (pair.task_dir / "combined.patch").read_text()
    first = grade_pair(pair, prepared["textkit"], combined, gold(pair, 3))
    assert (first.merge, first.strategy, first.reward) == ("conflicts", "solo-agent1", 1.0)
    second = grade_pair(pair, prepared["textkit"], gold(pair, 1), combined)
    assert (second.merge, second.strategy, second.strict_strategy) == ("conflicts", "naive", "solo-agent2")
    assert [f.passed for f in second.features] == [False, False] and second.reward == 1.0 and len(second.differences) == 2
    assert first.strict_strategy == "solo-agent1" and first.differences == ()
