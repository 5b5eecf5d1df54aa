"""The `opsd` command: everything around a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_opsd import __version__
from verl_opsd.errors import OpsdError


def parser() -> argparse.ArgumentParser:
    """The command line; each sub-command sets ``func``, from parsed arguments to the exit code."""
    from verl_opsd.cli import (
        behaviour,
        briefs,
        corpus,
        doctor,
        episodes,
        evidence,
        export,
        matrix,
        probe,
        select,
        standings,
        tasks,
    )

    p = argparse.ArgumentParser(prog="opsd", description="Tools around on-policy distillation runs of verl.")
    p.add_argument("--version", action="version", version=f"verl-opsd {__version__}")
    subparsers = p.add_subparsers(dest="command", required=True)
    doctor.add_parser(subparsers)
    tasks.add_parser(subparsers)
    briefs.add_parser(subparsers)
    matrix.add_parser(subparsers)
    probe.add_parser(subparsers)
    behaviour.add_parser(subparsers)
    standings.add_parser(subparsers)
    corpus.add_parser(subparsers)
    export.add_parser(subparsers)
    select.add_parser(subparsers)
    evidence.add_parser(subparsers)
    episodes.add_parser(subparsers)
    report = subparsers.add_parser("report", help="show the table of a finished run")
    report.add_argument("run", type=Path, help="run directory")
    report.set_defaults(func=_report)
    return p


def _report(args: argparse.Namespace) -> int:
    from verl_opsd.evaluation.report import print_table

    path = args.run / "report.json"
    if not path.is_file():
        raise OpsdError(f"{path} does not exist", "a report is written when a run has ended", "name the run's directory")
    try:
        print_table(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OpsdError(
            f"{path} is not a report of this version ({type(error).__name__}: {error})",
            "a report is the JSON that a run of the same version has written",
            "name another run, or run again with the same hydra.run.dir to write it anew",
        ) from error
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 a check failed, 2 bad input."""
    args = parser().parse_args(argv)
    try:
        return int(args.func(args))
    except OpsdError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
