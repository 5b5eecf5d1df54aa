"""Seconds until a sandbox has run its first command, alone and sixteen at once, and seconds of grading a real pair.

    python benchmarks/sandbox.py [--dataset DATASET --tasks pallets_jinja_task/task1621 pallets_click_task/task2956]

A start is the making of a bubblewrap sandbox and ``true`` in it, as an episode makes one. Beside it the time of a plain ``/bin/true``, which says
how busy the machine was. A grading merges the two gold patches of a pair and runs both features' hidden tests; each pair that DATASET's
``releases.json`` calls clean is graded once after a first one, whose time is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.prepare import prepare
from verl_opsd.cooperbench.sandbox import Limits, SandboxSpec, make_sandbox
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import InfraFault

TASKS = ("pallets_jinja_task/task1621", "pallets_click_task/task2956")


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """Of one call."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def start(folder: Path, number: int) -> None:
    """Makes a sandbox, runs a command in it, closes it.

    Raises:
        InfraFault: it does not start.
        SystemExit: the command fails.
    """
    workspace = folder / str(number)
    (workspace / "repo").mkdir(parents=True)
    sandbox = make_sandbox("bubblewrap", SandboxSpec(f"bench-{number}", workspace, limits=Limits()))
    try:
        if sandbox.run(["true"], timeout_s=60).returncode != 0:
            raise SystemExit("error: a sandbox's first command failed")
    finally:
        sandbox.close()


def starts(count: int) -> list[str]:
    """Rows of ``count`` starts one after another, and of ``count`` times sixteen at once over four."""
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder), 0)  # the checks that are made once a process
        plain = [seconds_of(subprocess.check_call, ["/bin/true"]) for _ in range(count)]
        alone = [seconds_of(start, Path(folder), n) for n in range(1, count + 1)]
        failed, together = 0, []
        with ThreadPoolExecutor(16) as pool:
            for group in range(count // 4):
                first = 1000 + 16 * group
                asked = [pool.submit(seconds_of, start, Path(folder), n) for n in range(first, first + 16)]
                for one in asked:
                    try:
                        together.append(one.result())
                    except InfraFault:
                        failed += 1
    return [
        row("/bin/true, no sandbox", plain),
        row("a sandbox's start, first command and end", alone),
        row(f"the same, sixteen at once ({failed} failed)", together),
    ]


def gradings(dataset: Path, tasks: Sequence[str]) -> list[str]:
    """A row a task."""
    seen = json.loads((dataset / "releases.json").read_text())
    rows = []
    for name in tasks:
        task_dir = dataset / name
        prepared, times = prepare(task_dir), []
        repo, task = name.split("/")
        for features in (seen[name]["pairs_clean"][0], *seen[name]["pairs_clean"]):
            pair = PairTask(dataset, repo, int(task.removeprefix("task")), tuple(features))
            patches = [(task_dir / f"feature{f}" / "feature.patch").read_text() for f in features]
            started = time.perf_counter()
            grade = grade_pair(pair, prepared, *patches)
            times.append(time.perf_counter() - started)
            if grade.reward != 1.0:
                raise SystemExit(f"error: {pair.key}: gold patches are not graded as passing ({grade.merge})")
        rows.append(row(f"grading a pair of {name}", times[1:]))
    return rows


def row(label: str, times: Sequence[float]) -> str:
    """Count, median and largest, in milliseconds."""
    if not times:
        return f"{label:58} {0:5}"
    return f"{label:58} {len(times):5} {1e3 * statistics.median(times):9.0f} {1e3 * max(times):9.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="starts one after another")
    parser.add_argument("--dataset", type=Path, help="folder of real tasks; without it no pair is graded")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    args = parser.parse_args(argv)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before it")
    print(f"{'':58} {'count':>5} {'median ms':>9} {'most ms':>9}")
    for line in starts(args.count):
        print(line, flush=True)
    for line in gradings(args.dataset.absolute(), args.tasks) if args.dataset else []:
        print(line, flush=True)


if __name__ == "__main__":
    main()
