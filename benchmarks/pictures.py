"""The pictures of docs/report.md: the page of a made-up run at 1200 pixels, and one of its episodes at 800 pixels in the dark.

    python benchmarks/pictures.py

Chromium: ``apt-get install chromium``.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tempfile
from pathlib import Path

from demo import ROOT
from PIL import Image

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "page")]
from browser import Browser, browse  # noqa: E402
from page_run import make_run  # noqa: E402

from verl_opsd.evaluation.page.gather import read_meta  # noqa: E402
from verl_opsd.evaluation.write import write_report  # noqa: E402
from verl_opsd.evidence.copies import copy  # noqa: E402

EPISODE = "train-00002-00001-0"


async def keep(browser: Browser, path: Path) -> None:
    """The viewport as PNG of 256 colours, a third of the bytes."""
    await browser.screenshot(path)
    Image.open(io.BytesIO(path.read_bytes())).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


async def pictures(page: str, profile: Path) -> None:
    """Writes both; an error in the browser's console stops it."""
    async with browse(profile) as browser:
        await browser.size(1200, 1500)
        await browser.theme("light")
        await browser.open(page)
        await keep(browser, ROOT / "docs" / "report.png")
        await browser.size(800, 1000)
        await browser.theme("dark")
        await browser.open(f"{page}#episode={EPISODE}")
        await browser.value("new Promise((r) => setTimeout(r, 500))")
        scroll = "for (const s of document.querySelectorAll('dialog .two > section')) s.scrollTop = 600"
        await browser.value(f"(() => {{ {scroll} }})()")
        await keep(browser, ROOT / "docs" / "report_episode.png")
        assert not browser.problems, browser.problems


def main() -> None:
    """Makes the run, its report and the pictures."""
    with tempfile.TemporaryDirectory(prefix="opsd-pictures-") as work:
        os.chdir(work)  # so that the page shows a short path
        run = make_run(Path("runs/opd"), rounds=6, episodes=8, evaluated=20, turns=8, skill=0.8)
        copy(run.path, Path("elsewhere"))
        write_report(run, read_meta(run)[1])
        asyncio.run(pictures(f"file://{(run.path / 'report.html').resolve()}", Path(work) / "profile"))


if __name__ == "__main__":
    main()
