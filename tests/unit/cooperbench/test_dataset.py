"""Discovery, subsets, the contamination rule and the tree hash."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from verl_opsd.cooperbench.base_tree import Source
from verl_opsd.cooperbench.dataset import assert_disjoint, discover, load_subset, subset_file, subset_hash, tree_hash
from verl_opsd.cooperbench.prepare import near_benchmark
from verl_opsd.cooperbench.recipes import Recipe, WheelFiles, recipe_for
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


def test_disjoint_by_feature() -> None:
    one, other = [pair("a", 0, (1, 2)), pair("b", 0)], [pair("a", 0, (3, 4)), pair("c", 0)]
    assert_disjoint(one, other, level="feature")
    with pytest.raises(OpsdError, match="corpus and test share a/task0/f2\n"):
        assert_disjoint(one, [pair("a", 0, (2, 3))], level="feature", what=("corpus", "test"))
    with pytest.raises(OpsdError, match="level 'pair'"):
        assert_disjoint(one, other, level="pair")  # type: ignore[arg-type]


CLICK = "5c1239b0116b66492cdd0848144ab3c78a04495a"


@pytest.mark.parametrize(
    ("source", "stamp"),
    [
        (f"git+https://example.org/click@{CLICK}", ""),
        (f"clone:click@{CLICK}", ""),
        (f"clone:click@{'0' * 40}", f"base is clone:click@{'0' * 40}, not commit {CLICK}: not a CooperBench score"),
        ("pypi:click==8.2.1", f"base is the release click 8.2.1, not commit {CLICK}: not a CooperBench score"),
        ("tree:somewhere", f"base is tree:somewhere, not commit {CLICK}: not a CooperBench score"),
    ],
)
def test_the_stamp_comes_from_the_tree_that_was_prepared(tmp_path: Path, source: str, stamp: str) -> None:
    recipe = recipe_for("pallets_click_task", 2956)
    assert near_benchmark(tmp_path, Source.parse(source), recipe) == stamp


def test_the_stamp_of_a_task_without_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    own, commit = Source("tree", str(tmp_path / "base")), "a" * 40
    assert near_benchmark(tmp_path, own, Recipe()) == ""
    clone = Source.parse(f"clone:x@{commit}")
    assert near_benchmark(tmp_path, clone, Recipe()).endswith("not known to be the benchmark's commit: not a CooperBench score")
    (tmp_path / "Dockerfile").write_text(f"RUN git clone x /workspace/repo && cd repo && git checkout {commit}\n")
    assert near_benchmark(tmp_path, clone, Recipe()) == ""
    added = Recipe(tree_files=(WheelFiles("x==1", "*.so", "x"),))
    assert "with files of x==1" in near_benchmark(tmp_path, clone, added)


#: Of the files as CooperBench ships them, and of our own list.
SHIPPED = {
    "flash": ("a65fe34a380bf9834022c08cb2ae267757ad512d175a41274acc46e13d2fe983", 20, 50),
    "lite": ("500751aecec2dd4ed54f48e944f41e15af2f10192966e724c15d0146864c9746", 26, 100),
    "flash_10": ("38ff94c4ff93dc1e5b1dd9918c985655c31dd9f18db55e2e2913e79707e84516", 10, 10),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_subsets(name: str, tmp_path: Path) -> None:
    digest, tasks, pairs = SHIPPED[name]
    path = subset_file(name, tmp_path)
    entries = json.loads(path.read_text())["tasks"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert (len(entries), sum(len(e["pairs"]) for e in entries)) == (tasks, pairs)
    (tmp_path / "subsets").mkdir()
    own = tmp_path / "subsets" / f"{name}.json"
    own.write_text("{}")
    assert subset_file(name, tmp_path) == own  # a data set's own file comes first


def test_flash_10_is_of_flash_and_marks_what_was_guessed(tmp_path: Path) -> None:
    flash, ten = (json.loads(subset_file(n, tmp_path).read_text())["tasks"] for n in ("flash", "flash_10"))
    known = {(e["repo"], e["task_id"]): e["pairs"] for e in flash}
    for entry in ten:
        pairs = known[entry["repo"], entry["task_id"]]
        assert entry["pairs"][0] in pairs and entry["guessed"] is (len(pairs) > 1) and entry["why"]
    assert {e["task_id"] for e in ten} == {1655, 2800, 1621, 6554, 6252, 0, 8394, 1559, 290, 26}


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
