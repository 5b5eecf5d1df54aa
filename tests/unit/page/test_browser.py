"""The page in a real browser: no error, no request, no sideways scrolling, usable by keyboard, readable in the dark, quick."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, browse, chromium
from page_run import make_run

from verl_opsd.evaluation.page.gather import read_meta
from verl_opsd.evaluation.write import write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="no chromium here: apt-get install chromium")]

#: Contrast of a text with what lies behind it (WCAG 2), of every element with text of its own.
CONTRAST = """(() => {
  const rgb = (s) => { const m = s.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
  const light = (c) => { const f = c.slice(0, 3).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest("script,style,noscript,details:not([open])")) continue;
    const style = getComputedStyle(e), svg = e.closest("svg");
    const a = light(rgb(svg ? style.fill : style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${e.tagName}.${e.getAttribute("class")} ${ratio.toFixed(2)} ${e.textContent.slice(0, 30)}`);
  }
  return poor;
})()"""
FOCUSED = "(() => { const e = document.activeElement; return `${e.tagName} ${e.className} ${e.id} ${e.textContent.slice(0, 40)}`; })()"


def in_browser(folder: Path, work) -> Browser:
    """Runs ``work(browser)``; what the browser complained of fails the test."""

    async def whole() -> Browser:
        async with browse(folder) as browser:
            await work(browser)
            return browser

    browser = asyncio.run(whole())
    assert browser.problems == []
    return browser


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    run = make_run(tmp_path_factory.mktemp("runs") / "a", skill=0.8)
    write_report(run, read_meta(run)[1])
    return f"file://{run.path}/report.html"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 420])
def test_readable_at_two_widths_and_in_both_themes(page, tmp_path, width, theme):
    async def work(b: Browser) -> None:
        await b.size(width, 900)
        await b.theme(theme)
        await b.open(page)
        assert await b.value(CONTRAST) == []
        assert await b.value("document.scrollingElement.scrollWidth") <= width
        background = await b.value("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(253, 253, 251)") == (theme == "light")
        await b.open(f"{page}#episode=train-00001-00002-0")
        await b.value("new Promise((r) => setTimeout(r, 500))")
        assert await b.value("document.querySelectorAll('dialog[open] .two > section').length") == 2
        assert await b.value("document.querySelectorAll('dialog pre .t').length") > 50
        assert await b.value(CONTRAST) == []

    in_browser(tmp_path, work)


def test_everything_by_keyboard(page, tmp_path):
    async def work(b: Browser) -> None:
        async def tab_to(what: str) -> None:
            for _ in range(400):
                await b.press("Tab", 9)
                if what in await b.value(FOCUSED):
                    return
            raise AssertionError(f"no way to {what} by Tab")

        await b.size(1200, 900)
        await b.open(page)
        await tab_to("A n")  # a number
        await b.press("Enter", 13, "\r")
        assert "Behind" in await b.value("document.getElementById('what').textContent")
        assert "SPAN  what" in await b.value(FOCUSED)  # the focus has gone along
        count = await b.value("document.querySelectorAll('#rows tr').length")
        assert 0 < count < 34
        await tab_to("BUTTON open")
        first = await b.value("document.activeElement.textContent")
        await b.press("Enter", 13, "\r")
        await b.value("new Promise((r) => setTimeout(r, 400))")
        assert await b.value("document.querySelector('dialog').open") and first in await b.value(FOCUSED)
        await b.press("ArrowRight", 39)
        await b.value("new Promise((r) => setTimeout(r, 400))")
        second = await b.value("document.getElementById('eptitle').textContent")
        assert second != first and (await b.value("location.hash")).endswith(second)
        await b.press("Escape", 27)
        assert not await b.value("document.querySelector('dialog').open")
        assert first in await b.value(FOCUSED)  # where it was

    in_browser(tmp_path, work)


def test_hostile_text_is_text(tmp_path):
    """Scripts and markup in messages, characters beyond 16 bits under colours, bytes that are no text, a divergence that is not known."""
    hostile = "</script><script>hacked=1</script><img src=x onerror='hacked=1'> {{7*7}} 🎉🎉🎉 \u202e end"
    run = make_run(tmp_path / "a", rounds=1, episodes=1, evaluated=1, turns=3, thought=hostile, odd_bytes=True)
    values = dict(np.load(path := run.path / "telemetry" / "00001.npz"))
    values["divergence"][::2] = np.nan
    np.savez(path, **values)
    write_report(run, read_meta(run)[1])

    async def work(b: Browser) -> None:
        await b.open(f"file://{run.path}/report.html#episode=train-00001-00000-0")
        await b.value("new Promise((r) => setTimeout(r, 500))")
        text = await b.value("document.querySelector('dialog .assistant pre').textContent")
        assert hostile in text and text.endswith("<|im_end|>")  # cut by characters of another length, the end was lost
        assert "of unknown divergence" in await b.value("document.querySelector('dialog').textContent")
        assert await b.value("typeof hacked") == "undefined"

    in_browser(tmp_path / "profile", work)


def test_a_number_s_episodes_are_those_of_its_bitmap(page, tmp_path):
    """The script's decoding of a link against the table's own column."""

    async def work(b: Browser) -> None:
        await b.open(page)
        await b.value("document.querySelector('a.n[data-t=\"evaluation, version 3: pairs passed\"]').click()")
        shown = await b.value(
            "[...document.querySelectorAll('#rows tr')].map((r) => r.children[5].textContent + r.children[1].textContent + r.children[2].textContent)"
        )
        assert shown and set(shown) == {"2/2eval3"}

    in_browser(tmp_path, work)


def test_a_thousand_episodes(tmp_path):
    """The report in 10 s of processor time, at most 20 MB, open in 2 s; and an episode opens at once."""
    run = make_run(tmp_path / "a", rounds=10, episodes=80, evaluated=100, turns=12)
    started = time.process_time()
    write_report(run, read_meta(run)[1])
    seconds = time.process_time() - started
    page = run.path / "report.html"
    opened: list[float] = []

    async def work(b: Browser) -> None:
        for _ in range(3):
            opened.append(await b.open(f"file://{page}"))
        started = time.monotonic()
        await b.value("document.querySelector('#rows button').click()")
        while not await b.value("document.querySelectorAll('dialog[open] .m').length"):
            assert time.monotonic() < started + 5

    in_browser(tmp_path / "profile", work)
    assert seconds < 10 and page.stat().st_size < 20e6 and min(opened) < 2
