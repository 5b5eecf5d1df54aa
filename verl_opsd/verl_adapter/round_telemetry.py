"""Per-position values that the engine reports: saved once a round, never averaged by verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: What names of such values begin with in verl's metrics.
TELEMETRY = "opsd/"


def save(path: Path, output: dict[str, Any], carried: int, row_names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """Takes the values out of verl's metrics and writes them; ``row`` is a place in ``row_names``.

    Args:
        carried: loss positions of the round.

    Returns:
        float32 values of all optimizer steps, by name.
    """
    values = {
        k.removeprefix(TELEMETRY): np.asarray(flat(output.pop(k)), np.float32) for k in list(output) if k.startswith(TELEMETRY)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as f:
        np.savez(f, carried=np.int64(carried), row_names=np.array(row_names), **values)  # type: ignore[arg-type]
    temporary.replace(path)
    return values


def means(values: Mapping[str, NDArray[np.float32]], teachers: Sequence[str]) -> dict[str, float]:
    """Means of the finite ones, nats where they are divergences; where there are several teachers, of each one's rows too."""
    found: dict[str, float] = {}
    for number, name in enumerate(teachers if len(teachers) > 1 else ()):
        mine = values["divergence"][values["teacher"] == number]
        found |= {f"{TELEMETRY}divergence/{name}/mean": float(mine.mean())} if mine.size else {}
    return found | {
        f"{TELEMETRY}{k}/mean": float(v.mean())
        for k, v in values.items()
        if k not in ("teacher", "row") and v.size and np.isfinite(v).all()
    }


def flat(values: Any) -> list[float]:
    """Numbers in nested lists, in order."""
    out: list[float] = []
    for v in values:
        if isinstance(v, (list, tuple, np.ndarray)):
            out.extend(flat(v))
        else:
            out.append(float(v))
    return out
