"""What sections of the page are made of: cells that link to the episodes behind them, tables, figures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_opsd.evaluation.page.gather import RunData
from verl_opsd.evaluation.page.plots import interval, number
from verl_opsd.evaluation.shapes import BehaviourValue, Rate
from verl_opsd.evidence.graded import doubts
from verl_opsd.tokens.records import Episode

Part = dict[str, Any]
Cell = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One column or row of the tables: a policy version of a run, on one split. ``key``: in ``numbers``; ``label``: for people."""

    key: str
    label: str
    run: RunData
    split: str
    version: int | None
    episodes: Sequence[Episode]


@dataclass
class Linker:
    """Turns lists of episodes into links: a bitmap over the page's index of episodes, as base64."""

    place: dict[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def over(cls, runs: Iterable[RunData]) -> Linker:
        """All episodes of the runs, in the order of the index."""
        keys = ((r.name, e.episode_id) for r in runs for e in r.episodes)
        return cls({key: i for i, key in enumerate(keys)})

    def link(self, run: str, episodes: Iterable[str]) -> str:
        """The link's bitmap; "" for no episode."""
        bits = bytearray((len(self.place) + 7) // 8)
        for e in episodes:
            if (i := self.place.get((run, e))) is not None:
                bits[i >> 3] |= 1 << (i & 7)
        return base64.b64encode(bytes(bits)).decode() if any(bits) else ""


def cell(text: Any, **more: Any) -> Cell:
    """A cell of plain text."""
    return {"text": "-" if text is None else str(text), **more}


def percent(x: float | None) -> str:
    """A share in percent; one digit more below 10%, so that 0.8% and 1.3% differ."""
    if x is None:
        return "-"
    return f"{x:.1%}" if 0.0005 <= abs(x) < 0.0995 else f"{x:.0%}"


def rate_cell(rate: Rate, title: str, run: str, linker: Linker, plot: bool = False) -> Cell:
    """``passed/total`` with its interval; the link shows the episodes of the numerator."""
    told = f"{percent(rate.value)}, 95% {percent(rate.low)} to {percent(rate.high)}" if rate.total else "no denominator"
    made = cell(f"{rate.passed}/{rate.total}" if rate.total else "-", tip=f"{told}; {rate.of}")
    made |= {"link": linker.link(run, rate.hits), "title": title}
    if plot and rate.total:
        made |= {"svg": interval(rate.value, rate.low, rate.high, f"{title}: {told}")}
    return made


def value_cell(v: BehaviourValue, unit: str, title: str, run: str, linker: Linker) -> Cell:
    """A behaviour value in its unit."""
    text = percent(v.value) if unit == "share" else number(v.value)
    tip = f"n = {v.denominator}" + (f", 95% {percent(v.low)} to {percent(v.high)}" if v.low is not None else "")
    return cell(text, tip=tip, link=linker.link(run, v.episodes), title=title)


def head(*columns: str | tuple[str, str]) -> list[Cell]:
    """Column heads. A leading ``<`` sets a column to the left; the second of a pair explains the first on hover."""
    out = []
    for c in columns:
        text, title = c if isinstance(c, tuple) else (c, "")
        out.append({"text": text.removeprefix("<"), "left": text.startswith("<"), "title": title})
    return out


def row(*cells: Cell, kind: str = "") -> Part:
    """One row; ``kind``: ``invalid`` strikes it through, ``group`` is a heading over the next ones."""
    return {"cells": list(cells), "kind": kind}


@dataclass
class Numbering:
    """Running numbers of tables and figures."""

    tables: int = 0
    figures: int = 0

    def table(self, caption: str, heads: list[Cell], rows: list[Part], known: bool = False) -> Part:
        """A table with the next number. ``known``: without the columns that are empty or unknown ("-") in every row."""
        self.tables += 1
        if known:
            kept = [i for i in range(len(heads)) if any(r["cells"][i]["text"] not in ("", "-") for r in rows)]
            heads, rows = [heads[i] for i in kept], [r | {"cells": [r["cells"][i] for i in kept]} for r in rows]
        return {"kind": "table", "name": f"Table {self.tables}", "caption": caption, "head": heads, "rows": rows}

    def figure(self, caption: str, **more: Any) -> Part:
        """A figure with the next number: ``svg=``, or ``kind="plots", plots=``."""
        self.figures += 1
        return {"kind": "figure", "name": f"Figure {self.figures}", "caption": caption} | more


def text(words: str, muted: bool = False) -> Part:
    """A paragraph."""
    return {"kind": "text", "text": words, "muted": muted}


def heading(words: str) -> Part:
    """A heading below the section's."""
    return {"kind": "heading", "text": words}


def details(summary: str, parts: list[Part]) -> Part:
    """Parts that are opened by hand."""
    return {"kind": "details", "text": summary, "parts": parts}


def standing_of(model: Model) -> tuple[str, list[str]]:
    """Kind of a row over a model's episodes (``invalid`` where it was invalidated) and what is to be said under its name."""
    run = model.run
    found = [m for m in run.marks if m.covers(model.version)]
    notes = doubts(run.log, run.states, [e.episode_id for e in model.episodes], model.split, model.version)
    return ("invalid" if found else ""), [*map(str, found), *notes]
