"""``opsd standings``: what models scored, their failures, who did the work, and what may be said of their differences."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column
from rich.text import Text

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.shapes import CAUSES, MERGES, WORK, Comparison, Rate, Standing
from verl_opsd.tokens.records import Episode


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``standings``."""
    p = subparsers.add_parser("standings", help="standings of evaluated models, and comparisons on common pairs")
    p.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="run directory, or a folder of the harness' logs")
    p.add_argument("--split", choices=("train", "eval"), default="eval", help="episodes of a run directory; default eval")
    p.add_argument("--baseline", metavar="NAME", help="compare every other model with this one")
    p.add_argument("--reruns", metavar="NAME,NAME", help="models that are the baseline's weights again: the noise floor")
    p.add_argument("--varies", metavar="FIELD", help="the one field of the contract in which compared runs may differ")
    p.add_argument("--correction", choices=("holm", "bh"), default="holm", help="for several comparisons; default holm")
    p.add_argument(
        "--grade-alone", metavar="DATASET", help="grade each patch alone first: who did the work; `pocket` or a folder"
    )
    p.add_argument("--grid", action="store_true", help="one row a pair, one column a model")
    p.add_argument("--json", type=Path, metavar="FILE", help="write standings and comparisons as JSON")
    p.set_defaults(func=standings)


