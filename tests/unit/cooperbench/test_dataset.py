"""Discovery, subsets, the contamination rule and the tree hash."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR, assert_disjoint, discover, load_subset, subset_hash, tree_hash
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Tasks a/task0 with features 1, 2, 10 and b/task7 with 1, 2, and folders that are no tasks."""
    for name in ("a/task0/feature1", "a/task0/feature2", "a/task0/feature10", "b/task7/feature1", "b/task7/feature2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a/task0/features", "a/tasks/feature1", "subsets", "c/task1"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def write_subset(dataset: Path, tasks: object) -> str:
    (dataset / "subsets" / "mine.json").write_text(json.dumps({"tasks": tasks}))
    return "mine"


def test_discover_sorts_features_as_numbers_and_keeps_task_zero(dataset: Path) -> None:
    found = [(t.repo, t.task_id, t.features) for t in discover(dataset)]
    assert found == [("a", 0, (1, 2, 10)), ("b", 7, (1, 2))]


def test_discover_refuses_a_folder_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(OpsdError, match="no task found"):
        discover(tmp_path)


def test_subset_features_are_sorted_and_missing_pairs_mean_all(dataset: Path) -> None:
    name = write_subset(dataset, [{"repo": "b", "task_id": 7, "pairs": [[2, 1]]}, {"repo": "a", "task_id": 0}])
    pairs = load_subset(name, dataset, split="evaluation")
    assert [(p.repo, p.task_id, p.features) for p in pairs] == [
        ("b", 7, (1, 2)),
        ("a", 0, (1, 2)),
        ("a", 0, (1, 10)),
        ("a", 0, (2, 10)),
    ]
    assert {p.split for p in pairs} == {"evaluation"}
    assert load_subset(dataset / "subsets" / "mine.json", dataset, split="evaluation") == pairs


def test_unknown_subset_lists_the_known_ones(dataset: Path) -> None:
    write_subset(dataset, [])
    with pytest.raises(OpsdError, match=r"known subsets.*mine"):
        load_subset("yours", dataset)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"repo": "c", "task_id": 0}], "c/task0 is not in"),
        ([{"repo": "a", "task_id": 1}], "a/task1 is not in"),
        ([{"repo": "a", "task_id": 0, "pairs": [[1, 3]]}], r"pair \[1, 3\]"),
        ([{"repo": "a", "task_id": 0, "pairs": [[1, 1]]}], r"pair \[1, 1\]"),
        ([{"repo": "a", "task_id": 0, "pairs": [[1, 2, 10]]}], r"pair \[1, 2, 10\]"),
        ([{"repo": "a", "task_id": 0, "pairs": [[1, 2], [2, 1]]}], "a/task0/f1_f2 twice"),
        ([{"repo": "a"}], "KeyError"),
        ("nonsense", "TypeError"),
    ],
)
def test_a_bad_subset_is_refused(dataset: Path, tasks: object, message: str) -> None:
    with pytest.raises(OpsdError, match=message):
        load_subset(write_subset(dataset, tasks), dataset)


def pair(repo: str, task_id: int, features: tuple[int, int] = (1, 2)) -> PairTask:
    return PairTask(Path("x"), repo, task_id, features)


def test_disjoint_by_task_and_by_repository() -> None:
    train, other = [pair("a", 0), pair("b", 1)], [pair("b", 2), pair("c", 0)]
    assert_disjoint(train, other, level="task")
    with pytest.raises(OpsdError, match="share b\n"):
        assert_disjoint(train, other)
    with pytest.raises(OpsdError, match="share a/task0, b/task1\n"):
        assert_disjoint(train, [pair("b", 1, (3, 4)), pair("a", 0)], level="task")
    assert_disjoint(train, [pair("c", 0)])


def test_a_recipe_stamps_pairs_that_are_not_the_benchmark(tmp_path: Path) -> None:
    for feature in (1, 8):
        (tmp_path / f"pallets_click_task/task2956/feature{feature}").mkdir(parents=True)
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"tasks": [{"repo": "pallets_click_task", "task_id": 2956}]}))
    assert "not a CooperBench score" in load_subset(path, tmp_path)[0].near_benchmark
    assert {p.near_benchmark for p in load_subset("pocket_train", POCKET_DIR)} == {""}


def test_subset_hash_depends_on_keys_and_splits_and_not_on_the_order() -> None:
    one, two = pair("a", 0), pair("a", 0, (1, 3))
    same = subset_hash([one, two])
    assert subset_hash([two, one]) == same
    assert (
        len({same, subset_hash([one]), subset_hash([one, replace(two, split="eval")]), subset_hash([one, pair("b", 0)])}) == 4
    )


def test_tree_hash_depends_on_names_contents_and_links_and_nothing_else(tmp_path: Path) -> None:
    def make(name: str) -> Path:
        root = tmp_path / name
        (root / "d").mkdir(parents=True)
        (root / "d" / "a.py").write_text("1")
        (root / "b").write_text("2")
        (root / "link").symlink_to("b")
        return root

    one, two = make("one"), make("two")
    first = tree_hash([one])
    (two / "d" / "__pycache__").mkdir()
    (two / "d" / "__pycache__" / "a.cpython-311.pyc").write_text("junk")
    (two / ".git").mkdir()
    os.utime(two / "b", (1, 1))
    assert tree_hash([two]) == first
    assert tree_hash([one, two]) != tree_hash([two])
    hashes = {first}
    (two / "b").write_text("3")
    hashes.add(tree_hash([two]))
    (two / "b").rename(two / "c")
    hashes.add(tree_hash([two]))
    (two / "link").unlink()
    hashes.add(tree_hash([two]))
    (two / "link").write_text("b")
    hashes.add(tree_hash([two]))
    assert len(hashes) == 5
    with pytest.raises(OpsdError, match="does not exist"):
        tree_hash([tmp_path / "none"])


def test_pairs_by_key():
    pairs = load_subset("pocket_ledger_task/task1/f2_f1,pocket_textkit_task/task0/f1_f3", split="eval")
    assert [(p.key, p.split) for p in pairs] == [
        ("pocket_ledger_task/task1/f1_f2", "eval"),
        ("pocket_textkit_task/task0/f1_f3", "eval"),
    ]


@pytest.mark.parametrize("name", ["pocket_ledger_task/task1/f1_f1", "pocket_ledger_task/task9/f1_f2", "nowhere/task1/f1"])
def test_wrong_pair_keys_are_refused(name):
    with pytest.raises(OpsdError, match="subset"):
        load_subset(name)
