"""Gold patches that meet, the list of exclusions, and tasks that are taken from another folder."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from verl_opsd.cli.main import parser
from verl_opsd.cooperbench.collisions import Collision, collisions_of, reported_conflicts
from verl_opsd.cooperbench.dataset import POCKET_DIR, Task, discover, load_subset
from verl_opsd.cooperbench.exclusions import exclude, excluded
from verl_opsd.cooperbench.importing import import_tasks
from verl_opsd.errors import OpsdError

REAL = os.environ.get("OPSD_REAL_TASKS", "")
#: What Git's merge says of the pocket tasks' gold patches (see also tests/integration/tasks).
CONFLICTS = {"ledger": {(3, 4)}, "textkit": {(1, 3)}, "inifile": {(1, 3)}, "routes": {(1, 2)}, "spans": {(1, 2)}}


def opsd(*words: object) -> tuple[int, str]:
    args = parser().parse_args(["tasks", *map(str, words)])
    console = Console(file=io.StringIO(), width=250)
    return args.func(args, console), console.file.getvalue()


def patch(*hunks: tuple[int, int], file: str = "a.py") -> str:
    """A diff that replaces ``count`` lines from line ``first`` on, without context."""
    text = f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n"
    for first, count in hunks:
        text += f"@@ -{first},{count} +{first},{count} @@\n" + "-x\n" * count + "+y\n" * count
    return text


def make(folder: Path, *patches: str, repo: str = "mine_task", number: int = 7) -> Task:
    for feature, text in enumerate(patches, 1):
        home = folder / repo / f"task{number}" / f"feature{feature}"
        home.mkdir(parents=True)
        for name, content in (("feature.md", "**Title**: x\n"), ("feature.patch", text), ("tests.patch", patch((1, 1)))):
            (home / name).write_text(content)
    return Task(folder, repo, number, tuple(range(1, len(patches) + 1)))


@pytest.mark.parametrize(
    ("other", "lines", "approach", "conflicts"),
    [
        (patch((10, 2), file="b.py"), None, "apart", False),
        (patch((40, 1)), 28, "share_a_file", False),
        (patch((15, 1)), 3, "share_a_file", False),
        (patch((14, 1)), 2, "within_three_lines", False),
        (patch((13, 1)), 1, "within_three_lines", False),
        (patch((12, 1)), 0, "overlap", True),
        (patch((11, 4)), -1, "overlap", True),
        (patch((1, 1), (9, 1)), 0, "overlap", True),
    ],
)
def test_how_two_patches_meet(tmp_path: Path, other: str, lines: int | None, approach: str, conflicts: bool) -> None:
    """The first patch replaces lines 10 and 11."""
    (found,) = collisions_of(make(tmp_path, patch((10, 2)), other))
    assert found == Collision((1, 2), ("a.py",) if lines is not None else (), lines)
    assert (found.approach, found.conflicts) == (approach, conflicts)


@pytest.mark.parametrize("task", discover(POCKET_DIR), ids=lambda t: t.repo)
def test_pocket_pairs_conflict_as_git_says(task: Task) -> None:
    library = task.repo.removeprefix("pocket_").removesuffix("_task")
    assert {met.features for met in collisions_of(task) if met.conflicts} == CONFLICTS[library]


@pytest.mark.skipif(not REAL, reason="OPSD_REAL_TASKS does not name a folder of real tasks")
def test_the_data_sets_own_report_is_reproduced_for_every_pair() -> None:
    reported, compared = reported_conflicts(Path(REAL) / "gold_conflict_report.json"), 0
    for task in discover(Path(REAL)):
        found = collisions_of(task)
        assert {met.features for met in found if met.conflicts} == reported[task.repo, task.task_id], task.repo
        compared += len(found)
    assert compared == 45 + 45 + 28 + 45


def report(path: Path, *pairs: tuple[int, int]) -> Path:
    entries = [{"repo": "mine_task", "task_id": 7, "f1": b, "f2": a} for a, b in pairs]
    path.write_text(json.dumps({"per_task": {"mine_task/task7": {}}, "conflict_pairs": entries}))
    return path


def test_the_command_compares_with_a_report(tmp_path: Path) -> None:
    make(tmp_path, patch((10, 2)), patch((12, 1)), patch((30, 1)))
    code, text = opsd("collisions", "--dataset", tmp_path, "--report", report(tmp_path / "good.json", (1, 2)))
    assert code == 0 and "the same" in text
    code, text = opsd("collisions", "--dataset", tmp_path, "--report", report(tmp_path / "bad.json", (1, 3)))
    assert code == 1 and "2 pairs differ" in text and "mine_task/task7 1 2" in text and "mine_task/task7 1 3" in text
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(OpsdError, match="per_task"):
        opsd("collisions", "--dataset", tmp_path, "--report", tmp_path / "bad.json")


def test_exclusions_grow_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, *[patch((10 * n, 1)) for n in (1, 2, 3)])
    make(tmp_path, patch((1, 1)), patch((9, 1)), number=8)
    assert excluded(tmp_path) == {}
    exclude(tmp_path, "mine_task/task7/f3", "its tests pass on the base")
    code, _ = opsd("exclude", "mine_task/task8", "--reason", "the image has no arm64", "--dataset", tmp_path)
    assert code == 0 and list(excluded(tmp_path)) == ["mine_task/task7/f3", "mine_task/task8"]
    everything = tmp_path / "all.json"
    everything.write_text(json.dumps({"tasks": [{"repo": "mine_task", "task_id": n} for n in (7, 8)]}))
    assert [p.key for p in load_subset(everything, tmp_path)] == ["mine_task/task7/f1_f2"]
    with pytest.raises(OpsdError, match="excluded: mine_task/task7/f3: its tests pass on the base"):
        load_subset("mine_task/task7/f2_f3", tmp_path)
    with pytest.raises(OpsdError, match="task8: the image has no arm64"):
        load_subset("mine_task/task8/f1_f2", tmp_path)
    log = tmp_path / "exclusions" / "evidence.jsonl"
    log.write_text(log.read_text().replace("its tests", "all tests"))
    with pytest.raises(OpsdError, match="only grows"):
        load_subset("mine_task/task7/f1_f2", tmp_path)


@pytest.mark.parametrize(
    ("key", "reason"),
    [("mine_task", "a b c"), ("mine_task/task9", "a b c"), ("mine_task/task7/f9", "a b c"), ("mine_task/task7", "bad")],
)
def test_an_exclusion_names_what_is_there_and_why(tmp_path: Path, key: str, reason: str) -> None:
    make(tmp_path, patch((1, 1)), patch((9, 1)))
    with pytest.raises(OpsdError, match="exclusion of"):
        exclude(tmp_path, key, reason)
    assert not (tmp_path / "exclusions").exists()


def test_import_copies_once_and_never_changes_a_task(tmp_path: Path) -> None:
    source, target = tmp_path / "theirs", tmp_path / "ours"
    make(source, patch((1, 1)), patch((9, 1)))
    code, text = opsd("import", source, "--dataset", target, "--subset", "theirs")
    assert code == 0 and "mine_task/task7" in text
    assert [p.key for p in load_subset("theirs", target)] == ["mine_task/task7/f1_f2"]
    import_tasks(source, target)  # the same files again
    with pytest.raises(OpsdError, match="never replaced"):
        import_tasks(source, target, "theirs")
    (source / "mine_task/task7/feature1/feature.md").write_text("**Title**: another\n")
    make(source, patch((1, 1)), patch((9, 1)), number=8)
    with pytest.raises(OpsdError, match="is another task"):
        import_tasks(source, target)
    assert sorted(p.name for p in (target / "mine_task").iterdir()) == ["task7"] and len(list(target.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tests.patch", None, "missing or empty"),
        ("feature.md", " \n", "missing or empty"),
        ("feature.patch", "nothing\n", "touches no file"),
    ],
)
def test_incomplete_tasks_are_not_taken(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    source = tmp_path / "theirs"
    make(source, patch((1, 1)), patch((9, 1)))
    path = source / "mine_task/task7/feature2" / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(OpsdError, match=message):
        import_tasks(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    for command in (
        ("collisions",),
        ("show", "mine_task/task7"),
        ("show", "mine_task/task7/f1_f2"),
        ("prepare",),
        ("qualify",),
    ):
        with pytest.raises(OpsdError, match=message):
            opsd(*command, "--dataset", source)
    shutil.rmtree(source / "mine_task/task7/feature2")
    with pytest.raises(OpsdError, match="a pair needs two"):
        import_tasks(source, tmp_path / "ours")


def test_show(tmp_path: Path) -> None:
    code, text = opsd("show", "pocket_test", "--cache-dir", tmp_path)
    assert code == 0 and "4 pairs, subset hash " in text and "overlap: conflict" in text and "not prepared" in text
    code, text = opsd("show", "pocket_spans_task/task3", "--cache-dir", tmp_path)
    assert code == 0 and "Join spans over small gaps" in text and "spans/core.py" in text
    with pytest.raises(OpsdError, match="known subsets"):
        opsd("show", "nothing")
    with pytest.raises(OpsdError, match="no --dataset"):
        opsd("exclude", "a/task1", "--reason", "a b c")
