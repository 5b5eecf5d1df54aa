"""A teacher matrix from its file, with the counts of evaluation runs filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.invalidation import reach
from verl_opsd.rundir import RunDir
from verl_opsd.teachers.worth import BARE, Matrix, parse
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore


def read_matrix(path: Path) -> Matrix:
    """The matrix of a file; cells that name a ``run`` get their counts from its evaluation episodes.

    Raises:
        OpsdError: no such file, no JSON, a run that is not the evaluation of its cell's context, runs that can't be compared
            (:func:`_require_comparable`), or see ``teachers.worth.parse``.
    """
    try:
        values = json.loads(path.read_text())
        cells: list[Any] = []
        runs: list[tuple[RunDir, Sequence[Episode]]] = []
        for cell in values["cells"]:
            if isinstance(cell, dict) and "run" in cell:
                run = RunDir((path.parent / Path(cell["run"]).expanduser()).resolve())
                episodes = _evaluated(cell, run)
                runs.append((run, episodes))
                cell = _measured(cell, run, episodes)
            cells.append(cell)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise OpsdError(
            f"{path}: {type(e).__name__}: {e}", "a teacher matrix is a JSON object with cells", "correct the file"
        ) from e
    _require_comparable(runs)
    return parse({**values, "cells": cells})


def _evaluated(cell: Mapping[str, Any], run: RunDir) -> list[Episode]:
    """The evaluation episodes of a cell's run.

    Raises:
        OpsdError: none, of several policy versions, of actors that had read another brief than the cell's context, or counts beside the run.
    """
    if counts := sorted(cell.keys() & {"pairs", "features", "invalidated"}):
        raise OpsdError(f"a cell with run and {', '.join(counts)}", "a cell's counts are given, or its run's", "leave one out")
    episodes = [e for e in EpisodeStore(run.episodes).episodes() if e.split == "eval"] if run.episodes.is_dir() else []
    if not episodes:
        raise OpsdError(
            f"{run.path} holds no evaluation episodes", "a cell's run is an evaluation run's directory", "correct the path"
        )
    meta = run.path / "meta.json"
    said = json.loads(meta.read_text()).get("opsd", {}).get("actor_brief") if meta.is_file() else None
    read = BARE if said is None or said["where"] == "train" else said["name"]
    context = cell.get("context")
    if read != context or (read == BARE and any(e.actor_brief_kind != "none" for e in episodes)):
        raise OpsdError(
            f"the cell of context {context!r} names {run.path}, whose actors had read {read!r} by its meta.json, by its episodes "
            f"briefs of the kinds {sorted({e.actor_brief_kind for e in episodes})}",
            "a context's numbers are those of a run with this brief in the actors' own prompts",
            "name the run that was evaluated with opsd.actor_brief.name of the context",
        )
    versions = sorted({e.model_version for e in episodes if e.scored})
    if len(versions) > 1:
        raise OpsdError(
            f"{run.path} evaluated the policy versions {versions}",
            "a cell is one model, and versions of a training run are several",
            "evaluate the one that is meant with +recipe=full_eval, or give its counts",
        )
    return episodes


def _measured(cell: Mapping[str, Any], run: RunDir, episodes: Sequence[Episode]) -> dict[str, Any]:
    """A cell with the counts of scored episodes; a context that is an answer counts here, though in no standings."""
    graded = [e for e in episodes if e.grade is not None]
    passed = [[f.passed for f in e.grade.features] for e in graded if e.grade is not None]
    counts: dict[str, Any] = {"invalidated": reach(run.path, {e.model_version for e in graded})}
    counts |= {"pairs": [sum(map(all, passed)), len(passed)], "features": [sum(map(sum, passed)), 2 * len(passed)]}
    return {**{k: v for k, v in cell.items() if k != "run"}, **counts}


def _require_comparable(runs: Sequence[tuple[RunDir, Sequence[Episode]]]) -> None:
    """
    Raises:
        OpsdError: one run for two cells, other pairs or another number of seeds than the first run's, or another contract, but for what
            serves the model.
    """
    for n, (run, episodes) in enumerate(runs):
        first, of_first = runs[0]
        if any(run.path == other.path for other, _ in runs[:n]):
            raise OpsdError(f"two cells name {run.path}", "a run is one model under one context", "name each cell's own run")
        played, wanted = (sorted(e.pair_key for e in some) for some in (episodes, of_first))
        if played != wanted:
            raise OpsdError(
                f"{run.path} played {len(played)} pairs ({len(set(played))} different), {first.path} {len(wanted)} "
                f"({len(set(wanted))} different){'' if set(played) == set(wanted) else ', not the same ones'}",
                "cells are compared on the same pairs, as often",
                "evaluate all of them on one subset, with as many seeds",
            )
        if all((r.path / "contract.json").is_file() for r in (first, run)):
            first.contract().require_same(run.contract(), str(run.path), without=("serving",), mine=str(first.path))
