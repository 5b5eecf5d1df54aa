"""``opsd tasks show|collisions|exclude|import``: subsets, pairs and gold patches as tables; the list of exclusions; other data sets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.cooperbench.dataset import Task


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets ``func``, which takes the arguments and returns the exit code."""
    show = commands.add_parser("show", help="a subset's pairs, or a task's features and how their gold patches meet")
    show.add_argument("what", help="name or path of a subset, or a task: repo/task7")
    show.set_defaults(func=show_task_or_subset)
    text = "which gold patches share files, come near or overlap; against the data set's own report of conflicts"
    collisions = commands.add_parser("collisions", help=text, description=text)
    collisions.add_argument(
        "--report", type=Path, help="gold_conflict_report.json; default: that of the data set, if it has one"
    )
    collisions.set_defaults(func=show_collisions)
    exclude = commands.add_parser("exclude", help="no subset may use this task or feature any more")
    exclude.add_argument("key", help="repo/task7 or repo/task7/f3")
    exclude.add_argument("--reason", required=True, help="what a reader needs to understand it later")
    exclude.set_defaults(func=exclude_task)
    take = commands.add_parser("import", help="copy the tasks of another folder in CooperBench's layout")
    take.add_argument("source", type=Path, help="folder that holds the repositories' folders")
    take.add_argument("--subset", help="also write a subset of this name with every pair of these tasks")
    take.set_defaults(func=import_folder)
    for command in (show, collisions, exclude, take):
        command.add_argument("--dataset", default="pocket", help="`pocket`, or a folder in CooperBench's layout")
    show.add_argument("--cache-dir", type=Path, help="default: $OPSD_CACHE, or ~/.cache/verl-opsd")


