"""Seconds of a probe of 20 episodes under six contexts, and the picture of docs/probe.md.

    python benchmarks/probe.py [RUN_DIR]

Without a run the embedded student plays five rounds of four pocket pairs first. Contexts of the teacher: no brief, the run's brief under both
placements, another task's, its words shuffled, and text without content. Chromium for the picture: ``apt-get install chromium``.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo import RESULTS, ROOT, machine, run
from pictures import browse, keep

EPISODES = 20
ROUNDS = ("+recipe=opd", "trainer.total_training_steps=5", "data.train_batch_size=4", "trainer.test_freq=-1")


async def picture(page: Path, profile: Path) -> None:
    """The page's upper part; an error in the browser's console stops it."""
    async with browse(profile) as browser:
        await browser.size(1000, 1500)
        await browser.theme("light")
        await browser.open(f"file://{page.resolve()}")
        await keep(browser, ROOT / "docs" / "probe.png")
        assert not browser.problems, browser.problems


def main(argv: list[str]) -> None:
    """Plays where no run is named, probes, and keeps the figures and the picture."""
    with tempfile.TemporaryDirectory(prefix="opsd-probe-") as work:
        folder = Path(argv[0]) if argv else run([*ROUNDS], Path(work) / "run")
        out = Path(work) / "probe"
        words = ["probe", str(folder), "--episodes", str(EPISODES), "--out", str(out)]
        before = time.monotonic()
        subprocess.run([sys.executable, "-m", "verl_opsd.cli.main", *words], check=True, cwd=ROOT)
        seconds = time.monotonic() - before
        found = json.loads((out / "probe.json").read_text())
        gates = ", ".join(f"{g['name']} {g['value']:.2g} ({'pass' if g['passed'] else 'FAIL'})" for g in found["gates"])
        text = (
            f"{time.strftime('%Y-%m-%d')}, {machine()}: opsd probe RUN_DIR --episodes {EPISODES}, six contexts\n"
            f"{seconds:.0f} s; {found['episodes']} episodes, {found['branches']} branches, {found['positions']} loss positions\n"
            f"gates: {gates}\n"
        )
        (RESULTS / "probe.txt").write_text(text)
        print(text)
        asyncio.run(picture(out / "probe.html", Path(work) / "profile"))


if __name__ == "__main__":
    main(sys.argv[1:])
