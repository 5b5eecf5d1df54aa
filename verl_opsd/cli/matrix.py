"""``opsd teacher-matrix``: context x model outcomes with intervals, headroom, and the worth-distilling gate."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``teacher-matrix``."""
    p = subparsers.add_parser("teacher-matrix", help="which contexts are worth distilling; 1 when a gated one is not")
    p.add_argument(
        "table", type=Path, help="JSON file with cells, answer_free, tasks and noise; a cell may name a run directory"
    )
    p.add_argument(
        "--gate", action="append", default=[], metavar="CONTEXT", help="gate this context; default: all, without exit code"
    )
    p.add_argument("--override", metavar="REASON", help="go on in spite of a refusal; the reason is recorded")
    p.add_argument("--run", type=Path, help="run directory whose evidence.jsonl gets the verdicts")
    p.set_defaults(func=teacher_matrix)


def teacher_matrix(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the tables; 1 when a context of ``--gate`` is refused without ``--override``."""
    from verl_opsd.evaluation.teacher_matrix import read_matrix
    from verl_opsd.rundir import RunDir
    from verl_opsd.teachers.worth import BARE, headroom, worth

    if args.override is not None and len(args.override.split()) < 3:
        raise OpsdError(
            f"--override {args.override!r}", "an override is recorded with its reason", "give the reason in a few words"
        )
    if (args.override is not None or args.run is not None) and not args.gate:
        raise OpsdError("--override or --run without --gate", "a verdict is of a named context", "name it with --gate")
    matrix = read_matrix(args.table)
    console = console or Console()
    table = Table("context", "model", "pairs", "95%", "features")
    for context in matrix.contexts:
        for model in ("student", "teacher"):
            cell = matrix.cells.get((context, model))  # type: ignore[arg-type]
            if cell is None:
                table.add_row(context, model, "not measured", "", "")
                continue
            low, high = cell.pairs.interval
            features = "" if cell.features is None else f"{cell.features.passed}/{cell.features.total}"
            counts = (f"{cell.pairs.passed}/{cell.pairs.total}", f"{low:.0%} to {high:.0%}", features)
            table.add_row(context, model, *counts, style="strike" if cell.invalidated else None)
    console.print(table)
    for (context, model), cell in matrix.cells.items():
        for said in cell.invalidated:
            console.print(f"{model} with {context}: {said}", soft_wrap=True, highlight=False)
    for context in dict.fromkeys(t.context for t in matrix.tasks):
        parts = headroom(t for t in matrix.tasks if t.context == context)
        console.print(f"headroom under {context}: {', '.join(f'{n} {name}' for name, n in parts.items())}", soft_wrap=True)
    code = 0
    for context in args.gate or [c for c in matrix.contexts if c != BARE]:
        conditions = worth(matrix, context)
        passed = all(c.passed for c in conditions)
        console.print(f"{context}: {'worth distilling' if passed else 'refused'}")
        for c in conditions:
            value = "" if c.value is None else f"; difference {c.value[0]:+.2f} (95% {c.value[1]:+.2f} to {c.value[2]:+.2f})"
            console.print(f"  {'pass' if c.passed else 'FAIL'}  {c.name}: {c.detail}{value}", soft_wrap=True, highlight=False)
        if args.run is not None:
            failed = [c.name for c in conditions if not c.passed]
            detail = f"{context}: {'; '.join(failed) or 'all conditions'}" + (
                f"; overridden: {args.override}" if args.override else ""
            )
            RunDir(args.run).evidence("worth_distilling", len(conditions) - len(failed), len(conditions), passed, detail)
        if args.gate and not passed and args.override is None:
            code = 1
    return code