def show_task_or_subset(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints a table of the subset's pairs, or of the task's features and pairs."""
    from verl_opsd.cooperbench.dataset import discover

    console, dataset = console or Console(), _dataset(args)
    named = [t for t in discover(dataset) if f"{t.repo}/task{t.task_id}" == args.what]
    return _show_task(args, named[0], console) if named else _show_subset(args, dataset, console)


def _show_subset(args: argparse.Namespace, dataset: Path, console: Console) -> int:
    import json

    from verl_opsd.cooperbench.collisions import collisions_of
    from verl_opsd.cooperbench.dataset import Task, load_subset, subset_file, subset_hash
    from verl_opsd.cooperbench.importing import check_features
    from verl_opsd.rundir import file_hash

    pairs = load_subset(args.what, dataset)
    path = subset_file(args.what, dataset)
    guessed = {}
    if path.is_file():
        console.print(f"{path}, sha256 {file_hash(path)}")
        entries = json.loads(path.read_text())["tasks"]
        guessed = {(e["repo"], e["task_id"]): e["why"] for e in entries if e.get("guessed")}
    console.print(f"{len(pairs)} pairs, subset hash {subset_hash(pairs)}")
    table = Table("pair", "features", "gold patches", "note")
    for pair in pairs:
        task = Task(dataset, pair.repo, pair.task_id, pair.features)
        check_features(task)
        (met,) = collisions_of(task)
        why = guessed.get((pair.repo, pair.task_id))
        table.add_row(
            pair.key, _verdicts(args, pair.repo, pair.task_id, pair.features), _how(met), f"guessed: {why}" if why else ""
        )
    console.print(table)
    return 0


def _show_task(args: argparse.Namespace, task: Task, console: Console) -> int:
    from verl_opsd.cooperbench.collisions import collisions_of
    from verl_opsd.cooperbench.importing import check_features
    from verl_opsd.privilege.hunks import edits

    check_features(task)
    features = Table("feature", "title", "gold touches", "on this machine")
    for feature in task.features:
        folder = task.task_dir / f"feature{feature}"
        title = (folder / "feature.md").read_text().splitlines()[0].removeprefix("**Title**: ")
        files = edits((folder / "feature.patch").read_bytes().decode("utf-8", "surrogateescape"))
        features.add_row(str(feature), title, ", ".join(files), _verdicts(args, task.repo, task.task_id, (feature,)))
    console.print(features)
    pairs = Table("pair", "gold patches", "common files")
    for met in collisions_of(task):
        pairs.add_row(f"{met.features[0]} {met.features[1]}", _how(met), ", ".join(met.files))
    console.print(pairs)
    return 0


def show_collisions(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints one row a task; 1 when the data set's report says otherwise of some pair."""
    from collections import Counter

    from verl_opsd.cooperbench.collisions import Approach, collisions_of, reported_conflicts
    from verl_opsd.cooperbench.dataset import discover
    from verl_opsd.cooperbench.importing import check_features

    console, dataset = console or Console(), _dataset(args)
    own = dataset / "gold_conflict_report.json"
    path = args.report or (own if own.is_file() else None)
    reported = reported_conflicts(path) if path else {}
    kinds = get_args(Approach)
    table = Table("task", "pairs", *(kind.replace("_", " ") for kind in kinds), "conflicts", "report")
    differ = []
    for task in discover(dataset):
        check_features(task)
        found = collisions_of(task)
        count = Counter(met.approach for met in found)
        name, told = f"{task.repo}/task{task.task_id}", reported.get((task.repo, task.task_id))
        if told is not None:
            other = {met.features for met in found if met.conflicts} ^ told
            differ += [f"{name} {a} {b}" for a, b in sorted(other)]
        verdict = "not in it" if told is None else "the same" if not other else f"{len(other)} pairs differ"
        numbers = [len(found), *(count[kind] for kind in kinds), sum(met.conflicts for met in found)]
        table.add_row(name, *map(str, numbers), verdict)
    console.print(table)
    for line in differ:
        console.print(f"differs from {path}: {line}")
    return 1 if differ else 0


def exclude_task(args: argparse.Namespace, console: Console | None = None) -> int:
    """Adds a line to the data set's exclusions."""
    from verl_opsd.cooperbench.exclusions import exclude

    if args.dataset == "pocket":
        raise OpsdError("no --dataset", "the pocket tasks are installed files", "name the data set's folder")
    exclude(_dataset(args), args.key, args.reason)
    (console or Console()).print(f"excluded: {args.key}: {args.reason}")
    return 0


def import_folder(args: argparse.Namespace, console: Console | None = None) -> int:
    """Copies the tasks and prints what is there now."""
    from verl_opsd.cooperbench.dataset import tree_hash
    from verl_opsd.cooperbench.importing import import_tasks

    if args.dataset == "pocket":
        raise OpsdError("no --dataset", "tasks are copied into a data set of your own", "name its folder; it need not exist")
    table = Table("task", "features", "tree hash")
    for task in import_tasks(args.source.absolute(), Path(args.dataset).absolute(), args.subset):
        table.add_row(f"{task.repo}/task{task.task_id}", " ".join(map(str, task.features)), tree_hash([task.task_dir])[:12])
    (console or Console()).print(table)
    return 0


def _how(met: object) -> str:
    from verl_opsd.cooperbench.collisions import Collision

    assert isinstance(met, Collision)
    words = {
        "apart": "no common file",
        "share_a_file": "share a file",
        "within_three_lines": "within three lines",
        "overlap": "overlap",
    }
    return f"{words[met.approach]}: {'conflict' if met.conflicts else 'merge clean'}"


def _verdicts(args: argparse.Namespace, repo: str, task_id: int, features: tuple[int, ...]) -> str:
    from verl_opsd.cooperbench.feature_table import load_table
    from verl_opsd.cooperbench.prepare import is_prepared, load_prepared
    from verl_opsd.paths import cache_dir

    cache = args.cache_dir or cache_dir()
    if not is_prepared(cache, repo, task_id):
        return "not prepared"
    table = load_table(load_prepared(cache, repo, task_id))
    rows = [table.rows.get(f) if table else None for f in features]
    return ", ".join(row.verdict if row else "not measured" for row in rows)


def _dataset(args: argparse.Namespace) -> Path:
    from verl_opsd.cooperbench.dataset import dataset_folder

    return dataset_folder(args.dataset)
