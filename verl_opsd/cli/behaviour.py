"""``opsd behaviour``: how agents acted, by the versioned metrics of ``evaluation.behaviour``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

from rich.console import Console
from rich.table import Column
from rich.text import Text

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``behaviour``."""
    p = subparsers.add_parser("behaviour", help="communication, methods, actions, merges, endgame and loops of runs")
    p.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="run directory, or a folder of the harness' logs")
    p.add_argument("--split", choices=("train", "eval"), default="eval", help="episodes of a run directory; default eval")
    p.add_argument("--base", help="model that drift of the action mix is measured from")
    p.add_argument("--teacher", help="model that drift is measured towards")
    p.add_argument(
        "--varies", metavar="FIELD", help="the one field of the contract in which runs that drift is measured over may differ"
    )
    p.add_argument("--definitions", action="store_true", help="print each metric's definition")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    p.set_defaults(func=behaviour)


def behaviour(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the table of the runs."""
    from verl_opsd.evaluation.behaviour.table import behaviour as measured
    from verl_opsd.evaluation.shapes import BehaviourValue
    from verl_opsd.evaluation.sources import load_models, model_standings, require_one_contract
    from verl_opsd.rundir import write_json

    if args.base is not None or args.teacher is not None:
        require_one_contract(args.runs, args.varies)
    elif args.varies is not None:
        raise OpsdError(
            "--varies without --base or --teacher", "it is about runs that are compared", "name the base, or leave it out"
        )
    console = console or Console()
    models = load_models(args.runs, args.split)
    found = measured(models, base=args.base, teacher=args.teacher)
    rows = model_standings(args.runs, models, args.split)
    invalidated = {r.model: r.invalidated for r in rows}
    doubts = {r.model: r.doubts for r in rows}
    contracts = {r.model: r.contract for r in rows}

    def shown(v: BehaviourValue, unit: str) -> str:
        if v.value is None:
            return f"- of {v.denominator}"
        if unit == "share":
            return f"{v.value:.1%} ({v.numerator:g}/{v.denominator})"
        return f"{v.value:.4g} (of {v.denominator})"

    console.print(f"behaviour, definitions version {found.version}", highlight=False)
    for name in found.models:
        far = found.distance[name]
        console.print(
            f"{name}: {found.pairs[name]} scored pairs, {found.void[name]} left out for infrastructure faults, "
            f"contract {contracts[name][:12] or 'unverified'}, "
            f"distance to the reference corpus {'not defined' if far is None else f'{far:.2f}'}",
            highlight=False,
            soft_wrap=True,
        )
        for said in (*invalidated[name], *doubts[name]):
            console.print(f"{name}: {said}", highlight=False, soft_wrap=True)
    heads = [Column(Text(name, "strike" if invalidated[name] else "")) for name in found.models]
    for group, metrics in itertools.groupby(found.metrics, key=lambda m: m.group):
        table = Table(group, "reference", *heads, "note")
        for m in metrics:
            known = any(v.value is not None for v in m.values.values())
            notes = ["constant"] * (m.constant and known) + [f"{name} {way}" for name, way in m.drift.items()]
            cells = [shown(m.values[name], m.unit) for name in found.models]
            title = f"{m.title}\n  {m.definition}" if args.definitions else m.title
            unit = "" if m.unit == "share" else f" ({m.unit})"
            table.add_row(title + unit, "" if m.reference is None else f"{m.reference:g}", *cells, ", ".join(notes))
        console.print(table)
    strata = Table("messages a pair", "model", "pairs", "conflicts", "features")
    for s in found.strata:
        label = f"{s.low} and more" if s.high is None else f"{s.low} to {s.high}"
        strata.add_row(label, s.model, str(s.pairs), *(f"{r.passed}/{r.total}" for r in (s.conflicts, s.features)))
    console.print(strata)
    if args.json is not None:
        write_json(
            args.json, dataclasses.asdict(found) | {"invalidated": invalidated, "doubts": doubts, "contracts": contracts}
        )
    return 0
