"""What a run's episodes took, beside what was estimated before it started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import Episode

#: The estimate that a launch writes down (``verl_adapter.budget.Estimate``).
FILE = "estimate.json"
#: Sandboxes that are open while a pair plays: one for each agent and one for their remote; grading has one after them.
SANDBOXES = 3
UNITS = {
    "episodes": ".0f",
    "minutes": ".2f",
    "hours": ".3f",
    "gpu_hours": ".3f",
    "sandbox_hours": ".3f",
    "sandbox_usd": ".2f",
}


def spent(run: RunDir, episodes: Sequence[Episode], usd_per_hour: float, collects: bool) -> dict[str, Any]:
    """Estimate and measurement of each figure, by its name; empty where nothing was estimated.

    ``minutes`` are of one episode with its grade; ``hours`` those of the stages that collect and evaluate, of every start of the
    run; ``gpu_hours`` of all devices meanwhile. ``bound``: the estimates are what the contract's limits permit.

    Args:
        episodes: of the run's store.
        collects: whether the stage ``collect`` plays episodes; else it reads a corpus.
    """
    path = run.path / FILE
    if not path.is_file():
        return {}
    said = json.loads(path.read_text())
    stages = ("collect", "evaluate") if collects else ("evaluate",)
    hours = sum(s["seconds"] for s in run.stages() if s["stage"] in stages) / 3600
    pair_hours = sum(e.t_end - e.t_start for e in episodes) / 3600
    measured = {
        "episodes": len(episodes),
        "minutes": 60 * pair_hours / len(episodes) if episodes else None,
        "hours": hours,
        "gpu_hours": hours * said["gpus"],
        "sandbox_hours": SANDBOXES * pair_hours,
        "sandbox_usd": SANDBOXES * pair_hours * usd_per_hour,
    }
    said["episodes"] = said["train"] + said["evaluation"]
    figures = {k: {"estimated": said[k], "measured": v} for k, v in measured.items()}
    return {"bound": said["bound"], "figures": figures}


def spent_rows(found: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Name and text of each figure; what was never priced or has no device is left out."""
    word = "at most" if found.get("bound") else "about"
    for name, f in found.get("figures", {}).items():
        if f["measured"] is not None and (f["estimated"] or f["measured"]):
            prefix = "" if name == "episodes" else f"{word} "
            yield (
                name.replace("_", " ").replace("gpu", "GPU").replace("usd", "USD"),
                f"{prefix}{f['estimated']:{UNITS[name]}} estimated, {f['measured']:{UNITS[name]}} measured",
            )
