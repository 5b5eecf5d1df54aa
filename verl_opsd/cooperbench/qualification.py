"""Qualification: a feature gives reward only where, on this machine, its gold patch passes and the base fails."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from verl_opsd.cooperbench.base_tree import git, locked
from verl_opsd.cooperbench.dataset import Task, discover
from verl_opsd.cooperbench.feature_table import FeatureRow, FeatureTable, load_table, save_table, table_path
from verl_opsd.cooperbench.grading import grade_patch
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import FeatureGrade


def qualify(
    task_dir: Path,
    prepared: PreparedTask,
    features: Sequence[int] | None = None,
    *,
    backend: str = "bubblewrap",
    allow_unsafe: bool = False,
    timeout_s: float = 120.0,
) -> FeatureTable:
    """Runs every feature's hidden tests with its gold patch and on the untouched base; saves and returns the table.

    Args:
        features: only these; rows of others that were measured before are kept. None: all.

    Raises:
        OpsdError: a feature that the task lacks.
        InfraFault: a test could not be run.
    """
    task_dir = Path(task_dir).absolute()
    known = _features_of(task_dir)
    wanted = sorted(known if features is None else set(features))
    if unknown := sorted(set(wanted) - set(known)):
        raise OpsdError(f"features {unknown} of {task_dir}", f"the task has features {known}", "name these")

    def grade(feature_id: int, patch: str | None) -> FeatureGrade:
        return grade_patch(
            task_dir, feature_id, prepared, patch, backend=backend, allow_unsafe=allow_unsafe, timeout_s=timeout_s
        )

    measured = {}
    for feature_id in wanted:
        started = time.monotonic()
        gold_patch = (task_dir / f"feature{feature_id}" / "feature.patch").read_bytes().decode("utf-8", "surrogateescape")
        gold = grade(feature_id, gold_patch)
        base = grade(feature_id, None)
        measured[feature_id] = FeatureRow(
            feature_id, gold.passed, gold.tests_passed, base.passed, round(time.monotonic() - started, 2)
        )
    with locked(table_path(prepared).with_suffix(".lock")):
        earlier = load_table(prepared)
        rows = {**(earlier.rows if earlier else {}), **measured}
        table = FeatureTable(prepared.repo, prepared.task_id, prepared.tree_hash, rows)
        save_table(prepared, table)
    return table


def _features_of(task_dir: Path) -> list[int]:
    tasks: list[Task] = [task for task in discover(task_dir.parents[1]) if task.task_dir == task_dir]
    if not tasks:
        raise OpsdError(f"{task_dir} is no task", "a task is <dataset>/<repo>/task<N> with features", "check the path")
    return list(tasks[0].features)


def require_qualified(pairs: Iterable[PairTask], cache_dir: Path) -> None:
    """Refuses pairs with a feature that is not qualified on this machine.

    Raises:
        OpsdError: naming every such feature with its verdict, and the command to run; or a task that is not prepared.
    """
    bad: dict[str, str] = {}
    commands = set()
    for pair in pairs:
        prepared = load_prepared(cache_dir, pair.repo, pair.task_id)
        table = load_table(prepared)
        for feature_id in pair.features:
            row = table.rows.get(feature_id) if table else None
            verdict = row.verdict if row else "not measured"
            if verdict != "qualified":
                bad[f"{pair.repo}/task{pair.task_id} feature {feature_id}"] = verdict
                commands.add(
                    f"opsd tasks qualify --dataset {pair.dataset_dir} --repo {pair.repo} --task {pair.task_id} "
                    f"--cache-dir {cache_dir}"
                )
    if bad:
        raise OpsdError(
            "; ".join(f"{name}: {verdict}" for name, verdict in bad.items()),
            "a feature gives reward only where its gold patch passes and the untouched base fails",
            "run " + " and ".join(sorted(commands)) + "; take out pairs whose features stay unqualified",
        )


def gold_merge(pair: PairTask, prepared: PreparedTask) -> Literal["clean", "conflicts"]:
    """Whether the gold patches of a pair merge clean, by git's own merge of two branches from the base commit.

    Raises:
        OpsdError: a gold patch does not apply to the base tree.
    """
    with tempfile.TemporaryDirectory(prefix="opsd-merge-") as folder:
        repo = Path(folder, "repo")
        shutil.copytree(prepared.base, repo, symlinks=True)
        for feature_id in pair.features:
            patch = pair.task_dir / f"feature{feature_id}" / "feature.patch"
            git("checkout", "-q", "-f", "-b", f"feature{feature_id}", prepared.base_sha, cwd=repo)
            git("apply", "--index", "--3way", str(patch.absolute()), cwd=repo)
            git("commit", "-q", "-m", "Gold patch", cwd=repo)
        branches = [f"feature{feature_id}" for feature_id in pair.features]
        merge = subprocess.run(["git", "merge-tree", "--write-tree", *branches], cwd=repo, capture_output=True, text=True)
    if merge.returncode not in (0, 1):
        raise OpsdError(f"git merge-tree: {merge.stderr}", "git >= 2.38 merges without a work tree", "update git")
    return "conflicts" if merge.returncode else "clean"
