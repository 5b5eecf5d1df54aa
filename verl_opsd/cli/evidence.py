"""``opsd evidence verify|list|copy|invalidate|predict|claim``: the log of a run."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError
from verl_opsd.evidence import LOG, lines
from verl_opsd.evidence.chain import VERDICTS, verify
from verl_opsd.evidence.claims import STATUSES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``evidence`` and its commands; each sets ``func``, which takes the arguments and returns the exit code."""
    commands = subparsers.add_parser("evidence", help="check, show, copy and mark a run's evidence").add_subparsers(
        dest="evidence_command", required=True
    )
    check = commands.add_parser("verify", help="edits of the log or of a graded episode; 1 when there is one")
    check.add_argument("run", type=Path, help="run directory")
    check.add_argument("--against", type=Path, help="folder of an older copy, which the log must begin with")
    check.set_defaults(func=verify_run)
    show = commands.add_parser("list", help="the lines of the log")
    show.add_argument("run", type=Path, help="run directory")
    show.add_argument("--gate", help="only gates whose name begins so")
    show.add_argument("--verdict", choices=VERDICTS, help="only lines with this verdict")
    show.set_defaults(func=list_lines)
    keep = commands.add_parser("copy", help="copy the log elsewhere")
    keep.add_argument("run", type=Path, help="run directory")
    keep.add_argument("target", type=Path, help="folder outside the run directory, one a run")
    keep.set_defaults(func=copy_log)
    mark = commands.add_parser("invalidate", help="mark what depends on a version, contract or brief in every report")
    mark.add_argument("runs", type=Path, nargs="+", help="run directories, or folders that hold some")
    mark.add_argument(
        "--where",
        required=True,
        metavar="FIELD=VALUE",
        help="version=3, version=cooperbench==0.0.29, contract=HASH, brief=NAME",
    )
    mark.add_argument("--reason", required=True, help="stands in every report")
    mark.set_defaults(func=invalidate_runs)
    before = commands.add_parser("predict", help="write predictions down before a run measures anything")
    before.add_argument("run", type=Path, help="run directory")
    before.add_argument("file", type=Path, help="YAML file; docs/evidence.md describes it")
    before.set_defaults(func=predict)
    say = commands.add_parser("claim", help="add a claim to the ledger, or change the status of one")
    say.add_argument("run", type=Path, help="run directory")
    say.add_argument("id", help="short name of the claim")
    say.add_argument("--status", required=True, choices=STATUSES)
    say.add_argument("--text", default="", help="the claim; may be left out when its status changes")
    say.add_argument(
        "--support", nargs="*", default=[], help="measured: keys of report.json's numbers; verified in code: files"
    )
    say.add_argument("--root", type=Path, default=Path(), help="folder that those files are relative to")
    say.add_argument("--by", default="", help="superseded: the claim that took its place")
    say.add_argument("--why", default="", help="retracted: how it was found to be wrong")
    say.set_defaults(func=make_claim)


def _require_log(run: Path) -> None:
    if not (run / LOG).is_file():
        raise OpsdError(f"{run / LOG} does not exist", "a run directory holds its log", "name the run's directory")


def _warn(run: Path) -> None:
    from verl_opsd.evidence.copies import warning

    if text := warning(lines(run), run):
        print(f"warning: {text}", file=sys.stderr)


def verify_run(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints every finding about the log and the graded episodes; 1 when there is one."""
    from verl_opsd.evidence.copies import against
    from verl_opsd.evidence.graded import check_episodes

    console = console or Console()
    _require_log(args.run)
    log, findings = verify(args.run)
    for f in findings:
        if f.killed:
            console.print(f"note  {f}", soft_wrap=True, highlight=False, markup=False)
    told = [str(f) for f in findings if not f.killed]
    if args.against is not None:
        _require_log(args.against)
        told += map(str, against(args.run, args.against))
    states = check_episodes(args.run, log)
    told += [f"episode {e}: {state}: {why}" for e, (state, why) in sorted(states.items()) if state != "whole"]
    for text in told:
        console.print(f"FAIL  {text}", soft_wrap=True, highlight=False, markup=False)
    whole = Counter(state for state, _ in states.values())["whole"]
    console.print(
        f"{len(log)} lines, {whole} of {len(states)} episodes as graded: {'ok' if not told else f'{len(told)} findings'}",
        highlight=False,
    )
    _warn(args.run)
    return int(bool(told))


def list_lines(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the lines of the log, oldest first."""
    _require_log(args.run)
    log, findings = verify(args.run)
    table = Table("n", "time (UTC)", "gate", "verdict", "value", "threshold", "detail")
    for x in log:
        if x["gate"].startswith(args.gate or "") and args.verdict in (None, x["verdict"]):
            when = datetime.datetime.fromtimestamp(x["time"], datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            value, threshold = (
                f"{v:.4g}" if isinstance(v, float) else "-" if v is None else str(v) for v in (x["value"], x["threshold"])
            )
            table.add_row(str(x["n"]), when, x["gate"], x["verdict"], value, threshold, x["detail"])
    (console or Console()).print(table)
    if wrong := [f for f in findings if not f.killed]:
        print(f"warning: {wrong[0]}; {len(wrong)} findings: opsd evidence verify {args.run}", file=sys.stderr)
    return 0


def copy_log(args: argparse.Namespace, console: Console | None = None) -> int:
    """Copies the log; prints where to."""
    from verl_opsd.evidence.copies import copy

    _require_log(args.run)
    path = copy(args.run, args.target)
    (console or Console()).print(f"{len(lines(path.parent))} lines in {path}", soft_wrap=True, highlight=False)
    return 0


def invalidate_runs(args: argparse.Namespace, console: Console | None = None) -> int:
    """Marks every run that is meant; prints each, and says which reports have to be written again."""
    from verl_opsd.evidence.invalidation import invalidate, parse_where, runs_below

    console = console or Console()
    field, value = parse_where(args.where)
    runs = runs_below(args.runs)
    marked = [run for run in runs if invalidate(run, field, value, args.reason)]
    for run in marked:
        console.print(f"marked {run}; show it in its report: opsd report {run}", soft_wrap=True, highlight=False)
    console.print(f"{len(marked)} of {len(runs)} runs have {args.where}", highlight=False)
    return int(not marked)


def predict(args: argparse.Namespace, console: Console | None = None) -> int:
    """Writes predictions down; prints their hash."""
    from verl_opsd.evidence.predictions import write_down

    digest = write_down(args.run, args.file)
    (console or Console()).print(f"{args.file}: SHA-256 {digest} in {args.run / LOG}", soft_wrap=True, highlight=False)
    return 0


def make_claim(args: argparse.Namespace, console: Console | None = None) -> int:
    """Adds a claim; prints the ledger."""
    import json

    from verl_opsd.evidence.claims import Claim, claim, claims

    _require_log(args.run)
    report = args.run / "report.json"
    numbers = json.loads(report.read_text()).get("numbers", {}) if report.is_file() else {}
    claim(args.run, Claim(args.id, args.text, args.status, tuple(args.support), args.by, args.why), numbers, args.root)
    table = Table("claim", "status", "text", "stands on")
    for c in claims(lines(args.run)):
        table.add_row(c.id, c.status, c.text, ", ".join(c.support) or c.by or c.why)
    (console or Console()).print(table)
    return 0
