"""Runs the demo, then the offline recipe on its episodes; writes the tables and pastes them where the markers stand.

    python benchmarks/demo.py

Every file below that holds ``<!-- demo:NAME -->`` ... ``<!-- /demo -->`` gets what was printed at the end of that run,
with the command, the machine, the date and the seconds.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILES = ("README.md", "recipes/opd/README.md", "recipes/opd_offline/README.md")
BOX = re.compile(r"^ *opd\S* \(scale .*?^└[─┴]+┘$", re.MULTILINE | re.DOTALL)


def machine() -> str:
    """Processor, cores and memory."""
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", info)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, no accelerator"


def measure(name: str, shown: str, arguments: list[str]) -> str:
    """Runs one recipe and gives its block: what was run, where, and the table that it printed."""
    started = time.monotonic()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - started
    table = BOX.search(done.stdout)
    if done.returncode or table is None:
        sys.exit(f"{done.stdout[-4000:]}\n{name}: exit code {done.returncode}, {'a' if table else 'no'} table")
    from importlib.metadata import version

    versions = f"verl {version('verl')}, torch {version('torch')}, Python {platform.python_version()}"
    text = (
        f"`{shown}`, {seconds:.0f} s in all (tasks and model prepared before), "
        f"{datetime.date.today()}, {machine()}; {versions}.\n\n```text\n{table[0]}\n```\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{text}")
    return text


def paste(name: str, text: str) -> None:
    """Replaces what stands between the markers of ``name`` in every file."""
    marked = re.compile(rf"(<!-- demo:{name} -->\n).*?(<!-- /demo -->)", re.DOTALL)
    for file in FILES:
        path = ROOT / file
        path.write_text(marked.sub(lambda m: m[1] + text + m[2], path.read_text()))


def main() -> None:
    """Both recipes, one after the other."""
    run = f"runs/demo/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    opd = "python -m verl.trainer.main_ppo +recipe=opd"
    offline = "python -m verl.trainer.main_ppo +recipe=opd_offline corpus=RUN_DIR"
    paste("opd", measure("opd", opd, ["+recipe=opd", f"hydra.run.dir={run}"]))
    paste("opd_offline", measure("opd_offline", offline, ["+recipe=opd_offline", f"corpus={ROOT / run}"]))


if __name__ == "__main__":
    main()
