"""Runs the demo, then the offline recipe on its episodes; writes the tables and pastes them where the markers stand.

    python benchmarks/demo.py [OPD_RUN [OFFLINE_RUN]]

A directory of a finished run on this machine takes the place of running it. Every file below that holds
``<!-- demo:NAME -->`` ... ``<!-- /demo -->`` gets the table of that run, with command, seconds, date, machine and versions.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILES = ("README.md", "recipes/opd/README.md", "recipes/opd_offline/README.md")


def machine() -> str:
    """Processor, cores and memory."""
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", info)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, no accelerator"


def run(arguments: list[str], folder: Path) -> Path:
    """Runs one recipe to its end and gives its run directory."""
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *arguments, f"hydra.run.dir={folder}"], cwd=ROOT, check=True)
    return folder


def block(folder: Path) -> str:
    """What a finished run printed at its end, under what was run, when and where."""
    meta = json.loads((folder / "meta.json").read_text())
    words = [re.sub(r"^corpus=.*", "corpus=RUN_DIR", w) for w in meta["argv"][1:] if not w.startswith("hydra.run.dir=")]
    report = [sys.executable, "-m", "verl_opsd.cli.main", "report", str(folder)]
    printed = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    table = printed[: printed.rindex("┘") + 1].strip("\n")  # what follows names folders of this machine
    seconds = (folder / "report.json").stat().st_mtime - meta["started"]
    versions = ", ".join(f"{name} {meta['versions'][name]}" for name in ("verl", "torch"))
    return (
        f"`python -m verl.trainer.main_ppo {' '.join(words)}`: {seconds:.0f} s from the launch checks to the report; "
        f"{datetime.date.fromtimestamp(meta['started'])}, {machine()}; {versions}, Python {meta['python']}.\n\n"
        f"```text\n{table}\n```\n"
    )


def paste(name: str, text: str) -> None:
    """Keeps a result, and replaces what stands between the markers of ``name`` in every file."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{text}")
    marked = re.compile(rf"(<!-- demo:{name} -->\n).*?(<!-- /demo -->)", re.DOTALL)
    for file in FILES:
        path = ROOT / file
        path.write_text(marked.sub(lambda m: m[1] + text + m[2], path.read_text()))


def main() -> None:
    """Both recipes, one after the other."""
    given = [Path(folder).resolve() for folder in sys.argv[1:]]
    new = ROOT / "runs" / "demo" / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    opd = given[0] if given else run(["+recipe=opd"], new / "opd")
    paste("opd", block(opd))
    offline = given[1] if len(given) > 1 else run(["+recipe=opd_offline", f"corpus={opd}"], new / "opd_offline")
    paste("opd_offline", block(offline))


if __name__ == "__main__":
    main()
