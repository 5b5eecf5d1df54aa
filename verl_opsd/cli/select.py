"""``opsd select``: checkpoints by what they do, with the untouched base as an arm and the validation loss beside."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.shapes import BehaviourValue


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``select``."""
    p = subparsers.add_parser("select", help="qualification gates over evaluated checkpoints")
    p.add_argument(
        "runs", nargs="+", metavar="NAME=DIR", help="evaluation run of each checkpoint; NAME stepN has a validation loss"
    )
    p.add_argument("--split", choices=("train", "eval"), default="eval", help="episodes of a run directory; default eval")
    p.add_argument("--base", required=True, metavar="NAME", help="the untouched base among them")
    p.add_argument(
        "--gates", type=Path, help="JSON file of gates; default: A, non-empty patches, and C, submitted, at least half"
    )
    p.add_argument("--losses", type=Path, metavar="FILE", help="metrics.jsonl of the warm start")
    p.set_defaults(func=select)


def select(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints a table and the choice; 1 when no checkpoint that nothing invalidates qualifies and beats the base."""
    from verl_opsd.evaluation.selection import DEFAULT, chosen, read_gates, scan, val_losses
    from verl_opsd.evaluation.sources import load_models, model_standings, require_one_contract

    gates = read_gates(args.gates) if args.gates else DEFAULT
    require_one_contract(args.runs, None)
    models = load_models(args.runs, args.split)
    losses: dict[str, float] = {}
    if args.losses is not None:
        if not args.losses.is_file():
            raise OpsdError(f"--losses {args.losses}", "it is the metrics.jsonl of a warm start", "correct the path")
        every = {f"step{n}": loss for n, loss in val_losses(args.losses).items()}
        losses = {name: loss for name, loss in every.items() if name in models}
        if not losses:
            raise OpsdError(
                f"--losses {args.losses}: validation losses of {', '.join(every) or 'no step'}, arms {', '.join(models)}",
                "a loss stands beside the arm that is named stepN after its step",
                "name the arms so, or leave --losses out",
            )
    arms = scan(models, args.base, gates, losses)
    rows = model_standings(args.runs, models, args.split)
    invalidated = {r.model for r in rows if r.invalidated}
    table = Table("arm", *(f"{g.name}: {g.metric}" for g in gates), "features passed", "val loss", "qualified")
    for arm in arms:
        cells = [f"{_show(v.value)} {'pass' if v.passed else 'FAIL'}" for v in arm.verdicts]
        loss = "" if arm.val_loss is None else f"{arm.val_loss:.4f}"
        qualified = "invalidated" if arm.name in invalidated else "yes" if arm.qualified else "no"
        style = "strike" if arm.name in invalidated else None
        table.add_row(arm.name, *cells, _show(arm.features), loss, qualified, style=style)
    console = console or Console()
    console.print(table)
    for row in rows:
        for said in (*row.invalidated, *row.doubts):
            console.print(f"{row.model}: {said}", soft_wrap=True, highlight=False)
    valid = [arm for arm in arms if arm.name not in invalidated]
    best = None if args.base in invalidated else chosen(valid, args.base)
    console.print(
        f"chosen: {best or 'none; no valid checkpoint qualifies and passes more features than a valid base'}", highlight=False
    )
    return int(best is None)


def _show(value: BehaviourValue) -> str:
    if value.value is None:
        return "none"
    if value.low is None or value.high is None:
        return f"{value.value:.3g}"
    return f"{value.numerator:.0f} of {value.denominator} ({value.low:.0%} to {value.high:.0%})"