def standings(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the tables; 1 when a patch could not be graded alone."""
    from verl_opsd.evaluation.sources import load_models, model_standings
    from verl_opsd.rundir import write_json

    console = console or Console()
    code = _grade_alone(args, console) if args.grade_alone else 0
    models = load_models(args.runs, args.split)
    rows = model_standings(args.runs, models, args.split)
    console.print(table(rows))
    for row in rows:
        for said in (*row.stamps, *row.differences):
            console.print(f"{row.model}: {said}", soft_wrap=True, highlight=False)
    if args.grid:
        console.print(grid(rows))
    found = _compared(args, models, rows)
    marked = {r.model for r in rows if r.invalidated}
    for c in found:
        sides = sorted({c.model, c.baseline} & marked)
        note = f"; invalidated: {', '.join(sides)}" if sides else ""
        console.print(f"{c.sentence}{note}", soft_wrap=True, highlight=False)
    if args.json is not None:
        write_json(args.json, {k: [dataclasses.asdict(x) for x in v] for k, v in (("standings", rows), ("comparisons", found))})  # type: ignore[attr-defined]
    return code


def table(rows: Sequence[Standing]) -> Table:
    """Models as columns; each rate with its denominator and 95% interval."""
    out = Table("", *map(heading, rows), title="standings")

    def add(title: str, *cells: str) -> None:
        if any(cells):
            out.add_row(title, *cells)

    def numbers(title: str, attribute: str, form: str) -> None:
        add(title, *("" if getattr(r, attribute) is None else format(getattr(r, attribute), form) for r in rows))

    def counts(title: str, attribute: str, keys: Sequence[str]) -> None:
        add(
            title, *(", ".join(f"{n} {k.replace('_', ' ')}" for k in keys if (n := getattr(r, attribute).get(k))) for r in rows)
        )

    add("invalidated", *("\n".join(r.invalidated) for r in rows))
    add("evidence", *("\n".join(r.doubts) for r in rows))
    add("planned, ran, scored", *(f"{'-' if r.planned is None else r.planned}, {r.ran}, {r.scored}" for r in rows))
    add("void (infrastructure)", *(", ".join(f"{n} {k.replace('_', ' ')}" for k, n in r.void.items()) or "0" for r in rows))
    for title, attribute in (
        ("features passed", "features"),
        *([("features passed strictly", "features_strict")] if any(r.differences for r in rows) else []),
        ("pairs passed", "pairs"),
        ("pairs with a pass", "pairs_any"),
        ("non-empty patches", "non_empty"),
        ("submitted", "submitted"),
        ("opened a pull request", "opened_pr"),
    ):
        add(f"{title} (of {getattr(rows[0], attribute).of})", *(rate_text(getattr(r, attribute)) for r in rows))
    numbers("median patch (bytes)", "median_patch_bytes", ".0f")
    numbers("median non-empty patch (bytes)", "median_non_empty_bytes", ".0f")
    numbers("patches a pair (kB)", "patch_kb_per_pair", ".1f")
    counts("merges", "merges", MERGES)
    counts("who did the work", "work", WORK)
    counts("features by cause", "causes", CAUSES)
    counts("exits", "exits", sorted({k for r in rows for k in r.exits}))
    numbers("minutes a pair", "minutes_per_pair", ".1f")
    numbers("messages a pair", "messages_per_pair", ".1f")
    numbers("median steps", "median_steps", ".0f")
    numbers("prompt tokens a pair", "prompt_tokens_per_pair", ",.0f")
    numbers("policy tokens a pair", "policy_tokens_per_pair", ",.0f")
    numbers("cost a pair", "cost_per_pair", ".4g")
    numbers("parameters", "parameters", ",")
    numbers("active parameters", "active_parameters", ",")
    add("contract", *(r.contract[:12] or "unverified" for r in rows))
    add("serving", *("\n".join(f"{k} {v}" for k, v in r.serving.items() if v) for r in rows))
    return out


def heading(row: Standing) -> Column:
    """A model's name, struck through where it is invalidated."""
    return Column(Text(row.model, "strike" if row.invalidated else ""))


def grid(rows: Sequence[Standing]) -> Table:
    """One row a pair: features passed of those scored, merges, and minutes and messages a seed."""
    cells = {(r.model, c.pair): c for r in rows for c in r.grid}
    out = Table("pair", *map(heading, rows), title="per task")
    for pair in sorted({p for _, p in cells}):
        line = []
        for r in rows:
            c = cells.get((r.model, pair))
            if c is None:
                line.append("not run")
                continue
            merges = ", ".join(f"{n} {k}" if n > 1 else k for k, n in c.merges.items()).replace("_", " ")
            more = "" if c.minutes is None else f", {c.minutes:.1f} min, {c.messages:.0f} msgs"
            line.append(f"{c.features}/{c.of} {merges}{more}{f', {c.void} void' if c.void else ''}")
        out.add_row(pair, *line)
    return out


def rate_text(r: Rate) -> str:
    """Count, share and 95% interval."""
    if r.low is None or r.high is None:
        return "none"
    return f"{r.passed}/{r.total} {r.value:.0%} ({r.low:.0%} to {r.high:.0%})"


def _compared(args: argparse.Namespace, models: Mapping[str, Sequence[Episode]], rows: Sequence[Standing]) -> list[Comparison]:
    """Comparisons of every model with the baseline, on pairs and on features; none without a baseline."""
    from verl_opsd.evaluation.sources import comparisons, require_one_contract

    reruns = args.reruns.split(",") if args.reruns else []
    if args.baseline is None:
        if reruns:
            raise OpsdError("--reruns without --baseline", "a noise floor is of the baseline's weights", "name the baseline")
        return []
    require_one_contract(args.runs, args.varies)
    nodes = {r.model: r.serving.get("node", "node not recorded") for r in rows}
    return comparisons(models, args.baseline, reruns, nodes, args.correction)


def _grade_alone(args: argparse.Namespace, console: Console) -> int:
    from verl_opsd.contract import EvalContract
    from verl_opsd.cooperbench.dataset import dataset_folder
    from verl_opsd.evaluation.alone import grade_alone
    from verl_opsd.evaluation.sources import split_name
    from verl_opsd.rundir import RunDir
    from verl_opsd.tokens.store import EpisodeStore

    dataset = dataset_folder(args.grade_alone, "--grade-alone")
    code = 0
    for spec in args.runs:
        run = RunDir(split_name(spec)[1])
        if not run.episodes.is_dir():
            continue
        contract: EvalContract = run.contract()
        episodes = [e for e in EpisodeStore(run.episodes).episodes() if e.split == args.split]
        faults = grade_alone(
            run,
            episodes,
            dataset,
            backend=contract.sandbox,
            allow_unsafe=contract.sandbox == "process",
            timeout_s=contract.grade_timeout_s,
            workers=contract.concurrency,
        )
        for episode, kind in sorted(faults.items()):
            console.print(f"{run.path}: {episode} was not graded alone: {kind}", soft_wrap=True, highlight=False)
            code = 1
    return code
