"""Takes tasks of any folder in CooperBench's format (other data sets, own tasks) into a data set."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from verl_opsd.cooperbench.dataset import Task, discover, tree_hash
from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hunks import edits

#: What each feature's folder must hold.
FILES = ("feature.md", "feature.patch", "tests.patch")


def import_tasks(source: Path, dataset_dir: Path, subset: str | None = None) -> list[Task]:
    """Copies every task of ``source``; a task that is already there with the same files is left alone. All or nothing.

    Args:
        subset: also writes ``<dataset_dir>/subsets/<subset>.json`` with every pair of these tasks.

    Raises:
        OpsdError: no tasks, an incomplete feature, a patch that touches nothing, another task of that name, or an existing subset.
    """
    tasks = discover(source)
    for task in tasks:
        check_task(task)
    home = {task: dataset_dir / task.repo / f"task{task.task_id}" for task in tasks}
    there = [task for task in tasks if home[task].exists()]
    for task in there:
        if tree_hash([home[task]]) != tree_hash([task.task_dir]):
            raise OpsdError(
                f"{task.task_dir}: {home[task]} is another task",
                "a task's files never change once runs may have used them",
                "give the imported task another number or repository name",
            )
    listed = dataset_dir / "subsets" / f"{subset}.json"
    if subset is not None and listed.exists():
        raise OpsdError(f"{listed} exists", "a subset is never replaced", "choose another name")
    dataset_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dataset_dir, prefix=".import-") as folder:
        new = [task for task in tasks if task not in there]
        for number, task in enumerate(new):
            shutil.copytree(
                task.task_dir, Path(folder, str(number)), symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        for number, task in enumerate(new):
            home[task].parent.mkdir(exist_ok=True)
            Path(folder, str(number)).rename(home[task])
    if subset is not None:
        listed.parent.mkdir(exist_ok=True)
        entries = [{"repo": task.repo, "task_id": task.task_id} for task in tasks]
        listed.write_text(json.dumps({"name": subset, "tasks": entries}, indent=1) + "\n")
    return [Task(dataset_dir, task.repo, task.task_id, task.features) for task in tasks]


def check_task(task: Task) -> None:
    """A task that agents can work on and that can be graded.

    Raises:
        OpsdError: fewer than two features; :func:`check_features`.
    """
    if len(task.features) < 2:
        raise OpsdError(f"{task.task_dir} has features {list(task.features)}", "a pair needs two", "leave the task out")
    check_features(task)


def check_features(task: Task) -> None:
    """The files of a task's features are there and whole.

    Raises:
        OpsdError: a missing or empty file, or a patch that touches no file.
    """
    for feature in task.features:
        folder = task.task_dir / f"feature{feature}"
        for name in FILES:
            path = folder / name
            if not path.is_file() or not path.read_bytes().strip():
                raise OpsdError(f"{path} is missing or empty", f"a feature has {', '.join(FILES)}", "complete the feature")
            if name.endswith(".patch") and not edits(path.read_bytes().decode("utf-8", "surrogateescape")):
                raise OpsdError(f"{path} touches no file", "a patch is a unified diff, as git writes it", "repair the patch")
