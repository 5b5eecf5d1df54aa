"""A teacher matrix from its file, with the counts of evaluation runs filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.invalidation import reach
from verl_opsd.rundir import RunDir
from verl_opsd.teachers.worth import Matrix, parse
from verl_opsd.tokens.store import EpisodeStore


def read_matrix(path: Path) -> Matrix:
    """The matrix of a file; cells that name a ``run`` get their counts from its evaluation episodes.

    Raises:
        OpsdError: no such file, no JSON, a run without scored evaluation episodes, or see ``teachers.worth.parse``.
    """
    try:
        values = json.loads(path.read_text())
        cells = [_measured(c, path.parent) if isinstance(c, dict) and "run" in c else c for c in values["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise OpsdError(
            f"{path}: {type(e).__name__}: {e}", "a teacher matrix is a JSON object with cells", "correct the file"
        ) from e
    return parse({**values, "cells": cells})


def _measured(cell: dict[str, Any], base: Path) -> dict[str, Any]:
    """A cell with the counts of its run's scored evaluation episodes; a context that is an answer counts here, though in no standings.

    Raises:
        OpsdError: no episodes, or the run's actors had read another brief than the cell's context.
    """
    run = RunDir((base / cell["run"]).expanduser())
    if not run.episodes.is_dir():
        raise OpsdError(f"{run.path} holds no episodes", "a cell's run is an evaluation run's directory", "correct the path")
    meta = run.path / "meta.json"
    said = json.loads(meta.read_text()).get("opsd", {}).get("actor_brief") if meta.is_file() else None
    if said is not None and said["where"] != "train" and said["name"] != cell.get("context"):
        raise OpsdError(
            f"the cell of context {cell.get('context')!r} names {run.path}, whose actors had read {said['name']!r}",
            "a context's numbers are those of a run with this brief in the actors' own prompts",
            "name the run that was evaluated with opsd.actor_brief.name of the context",
        )
    graded = [e for e in EpisodeStore(run.episodes).episodes() if e.split == "eval" and e.grade is not None]
    passed = [[f.passed for f in e.grade.features] for e in graded if e.grade is not None]
    counts: dict[str, Any] = {"invalidated": reach(run.path, {e.model_version for e in graded})}
    counts |= {"pairs": [sum(map(all, passed)), len(passed)], "features": [sum(map(sum, passed)), 2 * len(passed)]}
    return {**{k: v for k, v in cell.items() if k != "run"}, **counts}
