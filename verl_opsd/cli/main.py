"""The `opsd` command: everything around a run."""

from __future__ import annotations

import argparse
import sys
import warnings

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
        evaluate,
        evidence,
        export,
        matrix,
        plan,
        probe,
        report,
        select,
        standings,
        sweep,
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
    evaluate.add_parser(subparsers)
    behaviour.add_parser(subparsers)
    standings.add_parser(subparsers)
    sweep.add_parser(subparsers)
    plan.add_parser(subparsers)
    corpus.add_parser(subparsers)
    export.add_parser(subparsers)
    select.add_parser(subparsers)
    evidence.add_parser(subparsers)
    episodes.add_parser(subparsers)
    report.add_parser(subparsers)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 a check failed, 2 bad input."""
    args = parser().parse_args(argv)
    # verl warns of each optional engine that is not installed; no command here uses one of them
    warnings.filterwarnings("ignore", r"\w+ engine is not available", module="verl.workers.engine")
    try:
        return int(args.func(args))
    except OpsdError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
