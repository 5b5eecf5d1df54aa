"""Real CooperBench tasks on their PyPI releases: gold passes, base fails, pairs merge as the data set reports. Slow.

The data lies in ``shared/data/cooperbench`` beside the repository, or where ``OPSD_REAL_TASKS`` says; releases come
from the package index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_opsd.cooperbench.feature_table import FeatureTable
from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.prepare import prepare
from verl_opsd.cooperbench.qualification import gold_merge, qualify
from verl_opsd.cooperbench.types import PairTask, PreparedTask

DATASET = Path(os.environ.get("OPSD_REAL_TASKS") or Path(__file__).parents[4] / "shared" / "data" / "cooperbench")
TASKS = [
    "pallets_jinja_task/task1621",
    "pallets_click_task/task2956",
    "openai_tiktoken_task/task0",
    "dottxt_ai_outlines_task/task1655",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=TASKS)
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreparedTask, FeatureTable, dict[str, Any]]:
    """Task folder, prepared task, its table, and what was seen of this release before."""
    if not (DATASET / "releases.json").is_file():
        pytest.skip(f"{DATASET} is not there")
    probe = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(tmp_path_factory.mktemp("pip"))]
    if subprocess.run([*probe, "iniconfig"], capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    task_dir = DATASET / request.param
    prepared = prepare(task_dir, None, tmp_path_factory.mktemp("cache"))
    seen = json.loads((DATASET / "releases.json").read_text())[request.param]
    return task_dir, prepared, qualify(task_dir, prepared), seen


def pair_of(task_dir: Path, features: list[int]) -> PairTask:
    task_id = int(task_dir.name.removeprefix("task"))
    return PairTask(DATASET, task_dir.parent.name, task_id, (features[0], features[1]))


def test_qualification_is_what_was_seen_before(real: tuple[Path, PreparedTask, FeatureTable, dict[str, Any]]) -> None:
    task_dir, prepared, table, seen = real
    print(f"{task_dir.parent.name}: {sum(row.seconds for row in table.rows.values()):.0f} s for all gold and base runs")
    assert list(table.qualified) == seen["usable_features"]
    assert {str(f): row.gold_tests for f, row in table.rows.items()} == seen["gold_tests_passed"]
    assert [f for f, row in table.rows.items() if row.base_passes] == seen["base_passing_features"]
    assert f"not commit {seen['base_commit']}: not a CooperBench score" in prepared.near_benchmark


def test_gold_pairs_merge_as_the_data_set_reports(
    real: tuple[Path, PreparedTask, FeatureTable, dict[str, Any]],
) -> None:
    task_dir, prepared, _, seen = real
    for outcome, key in (("clean", "pairs_clean"), ("conflicts", "pairs_conflict")):
        for features in seen[key]:
            assert gold_merge(pair_of(task_dir, features), prepared) == outcome, features


def test_gold_pairs_through_the_grader(real: tuple[Path, PreparedTask, FeatureTable, dict[str, Any]]) -> None:
    task_dir, prepared, _, seen = real
    for outcome, key, reward in (("clean", "pairs_clean", 1.0), ("conflicts", "pairs_conflict", 0.0)):
        for features in seen[key][:2]:
            patches = [(task_dir / f"feature{f}" / "feature.patch").read_text() for f in features]
            grade = grade_pair(pair_of(task_dir, features), prepared, *patches)
            assert (grade.merge, grade.reward) == (outcome, reward), features
