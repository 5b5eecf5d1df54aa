"""The pocket tasks as files: complete, in CooperBench's layout, fit for a small context, in disjoint splits."""

from __future__ import annotations

from itertools import combinations

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR, Task, assert_disjoint, discover, load_subset
from verl_opsd.cooperbench.recipes import DEFAULT_REQUIREMENTS, render_runner

TASKS = discover(POCKET_DIR)


def test_there_are_enough_pairs_over_enough_repositories() -> None:
    splits = [load_subset(f"pocket_{split}", split=split) for split in ("train", "eval", "test")]
    assert [len(pairs) >= least for pairs, least in zip(splits, (9, 3, 3), strict=True)] == [True] * 3
    assert {p.repo for pairs in splits for p in pairs} == {t.repo for t in TASKS} and len(TASKS) >= 5
    for one, other in combinations(splits, 2):
        assert_disjoint(one, other, level="repo")


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.repo)
def test_layout(task: Task) -> None:
    for name in ("Dockerfile", "setup.sh", "run_tests.sh", "runner.sh", "combined.patch", "base"):
        assert (task.task_dir / name).exists(), name
    for feature in task.features:
        folder = task.task_dir / f"feature{feature}"
        assert {p.name for p in folder.iterdir()} == {"feature.md", "feature.patch", "tests.patch"}
        text = (folder / "feature.md").read_text()
        assert text.startswith("**Title**: ") and len(text) < 1500
        assert "tests/" not in (folder / "feature.patch").read_text()
        changed = [line for line in (folder / "tests.patch").read_text().splitlines() if line.startswith("+++")]
        assert changed and all(line.startswith("+++ b/tests/") for line in changed)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.repo)
def test_the_runner_is_the_shared_one_and_the_image_has_the_same_requirements(task: Task) -> None:
    expected = render_runner("python -m pytest tests -v -p no:cacheprovider")
    assert (task.task_dir / "runner.sh").read_text() == expected
    assert all(f'"{requirement}"' in (task.task_dir / "Dockerfile").read_text() for requirement in DEFAULT_REQUIREMENTS)
