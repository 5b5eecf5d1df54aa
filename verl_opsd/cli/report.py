"""``opsd report``: the table, ``report.json`` and ``report.html`` of a run; or several runs side by side."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.evaluation.page.episodes import Options


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``report``; it sets ``func``, which takes the arguments and returns the exit code."""
    p = subparsers.add_parser(
        "report", help="write a run's report.html and report.json anew and show its table; or compare runs"
    )
    p.add_argument("run", type=Path, nargs="?", help="run directory")
    p.add_argument("--compare", type=Path, nargs="+", metavar="RUN", help="run directories, the first is the baseline")
    p.add_argument(
        "--teacher", type=Path, metavar="RUN", help="which of them is the teacher's own: the action mix shows drift towards it"
    )
    p.add_argument(
        "--reruns",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="which are the baseline's weights again: the noise floor",
    )
    p.add_argument("--varies", metavar="FIELD", help="the one field of the contract in which compared runs may differ")
    p.add_argument("--out", type=Path, default=Path(), help="folder for comparison.html and comparison.json; default: here")
    p.add_argument("--reveal", action="store_true", help="show hidden tests and answers")
    p.add_argument("--dataset", type=Path, metavar="DIR", help="folder of the tasks, when the run's own is not on this machine")
    p.add_argument(
        "--max-mb", type=float, default=20.0, help="size up to which conversations are put into the page; default: 20"
    )
    p.set_defaults(func=report)


def report(args: argparse.Namespace) -> int:
    """Writes the page and prints where it is; of one run the table too."""
    if (args.run is None) == (args.compare is None):
        raise OpsdError(
            "opsd report",
            "a report is of one run, or of several with --compare",
            "opsd report RUN, or opsd report --compare A B",
        )
    if args.compare is None and (args.teacher or args.reruns or args.varies):
        raise OpsdError(
            "--teacher, --reruns or --varies of one run", "they say how runs are compared", "name runs with --compare"
        )
    if not 0 < args.max_mb < math.inf:
        raise OpsdError(f"--max-mb {args.max_mb}", "a size is a number above 0", "leave it out for 20")
    if args.dataset is not None and not args.dataset.is_dir():
        raise OpsdError(f"--dataset {args.dataset} is no folder", "it holds the tasks of the run", "correct the path")
    if args.compare is not None:
        from verl_opsd.evaluation.write import write_comparison

        print(write_comparison(args.compare, args.out, _options(args), args.teacher, args.reruns, args.varies))
        return 0
    if (args.run / "meta.json").is_file() and (args.run / "contract.json").is_file():
        from verl_opsd.evaluation.page.gather import read_meta
        from verl_opsd.evaluation.write import write_report
        from verl_opsd.rundir import RunDir

        run = RunDir(args.run)
        said = write_report(run, read_meta(run)[1], _options(args))
        _table(run.report)
        print(run.path / "report.html")
        if said["evidence"]["not_copied"]:
            print(f"warning: {said['evidence']['not_copied']}")
    else:
        _table(args.run / "report.json")
    return 0


def _options(args: argparse.Namespace) -> Options:
    from verl_opsd.evaluation.page.episodes import Options

    return Options(reveal=args.reveal, dataset=args.dataset, budget=int(args.max_mb * 1e6))


def _table(path: Path) -> None:
    """Prints the table of a ``report.json``.

    Raises:
        OpsdError: there is none, or it is of another version.
    """
    from verl_opsd.evaluation.report import print_table

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
