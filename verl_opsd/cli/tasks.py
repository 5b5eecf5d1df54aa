"""``opsd tasks list|show|prepare|qualify|collisions|exclude|import``: what tasks there are, what is known of them, making them ready."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from verl_opsd.cli import task_views
from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.cooperbench.dataset import Task


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``tasks`` and its commands; each sets ``func``, which takes the arguments and returns the exit code."""
    tasks = subparsers.add_parser("tasks", help="list, prepare and qualify tasks")
    commands = tasks.add_subparsers(dest="tasks_command", required=True)
    for name, func, text in (
        ("list", list_tasks, "tasks of a data set and what is known about them on this machine"),
        ("prepare", prepare_tasks, "make base repositories, test environments and runners"),
        ("qualify", qualify_tasks, "run gold patches and untouched base trees through the hidden tests"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--dataset", default="pocket", help="`pocket`, or a folder in CooperBench's layout")
        command.add_argument("--repo", help="only this repository, e.g. pallets_click_task")
        command.add_argument("--task", type=int, help="only this task id")
        command.add_argument("--cache-dir", type=Path, help="default: $OPSD_CACHE, or ~/.cache/verl-opsd")
        command.set_defaults(func=func)
        if name == "prepare":
            command.add_argument(
                "--source",
                help="of the base tree of one task: tree:PATH, pypi:NAME==VERSION[#sha256=HEX], clone:PATH@COMMIT or "
                "git+URL@COMMIT; default: the task's own base tree, or its recipe's release",
            )
        if name == "qualify":
            command.add_argument("--backend", default="bubblewrap", help="sandbox")
            command.add_argument("--timeout", type=float, default=120.0, help="limit of one test run, seconds")
            command.add_argument("--allow-unsafe", action="store_true", help="permit a sandbox that does not isolate")
    task_views.add_parsers(commands)


def list_tasks(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints tasks, features, subsets, and whether each task is prepared and which features are qualified here."""
    from verl_opsd.cooperbench.exclusions import excluded
    from verl_opsd.cooperbench.feature_table import load_table
    from verl_opsd.cooperbench.prepare import is_prepared, load_prepared

    table = Table("task", "features", "prepared", "qualified features", "note")
    for task in _selected(args):
        prepared = None
        if is_prepared(_cache(args), task.repo, task.task_id):
            prepared = load_prepared(_cache(args), task.repo, task.task_id)
        measured = load_table(prepared) if prepared else None
        table.add_row(
            f"{task.repo}/task{task.task_id}",
            _ids(task.features),
            "yes" if prepared else "no",
            "not measured" if measured is None else _ids(measured.qualified),
            prepared.near_benchmark if prepared else "",
        )
    console = console or Console()
    console.print(table)
    subsets = sorted(path.stem for path in (_dataset(args) / "subsets").glob("*.json"))
    console.print(f"subsets: {', '.join(subsets) or 'none'}")
    for key, reason in excluded(_dataset(args)).items():
        console.print(f"excluded: {key}: {reason}")
    return 0


def prepare_tasks(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prepares the chosen tasks and prints the base commit of each."""
    from verl_opsd.cooperbench.importing import check_features
    from verl_opsd.cooperbench.prepare import prepare

    tasks = _selected(args)
    if args.source and len(tasks) != 1:
        raise OpsdError(
            f"--source {args.source} for {len(tasks)} tasks",
            "a source is of one task",
            "name it with --repo and --task",
        )
    table = Table("task", "base commit", "environment", "folder")
    for task in tasks:
        check_features(task)
        prepared = prepare(task.task_dir, args.source, _cache(args))
        table.add_row(
            f"{task.repo}/task{task.task_id}",
            prepared.base_sha[:12],
            prepared.python_prefix.name,
            str(prepared.base.parent),
        )
    (console or Console()).print(table)
    return 0


def qualify_tasks(args: argparse.Namespace, console: Console | None = None) -> int:
    """Measures the chosen tasks and prints a row a feature; 1 when some task has no qualified feature."""
    from verl_opsd.cooperbench.importing import check_features
    from verl_opsd.cooperbench.prepare import load_prepared
    from verl_opsd.cooperbench.qualification import qualify

    table = Table("task", "feature", "gold", "tests", "untouched base", "seconds", "verdict")
    code = 0
    for task in _selected(args):
        check_features(task)
        prepared = load_prepared(_cache(args), task.repo, task.task_id)
        result = qualify(
            task.task_dir,
            prepared,
            backend=args.backend,
            allow_unsafe=args.allow_unsafe,
            timeout_s=args.timeout,
        )
        for feature_id, row in sorted(result.rows.items()):
            table.add_row(
                f"{task.repo}/task{task.task_id}",
                str(feature_id),
                "passes" if row.gold_passes else "fails",
                str(row.gold_tests),
                "passes" if row.base_passes else "fails",
                f"{row.seconds:.1f}",
                row.verdict,
            )
        if not result.qualified:
            code = 1
    (console or Console()).print(table)
    return code


def _dataset(args: argparse.Namespace) -> Path:
    from verl_opsd.cooperbench.dataset import dataset_folder

    return dataset_folder(args.dataset)


def _cache(args: argparse.Namespace) -> Path:
    from verl_opsd.paths import cache_dir

    return args.cache_dir or cache_dir()


def _selected(args: argparse.Namespace) -> list[Task]:
    from verl_opsd.cooperbench.dataset import discover

    tasks = discover(_dataset(args))
    chosen = [t for t in tasks if args.repo in (None, t.repo) and args.task in (None, t.task_id)]
    if not chosen:
        asked = [f"--{name} {value}" for name, value in (("repo", args.repo), ("task", args.task)) if value is not None]
        raise OpsdError(
            f"no task {' '.join(asked)} in {_dataset(args)}",
            "known: " + ", ".join(f"{t.repo}/task{t.task_id}" for t in tasks),
            "name one of these",
        )
    return chosen


def _ids(features: tuple[int, ...]) -> str:
    return " ".join(map(str, features)) or "none"
