"""The probe's report: one HTML file without anything from outside: tables, and a heat map over the student's own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from verl_opsd.probe.measure import Probe
from verl_opsd.tokens.branches import loss_positions

COLUMNS = ("mean", "median", "p90", "p99", "max", "max_over_mean", "top1pct_share")
#: Branches in the heat map.
SHOWN = 6
_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{border-bottom:1px solid #ddd;padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left}.map{font:12px/1.7 ui-monospace,monospace;white-space:pre-wrap;word-break:break-word;
border:1px solid #ddd;padding:.7em}.map i{color:#999;font-style:normal}.pass{color:#176f2c}.fail{color:#b00020;font-weight:bold}"""


def report(probe: Probe, result: Mapping[str, Any], gates: Sequence[Mapping[str, Any]], tokenizer: Any, title: str) -> str:
    """The page.

    Args:
        result: ``measure.summary`` with ``recovery``. gates: verdicts with name, value, threshold, passed.
    """
    effect, pull = result["effect"], result["pull"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{result['episodes']} episodes, {result['branches']} branches, {result['positions']} loss positions; "
        f"branches left out: {', '.join(f'{n} {why}' for why, n in result['left_out'].items())}; "
        f"episodes left out by name: {escape(', '.join(result['episodes_left_out'])) or 'none'}. "
        + "".join(f"Arm {arm} is the brief itself at {n} branches. " for arm, n in result["same_as_brief"].items())
        + "Nats a token, temperature 1.</p>",
        "<h2>Gates</h2>",
        _table(
            ["gate", "value", "threshold", "verdict"],
            [[g["name"], g["value"], g["threshold"], "pass" if g["passed"] else "fail"] for g in gates],
        ),
        "<h2>Controls</h2><p>identity and void must be 0: the student against itself, scored turn by turn with foreign tokens behind; void at another temperature on "
        "both sides. shifted, the same with positions moved by one token, must not.</p>",
        _stats(result["controls"]),
        "<h2>Effect of the brief: teacher with it against teacher without</h2>",
    ]
    for placement, tables in effect.items():
        parts += [f"<h3>placement {placement}</h3>", _stats(tables["arms"], ("flips",)), *_groups(tables["by"])]
    parts.append(
        "<h2>Pull: student against teacher</h2><p>The models' gap plus the brief's effect; not comparable with the tables above.</p>"
    )
    parts.append(_stats({"no brief (gap)": result["gap"]}))
    for placement, tables in pull.items():
        parts += [f"<h3>placement {placement}</h3>", _stats(tables["arms"]), *_groups(tables["by"])]
    parts += [
        "<h2>Teachability: negative log-likelihood under the student</h2>",
        _teachability(result),
        *_recovery(result["recovery"]),
    ]
    parts += _heat_map(probe, tokenizer, next(iter(effect)))
    return "\n".join(parts) + "</html>\n"


def _cell(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.3g}"
    text = "-" if x is None else escape(str(x))
    return f"<span class={text}>{text}</span>" if text in ("pass", "fail") else text


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(x)}</td>" for x in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _stats(tables: Mapping[str, Mapping[str, Any]], more: tuple[str, ...] = ()) -> str:
    return _table(["", *COLUMNS, *more], [[name, *(t.get(c) for c in (*COLUMNS, *more))] for name, t in tables.items()])


def _groups(by: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    out = []
    for kind, rows in by.items():
        arms = [k for k in next(iter(rows.values())) if k != "n"]
        out.append(
            _table([f"mean by {kind}", "positions", *arms], [[n, r["n"], *(r[a] for a in arms)] for n, r in rows.items()])
        )
    return out


def _teachability(result: Mapping[str, Any]) -> str:
    rows = [[name, s["mean"], s["max"], s["spike"], int(s["tokens"])] for name, s in result["teachability"].items()]
    return _table(["", "mean", "max", "spike (largest 1%)", "tokens"], rows)


def _recovery(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["prefix, tokens", "prefixes", "ended", "tokens as the student", "teacher's NLL", "student's NLL", "student's spike"]
    cells = [
        [
            r["depth"],
            r["prefixes"],
            r["ended"],
            r["tokens in a row as the student"],
            r["teacher"]["mean"],
            r["student"]["mean"],
            r["student"]["spike"],
        ]
        for r in rows
    ]
    return ["<h2>Prefix recovery: the teacher continues the student's prefixes</h2>", _table(head, cells)]


def _heat_map(probe: Probe, tokenizer: Any, placement: str) -> list[str]:
    """The branches with the largest effect; context is left out, each token tells its numbers."""
    values, pulls = probe.values[f"effect/{placement}/brief"], probe.values[f"pull/{placement}/brief"]
    ends = np.cumsum(probe.lengths)
    total = [float(values[e - n : e].sum()) for n, e in zip(probe.lengths, ends, strict=True)]
    full = max(float(np.quantile(values, 0.99)), 1e-9)
    out = [
        f"<h2>Heat map: effect of the brief, placement {placement}</h2><p>The {SHOWN} branches with the largest sum; full colour from the 99th percentile on, {full:.3g} nats.</p>"
    ]
    for b in np.argsort(total)[::-1][:SHOWN].tolist():
        branch, start = probe.branches[b], int(ends[b]) - probe.lengths[b]
        t = branch.trajectory
        out.append(f"<h3>{escape(branch.name)} ({escape(branch.pair.key)})</h3><div class=map>")
        previous = -1
        for n, position in enumerate(loss_positions(t.loss_mask).tolist()):
            turn = int(t.turn_index[position + 1])
            if turn != previous:
                out.append(f"<i>\n[turn {turn}, behind {position + 1} tokens]\n</i>")
                previous = turn
            kl, pull = float(values[start + n]), float(pulls[start + n])
            text = escape(tokenizer.decode([int(t.input_ids[position + 1])]))
            out.append(
                f'<span style="background:rgba(208,60,20,{min(1.0, kl / full):.2f})" title="effect {kl:.3g}, pull {pull:.3g}">{text}</span>'
            )
        out.append("</div>")
    return ["".join(out)]
