"""Plots as inline SVG. Colours are classes of the page's style sheet, so that they follow its light and dark theme.

Every plot carries its numbers as ``<title>`` or as text: nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

#: Series colours that the style sheet has (``.s0`` to ``.s5``).
COLOURS = 6


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one line; ``bands``: (low, high) of each point, or none at all."""

    name: str
    points: Sequence[tuple[float, float]]
    bands: Sequence[tuple[float, float]] = field(default=())


def number(x: float | None) -> str:
    """Three significant digits, for labels and cells; a dash for what is not known."""
    if x is None or not math.isfinite(x):
        return "-"
    if x == 0:
        return "0"
    if 0.001 <= abs(x) < 10000:
        return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"
    return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")


def digits(x: float | None) -> str:
    """As :func:`number`, always with three digits, so that a column of them lines up."""
    if x is None or not math.isfinite(x) or x == 0 or not 0.001 <= abs(x) < 100:
        return number(x)
    return f"{x:#.3g}"


def interval(value: float | None, low: float | None, high: float | None, label: str) -> Markup:
    """A share from 0 to 1 with its 95% interval on a line from 0 to 100%."""
    if value is None or low is None or high is None:
        return Markup("")
    w, h, pad = 132, 14, 4
    x = [pad + (w - 2 * pad) * v for v in (value, low, high)]
    return Markup(
        f'<svg class="interval" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>"
        f'<path class="axis" d="M{pad} {h / 2}H{w - pad}M{pad} 4V10M{w / 2} 5V9M{w - pad} 4V10"/>'
        f'<path class="band" d="M{x[1]:.1f} {h / 2}H{x[2]:.1f}"/>'
        f'<circle class="dot" cx="{x[0]:.1f}" cy="{h / 2}" r="3.2"/></svg>'
    )


def lines(series: Sequence[Series], unit: str, zero: bool = True) -> Markup:
    """Lines over rounds or policy versions, which are whole numbers."""
    points = [p for s in series for p in s.points]
    if not points:
        return Markup("")
    width, height, left, right, top, bottom = 320, 168, 46, 10, 8, 22
    xs = sorted({x for x, _ in points})
    edges = [v for s in series for b in s.bands for v in b] + [y for _, y in points]
    low, high = min(edges), max(edges)
    low = min(low, 0.0) if zero else low
    if high == low:
        high = low + (abs(low) or 1.0)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def px(x: float) -> float:
        span = xs[-1] - xs[0]
        return left + (width - left - right) * ((x - xs[0]) / span if span else 0.5)

    def py(y: float) -> float:
        return top + (height - top - bottom) * (1 - (y - low) / (high - low))

    out = [f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_spoken(series, unit))}">']
    for t in ticks:
        out.append(f'<path class="grid" d="M{left} {py(t):.1f}H{width - right}"/>')
        out.append(f'<text class="tick" x="{left - 5}" y="{py(t) + 3.5:.1f}" text-anchor="end">{number(t)}</text>')
    for x in xs[:: max(1, math.ceil(len(xs) / 8))]:
        out.append(f'<text class="tick" x="{px(x):.1f}" y="{height - 7}" text-anchor="middle">{x:g}</text>')
    for i, s in enumerate(series):
        c = f"s{i % COLOURS}"
        for (x, _), (a, b) in zip(s.points, s.bands, strict=False):
            out.append(f'<path class="whisker {c}" d="M{px(x):.1f} {py(a):.1f}V{py(b):.1f}"/>')
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in s.points)
        out.append(f'<polyline class="line {c}" points="{path}"/>')
        for x, y in s.points:
            title = f"{s.name}, {x:g}: {number(y)} {unit}"
            out.append(_mark(i, px(x), py(y), title, 2.8 if len(s.points) < 40 else 1.2))
    return Markup("".join(out) + "</svg>")


def dumbbells(rows: Sequence[tuple[str, Mapping[str, float | None]]], names: Sequence[str]) -> Markup:
    """For each row the shares of several models on one line, so that a move from the first one shows."""
    values = [v for _, cells in rows for v in cells.values() if v is not None]
    if not values or max(values) <= 0:
        return Markup("")
    width, left, right, step, top = 660, 190, 24, 24, 8
    ticks = _ticks(0.0, max(values))
    high, height = ticks[-1], top + step * len(rows) + 22

    def px(v: float) -> float:
        return left + (width - left - right) * v / high

    out = [f'<svg class="plot wide" viewBox="0 0 {width} {height}" role="img" aria-label="shares, {escape(", ".join(names))}">']
    for t in ticks:
        out.append(f'<path class="grid" d="M{px(t):.1f} {top}V{height - 20}"/>')
        out.append(f'<text class="tick" x="{px(t):.1f}" y="{height - 6}" text-anchor="middle">{100 * t:g}%</text>')
    for i, (title, cells) in enumerate(rows):
        y = top + step * (i + 0.5)
        known = {n: v for n in names if (v := cells.get(n)) is not None}
        out.append(f'<text class="label" x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(title)}</text>')
        if known:
            out.append(f'<path class="span" d="M{px(min(known.values())):.1f} {y:.1f}H{px(max(known.values())):.1f}"/>')
        for name, v in known.items():
            out.append(_mark(list(names).index(name), px(v), y, f"{title}, {name}: {v:.1%}", 4))
    return Markup("".join(out) + "</svg>")


