"""``opsd sweep``: the jobs of a Hydra multirun in one table and one plot."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console

from verl_opsd.cli.tables import Table


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``sweep``."""
    p = subparsers.add_parser("sweep", help="the jobs of a Hydra multirun in one table and plot (sweep.html, sweep.json)")
    p.add_argument("dir", type=Path, metavar="SWEEP_DIR", help="hydra.sweep.dir of the multirun")
    p.set_defaults(func=sweep)


def sweep(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the table; writes the page and its data beside the jobs; 1 when a job was not evaluated."""
    from verl_opsd.cli.standings import rate_text
    from verl_opsd.evaluation.sweep import page, read_sweep
    from verl_opsd.rundir import write_json

    console = console or Console()
    found = read_sweep(args.dir)
    keys = list(found.jobs[0].swept)
    table = Table("job", *keys, "scored", "features", "pairs", "submitted", "median steps")
    for job in found.jobs:
        s = job.standing
        cells = (
            ["not evaluated"]
            if s is None
            else [
                f"{s.scored} of {s.ran}",
                *map(rate_text, (s.features, s.pairs, s.submitted)),
                f"{s.median_steps:g}" if s.median_steps is not None else "",
            ]
        )
        table.add_row(str(job.number), *(job.swept[k] for k in keys), *cells, style="strike" if s and s.invalidated else None)
    console.print(table)
    for job in found.jobs:
        for said in (*job.standing.invalidated, *job.standing.doubts) if job.standing else ():
            console.print(f"job {job.number}: {said}", soft_wrap=True, highlight=False)
    console.print(
        f"contract: {'one for all jobs' if found.varies is None else f'{found.varies} varies, as declared'}", highlight=False
    )
    (args.dir / "sweep.html").write_text(page(found))
    write_json(args.dir / "sweep.json", dataclasses.asdict(found))
    console.print(f"{args.dir / 'sweep.html'}", soft_wrap=True, highlight=False)
    return int(any(j.standing is None for j in found.jobs))
