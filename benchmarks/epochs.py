"""A stored run trained on twice by a device teacher that is the student itself, without a brief: what no teacher pass is made for.

    python benchmarks/epochs.py OPD_RUN

The recipe trains three epochs. Prints rows that the teacher scored and rows that came from its cache, and the divergence of the two,
which would be zero by arithmetic without rounding (float32).
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

from demo import machine, run


def measured(folder: Path) -> str:
    """One line of a finished run's stages, report and evidence."""
    scored = [json.loads(p.read_text())["outputs"] for p in sorted((folder / "stages").glob("*-score.json"))]
    report = json.loads((folder / "report.json").read_text())
    evidence = [json.loads(line) for line in (folder / "evidence.jsonl").read_text().splitlines()]
    (identity,) = [e for e in evidence if e.get("gate") == "identity"]
    positions, divergence = report["distillation"]["loss_positions"], report["distillation"]["kl_mean"]
    misses, hits = (sum(s[f"cache_{k}"] for s in scored) for k in ("misses", "hits"))
    return f"{positions:>14} {misses:>14} {hits:>12} {identity['value']:>14.1e} {divergence:>14.1e}"


def main() -> None:
    """Both runs, with a cache of their own."""
    corpus = Path(sys.argv[1]).resolve()
    student = json.loads((corpus / "meta.json").read_text())["student"]
    words = [
        "+recipe=opd_offline",
        f"corpus={corpus}",
        "teacher=device",
        f"opsd.teacher.path={student}",
        "opsd.brief.name=none",
    ]
    lines = []
    with tempfile.TemporaryDirectory(prefix="epochs-") as folder:
        os.environ["OPSD_CACHE"] = f"{folder}/cache"
        for n in (1, 2):
            lines.append(measured(run(words, Path(folder, f"run{n}"))))
    print(f"{datetime.date.today()}, {machine()}: python benchmarks/epochs.py OPD_RUN\n")
    print("run  loss positions  teacher passes   from cache       identity  nats, 3 epochs")
    for n, line in enumerate(lines, 1):
        print(f"{n:3} {line}")


if __name__ == "__main__":
    main()