def flow(stages: Sequence[tuple[str, Mapping[str, int]]], links: Mapping[tuple[int, str, str], int]) -> Markup:
    """Pairs from left to right through ``stages`` (title, class -> pairs); ``links``: (stage, from, to) -> pairs."""
    total = max((sum(s.values()) for _, s in stages), default=0)
    if not total:
        return Markup("")
    width, gap, bar, top = 720, 20, 8, 28
    rows = max(len(s) for _, s in stages)
    height = top + 150 + gap * rows
    scale = 150 / total
    at = [150 + i * (width - 300) / max(1, len(stages) - 1) for i in range(len(stages))]
    place: dict[tuple[int, str], float] = {}
    ribbons, nodes = [], []
    for i, (title, classes) in enumerate(stages):
        x, anchor = (at[i] - 7, "end") if i == 0 else (at[i] + bar + 7, "start")
        nodes.append(f'<text class="label strong" x="{x:.1f}" y="14" text-anchor="{anchor}">{escape(title)}</text>')
        y = float(top)
        for name, count in classes.items():
            place[i, name] = y
            size = max(1.0, count * scale)
            nodes.append(f'<rect class="node" x="{at[i]:.1f}" y="{y:.1f}" width="{bar}" height="{size:.1f}"/>')
            nodes.append(
                f'<text class="label" x="{x:.1f}" y="{y + size / 2 + 4:.1f}" text-anchor="{anchor}">'
                f'{escape(name)} <tspan class="count">{count}</tspan></text>'
            )
            y += size + gap
    leave, reach = dict(place), dict(place)
    for (i, a, b), count in sorted(
        links.items(), key=lambda link: (link[0][0], place[link[0][0], link[0][1]], place[link[0][0] + 1, link[0][2]])
    ):
        size, x0, x1 = count * scale, at[i] + bar, at[i + 1]
        y0, y1 = leave[i, a] + size / 2, reach[i + 1, b] + size / 2
        leave[i, a] += size
        reach[i + 1, b] += size
        m = (x0 + x1) / 2
        ribbons.append(
            f'<path class="ribbon" stroke-width="{max(0.8, size):.1f}" d="M{x0:.1f} {y0:.1f}C{m:.1f} {y0:.1f} {m:.1f} {y1:.1f} {x1:.1f} {y1:.1f}">'
            f"<title>{escape(a)} to {escape(b)}: {count}</title></path>"
        )
    head = f'<svg class="plot wide" viewBox="0 0 {width} {height}" role="img" aria-label="from patches to merges to features passed">'
    return Markup("".join([head, *ribbons, *nodes]) + "</svg>")


def legend(names: Sequence[str]) -> Markup:
    """Names with the mark that stands for each."""
    items = (
        f'<span><svg viewBox="0 0 14 12" width="14" height="12" aria-hidden="true">{_mark(i, 7, 6, "", 4)}</svg>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return Markup(f'<p class="legend">{"".join(items)}</p>')


def _mark(k: int, x: float, y: float, title: str, r: float) -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    shapes = (
        f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0",
        f"M{x - 0.9 * r:.1f} {y - 0.9 * r:.1f}h{1.8 * r}v{1.8 * r}h{-1.8 * r}z",
        f"M{x:.1f} {y - 1.2 * r:.1f}l{1.2 * r} {2.1 * r}h{-2.4 * r}z",
        f"M{x:.1f} {y - 1.25 * r:.1f}l{1.25 * r} {1.25 * r}l{-1.25 * r} {1.25 * r}l{-1.25 * r} {-1.25 * r}z",
    )
    return f'<path class="mark s{k % COLOURS}" d="{shapes[k % len(shapes)]}">{told}</path>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, about five."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _spoken(series: Sequence[Series], unit: str) -> str:
    parts = [f"{s.name} from {number(s.points[0][1])} to {number(s.points[-1][1])}" for s in series if s.points]
    return f"{'; '.join(parts)} {unit}".strip()
