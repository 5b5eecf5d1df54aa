"""Seconds and bytes of ``opsd report`` over 1,000 episodes, seconds until Chromium has opened the page, and seconds of the behaviour metrics.

    python benchmarks/report.py [--episodes 1000] [--run RUN_DIR]

The run is made up: pairs of agents with 12 model calls each, four fifths of them trained on, so that their conversations are coloured.
Seconds are those of the command as a user waits for it; in brackets its processor time, which other work on the machine changes less.
``--run`` takes a finished run instead. Chromium: ``apt-get install chromium``.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo import RESULTS, ROOT, machine

sys.path[:0] = [str(ROOT / "tests"), *(str(ROOT / "tests" / "unit" / x) for x in ("page", "evaluation"))]
from browser import browse, chromium  # noqa: E402
from page_run import make_run  # noqa: E402
from synthetic import long_episodes  # noqa: E402

from verl_opsd.evaluation.behaviour.table import behaviour  # noqa: E402


def report(run: Path) -> str:
    """The line of the command."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "verl_opsd.cli.main", "report", str(run)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    size = (run / "report.html").stat().st_size / 1e6
    return f"opsd report, {len(list((run / 'episodes').glob('*-*')))} episodes: {seconds:.1f} s ({cpu:.1f} s), {size:.1f} MB"


async def opened(page: Path, profile: Path) -> str:
    """The line of the browser: the best of three, as the page itself measures it."""
    async with browse(profile) as browser:
        seconds = [await browser.open(f"file://{page}") for _ in range(3)]
        assert not browser.problems, browser.problems
    return f"opened in Chromium: {min(seconds):.2f} s"


def measured() -> str:
    """The line of the behaviour metrics."""
    episodes = long_episodes()
    begin, cpu = time.monotonic(), time.process_time()
    behaviour({"m": episodes})
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    return f"behaviour metrics, 8,000 messages and 200,000 commands: {seconds:.1f} s ({cpu:.1f} s)"


def main() -> None:
    """Prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--run", type=Path)
    args = parser.parse_args()
    lines = [f"{datetime.date.today()}, {machine()}: python benchmarks/report.py", ""]
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as work:
        evaluated = args.episodes // 10  # before and after
        run = args.run or make_run(Path(work) / "run", 10, (args.episodes - 2 * evaluated) // 10, evaluated, 12).path
        lines.append(report(run))
        if chromium() is not None:
            lines.append(asyncio.run(opened((run / "report.html").resolve(), Path(work) / "profile")))
    lines.append(measured())
    print("\n".join(lines))
    if args.run is None and args.episodes == 1000:
        (RESULTS / "report.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
