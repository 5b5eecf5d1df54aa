"""The section about distillation: divergence, agreement and drift by round, beside scores and behaviour by policy version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_opsd.evaluation.page import plots
from verl_opsd.evaluation.page.gather import RunData
from verl_opsd.evaluation.page.parts import Model, Numbering, Part, cell, head, percent, row, text
from verl_opsd.evaluation.page.plots import Series, digits
from verl_opsd.evaluation.shapes import BehaviourTable, Rate, Standing

_ACTIONS = {"action_write": "write files", "action_test": "run tests", "action_coordinate": "coordinate"}


def training(
    runs: Sequence[RunData], models: Sequence[Model], found: Sequence[Standing], table: BehaviourTable, numbering: Numbering
) -> list[Part]:
    """Figures over rounds, and tables by token class and by quarter of the run."""
    trained = [r for r in runs if r.report.get("distillation")]
    if not trained:
        return [text("No update was made: there is no divergence to show.", muted=True)]
    names = [r.name for r in trained]
    panels = [
        ("Divergence, mean", "nats a token", _by_round(trained, lambda c: c["divergence"].get("mean"))),
        ("Divergence, 99th percentile", "nats a token", _by_round(trained, lambda c: c["divergence"].get("p99"))),
        ("Top-1 agreement with the teacher", "share", _by_round(trained, lambda c: c.get("agree"))),
        ("Drift from the base", "nats a token", _by_round(trained, lambda c: (c.get("drift") or {}).get("mean"))),
        ("Pairs passed, evaluation", "share, 95% interval", _by_version(trained, models, [s.pairs for s in found])),
        ("Features passed, evaluation", "share, 95% interval", _by_version(trained, models, [s.features for s in found])),
    ]
    for key, title in _ACTIONS.items():
        series = _action(trained, models, table, key)
        if any(y for s in series for _, y in s.points):
            panels.append((f"Commands that {title}", "share", series))
    kept = [{"title": t, "unit": unit, "svg": plots.lines(s, unit, zero="agreement" not in t)} for t, unit, s in panels if s]
    caption = (
        "Divergence and agreement by round, above scores and behaviour by policy version (0 is the policy before training). A falling "
        "divergence says how well the student matches the teacher on its own states, not whether that is worth matching."
    )
    out: list[Part] = [
        numbering.figure(caption, kind="plots", plots=kept, legend=plots.legend(names) if len(names) > 1 else "")
    ]
    out.append(_table("token class", "class", trained, numbering))
    out.append(_table("quarter of the run", "quarter", trained, numbering))
    out += [text(said) for r in trained for say in (_infinite, _ledger) if (said := say(r, len(trained) > 1))]
    return out


def _by_round(runs: Sequence[RunData], value: Callable[[dict[str, Any]], float | None]) -> list[Series]:
    out = []
    for r in runs:
        cells = r.report["distillation"]["summary"]["by"]["round"]
        points = [(float(k), v) for k, c in cells.items() if (v := value(c)) is not None]
        if points:
            out.append(Series(r.name, points))
    return out


def _by_version(runs: Sequence[RunData], models: Sequence[Model], rates: Sequence[Rate]) -> list[Series]:
    out = []
    for r in runs:
        there = [
            (m.version, rate)
            for m, rate in zip(models, rates, strict=True)
            if m.run is r and m.version is not None and rate.total
        ]
        if there:
            points = [(float(v), rate.passed / rate.total) for v, rate in there]
            out.append(Series(r.name, points, [(rate.low or 0.0, rate.high or 0.0) for _, rate in there]))
    return out


def _action(runs: Sequence[RunData], models: Sequence[Model], table: BehaviourTable, key: str) -> list[Series]:
    metric = next((m for m in table.metrics if m.key == key), None)
    if metric is None:
        return []
    out = []
    for r in runs:
        points = [
            (float(m.version), value)
            for name, m in zip(table.models, models, strict=True)
            if m.run is r and m.version is not None and (value := metric.values[name].value) is not None
        ]
        if points:
            out.append(Series(r.name, points))
    return out


def _table(what: str, label: str, runs: Sequence[RunData], numbering: Numbering) -> Part:
    heads = head(
        "<",
        "loss positions",
        "mean",
        "median",
        "p90",
        "p99",
        "max / mean",
        ("top 1%", "share of the sum in the largest 1%"),
        "agreement",
        "drift",
    )
    rows = []
    for r in runs:
        if len(runs) > 1:
            rows.append(row(cell(r.name), kind="group"))
        for key, c in r.report["distillation"]["summary"]["by"][label].items():
            d = c["divergence"]
            name = f"{int(key) + 1}" if label == "quarter" else key
            rows.append(
                row(
                    cell(name),
                    cell(f"{c['loss_positions']:,}"),
                    *(cell(digits(d.get(k))) for k in ("mean", "median", "p90", "p99", "max_over_mean")),
                    cell(percent(d.get("top1pct_share"))),
                    cell(digits(c.get("agree"))),
                    cell(digits((c.get("drift") or {}).get("mean"))),
                )
            )
    return numbering.table(f"Divergence by {what}, nats a token; quantiles within 1%.", heads, rows)


def _infinite(r: RunData, several: bool) -> str:
    found = r.report["distillation"]["infinite"]
    return f"{f'{r.name}: ' if several else ''}infinite, and in no number above: {'; '.join(found)}." if found else ""


def _ledger(r: RunData, several: bool) -> str:
    out = r.report.get("ledger") or {}
    if not out:
        return ""
    who = f"{r.name}: " if several else ""
    if "refused" in out:
        return f"{who}the ledger does not sum: {out['refused']}"
    why = "".join(f", {n:,} {reason}" for k in ("dropped", "left_out") for reason, n in out[k].items())
    ratio = r.report.get("tokens_per_loss_token")
    paid = f" {ratio:.1f} sequence tokens were paid a loss token." if ratio else ""
    return f"{who}{out['usable']:,} of {out['states']:,} states reached the loss, with {out['reply_tokens']:,} reply tokens{why}.{paid}"
