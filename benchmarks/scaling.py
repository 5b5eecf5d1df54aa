"""How runs of one layout scale with their student ranks: ``python benchmarks/scaling.py RUN_DIR RUN_DIR...``

Reads the reports of runs on the same rows (``+recipe=opd_offline corpus=RUN_DIR`` with 1, 2, 4, 8 ranks). Efficiency of a stage is its tokens
a second and rank over those of the run with the fewest ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STAGES = ("score", "train")


@dataclass(frozen=True)
class Run:
    """One report: tokens a second by stage, largest peak of a student rank (bytes), least and largest idle share while training, and
    what must be the same in runs that are compared."""

    name: str
    ranks: int
    tokens_a_second: dict[str, float]
    peak_bytes: int
    idle: tuple[float, float] | None
    same: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """
        Raises:
            SystemExit: no report, or one without device figures.
        """
        path = folder / "report.json"
        report = json.loads(path.read_text()) if path.is_file() else {}
        peaks = {k: v for k, v in report.get("devices", {}).get("peak_bytes", {}).items() if k.startswith("student ")}
        if not peaks or not report["tokens_a_second"]:
            raise SystemExit(f"error: {path} has no figures of student ranks: give directories of runs that trained and ended")
        idle = [v for k, v in report["devices"]["idle"].get("train", {}).items() if k in peaks]
        span = (min(idle), max(idle)) if idle else None
        branches = report.get("branches") or {}
        same = {k: branches.get(k) for k in ("sequence_tokens", "loss_tokens")} | {
            k: report.get(k) for k in ("brief", "teacher")
        }
        return cls(folder.name, len(peaks), report["tokens_a_second"], max(peaks.values()), span, same)


def efficiency(run: Run, first: Run, stage: str) -> float | None:
    """Tokens a second and rank of ``run`` over those of ``first``; None where either has none."""
    if stage not in run.tokens_a_second or stage not in first.tokens_a_second:
        return None
    return run.tokens_a_second[stage] / run.ranks / (first.tokens_a_second[stage] / first.ranks)


def table(runs: Sequence[Run]) -> Table:
    """One row a run, the fewest ranks first.

    Raises:
        SystemExit: no run, or runs of other rows, whose rates say nothing about ranks.
    """
    if not runs:
        raise SystemExit("error: no run: give run directories")
    ordered = sorted(runs, key=lambda r: r.ranks)
    for r in ordered[1:]:
        other = [f"{k} {r.same[k]} and {v}" for k, v in ordered[0].same.items() if r.same[k] != v]
        if other:
            raise SystemExit(
                f"error: {r.name} and {ordered[0].name} ran other rows ({'; '.join(other)}): compare runs on one corpus"
            )
    out = Table("run", "ranks", *(f"{s}: tokens/s, efficiency" for s in STAGES), "peak GB a rank", "idle while training")
    for r in ordered:
        cells = []
        for stage in STAGES:
            share = efficiency(r, ordered[0], stage)
            cells.append("-" if share is None else f"{r.tokens_a_second[stage]:.0f}, {share:.0%}")
        idle = "-" if r.idle is None else f"{r.idle[0]:.0%} to {r.idle[1]:.0%}"
        out.add_row(r.name, str(r.ranks), *cells, f"{r.peak_bytes / 1e9:.2f}", idle)
    return out


if __name__ == "__main__":
    Console(width=120).print(table([Run.read(Path(folder)) for folder in sys.argv[1:]]))
