"""Prepared pocket tasks, once a session, and patches made by editing a base tree with plain git."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR, discover, load_subset
from verl_opsd.cooperbench.feature_table import FeatureTable
from verl_opsd.cooperbench.prepare import load_prepared, prepare
from verl_opsd.cooperbench.qualification import qualify
from verl_opsd.cooperbench.types import PairTask, PreparedTask

#: Contents by path; None deletes the file.
Edits = dict[str, str | None]


def _library(repo: str) -> str:
    return repo.removeprefix("pocket_").removesuffix("_task")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache with the pocket tasks prepared, not qualified."""
    cache = tmp_path_factory.mktemp("cache")
    for task in discover(POCKET_DIR):
        prepare(task.task_dir, None, cache)
    return cache


@pytest.fixture(scope="session")
def prepared(cache: Path) -> dict[str, PreparedTask]:
    """Prepared pocket tasks by the library's name; none of them has a table."""
    return {_library(task.repo): load_prepared(cache, task.repo, task.task_id) for task in discover(POCKET_DIR)}


@pytest.fixture(scope="session")
def qualified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, FeatureTable]]:
    """Another cache whose pocket tasks are all qualified, and the tables by the library's name."""
    cache = tmp_path_factory.mktemp("qualified")
    tables = {_library(task.repo): qualify(task.task_dir, prepare(task.task_dir, None, cache)) for task in discover(POCKET_DIR)}
    return cache, tables


@pytest.fixture(scope="session")
def pairs() -> dict[str, PairTask]:
    """All pocket pairs by ``library/A+B``."""
    every = [pair for split in ("train", "eval", "test") for pair in load_subset(f"pocket_{split}", split=split)]
    return {f"{_library(p.repo)}/{p.features[0]}+{p.features[1]}": p for p in every}


@pytest.fixture
def make_patch(tmp_path: Path) -> Callable[..., str]:
    """``make_patch(prepared, edits, *patches)``: git's diff of a base tree after patches and then edits."""

    def make(prepared: PreparedTask, edits: Edits, *patches: str) -> str:
        def git(*args: str, stdin: str | None = None) -> str:
            done = subprocess.run(
                ["git", *args],
                cwd=repo,
                input=stdin,
                check=True,
                capture_output=True,
                text=True,
                errors="surrogateescape",
            )
            return done.stdout

        repo = tmp_path / f"edit{len(list(tmp_path.iterdir()))}"
        shutil.copytree(prepared.base, repo, symlinks=True)
        for patch in patches:
            git("apply", "-", stdin=patch)
        for path, text in edits.items():
            if text is None:
                (repo / path).unlink()
            else:
                (repo / path).parent.mkdir(parents=True, exist_ok=True)
                (repo / path).write_text(text)
        git("add", "-A", "-f")
        return git("diff", "--cached", "HEAD")

    return make
