"""A teacher matrix from its file, with the counts of evaluation runs filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.report import standings
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
    run = RunDir((base / cell["run"]).expanduser())
    if not run.episodes.is_dir():
        raise OpsdError(f"{run.path} holds no episodes", "a cell's run is an evaluation run's directory", "correct the path")
    found = standings(e for e in EpisodeStore(run.episodes).episodes() if e.split == "eval")
    counts = {k: [found[k]["passed"], found[k]["total"]] for k in ("pairs", "features")}
    return {**{k: v for k, v in cell.items() if k != "run"}, **counts}
