"""How a task is made ready: where its base tree comes from, what its tests need and how they are run.

``recipes.json`` holds the recipes of the CooperBench tasks that a PyPI release can carry. A task without a recipe, such
as the pocket tasks, brings its base tree along (``base/``) and its own ``runner.sh``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

#: What the tests of a task without a recipe need.
DEFAULT_REQUIREMENTS = ("pytest==8.4.2",)

_RUNNER_TEMPLATE = Path(__file__).parent / "runner_template.sh"


@dataclass(frozen=True)
class WheelFiles:
    """Files of a wheel: ``members`` is a pattern (``*`` also crosses folders), ``into`` the folder they go to."""

    wheel: str
    members: str
    into: str


@dataclass(frozen=True)
class Recipe:
    """How to prepare one task.

    Attributes:
        source: where the base tree comes from (see ``base_tree.Source``); empty: the task's own ``base/``.
        test_command: shell command that runs the tests; empty: the task's own ``runner.sh``.
        requirements: pip requirements of the tests; never the task's own package.
        tree_files: built files that the base tree needs, committed with it.
        ro_files: data files, read-only in the sandbox.
        env: further environment of commands and tests.
        commit: the benchmark's own base commit, 40 digits; empty where it is not known.
    """

    source: str = ""
    test_command: str = ""
    requirements: tuple[str, ...] = DEFAULT_REQUIREMENTS
    tree_files: tuple[WheelFiles, ...] = ()
    ro_files: tuple[WheelFiles, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    commit: str = ""


@cache
def _recipes() -> dict[str, Recipe]:
    entries = json.loads((Path(__file__).parent / "recipes.json").read_text())
    return {
        name: Recipe(
            source=entry["source"],
            test_command=entry["test_command"],
            requirements=tuple(entry["requirements"]),
            tree_files=tuple(WheelFiles(**files) for files in entry.get("tree_files", [])),
            ro_files=tuple(WheelFiles(**files) for files in entry.get("ro_files", [])),
            env=entry.get("env", {}),
            commit=entry["commit"],
        )
        for name, entry in entries.items()
    }


def recipe_for(repo: str, task_id: int) -> Recipe:
    """The recipe of a task, or the plain one of a task that brings its own base tree and runner."""
    return _recipes().get(f"{repo}/task{task_id}", Recipe())


def runner_template() -> str:
    """Text of a ``runner.sh`` without its test command."""
    return _RUNNER_TEMPLATE.read_text()


def render_runner(test_command: str) -> str:
    """Text of the ``runner.sh`` that applies the patches and runs ``test_command``."""
    return runner_template().replace("@TEST_COMMAND@", test_command)
