"""Sections about what the numbers stand on: gates, predictions, claims, evidence, provenance."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl_opsd.evaluation.page.gather import RunData
from verl_opsd.evaluation.page.parts import Linker, Numbering, Part, cell, details, head, heading, row, text
from verl_opsd.evaluation.page.plots import number
from verl_opsd.evaluation.spent import spent_rows
from verl_opsd.evidence.claims import claims
from verl_opsd.evidence.copies import COPIED, warning
from verl_opsd.evidence.graded import EPISODE, gone
from verl_opsd.evidence.invalidation import INVALIDATED
from verl_opsd.evidence.predictions import JUDGED, PREDICTED, Judged, Number
from verl_opsd.metering import device_rows

#: Lines of the log that are no gate.
_OTHER = (EPISODE, PREDICTED, "claim", COPIED, INVALIDATED)
_TONE = {"pass": "pass", "fail": "fail", "void": "void", "recorded": "muted", "torn": "warn"}


def when(seconds: float) -> str:
    """UTC, to the minute."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")


def gates(runs: Sequence[RunData], numbering: Numbering) -> list[Part]:
    """Each gate once: how often it ran, its last value, and every failure."""
    rows = []
    for r in runs:
        if len(runs) > 1:
            rows.append(row(cell(r.name), kind="group"))
        lines = [x for x in r.log if x["gate"] not in _OTHER and not x["gate"].startswith(JUDGED)]
        failed = [x["gate"] for x in lines if x["verdict"] == "fail"]
        for gate in sorted({x["gate"] for x in lines}, key=lambda g: (g not in failed, g)):
            of = [x for x in lines if x["gate"] == gate]
            shown = next((x for x in of if x["verdict"] == "fail"), of[-1])
            verdict = shown["verdict"] if shown["threshold"] is not None or shown["verdict"] == "fail" else "recorded"
            rows.append(
                row(
                    cell(gate),
                    cell(len(of)),
                    cell(_short(shown["value"])),
                    cell(_short(shown["threshold"])),
                    cell(verdict, tone=_TONE[verdict]),
                    cell(shown["detail"], wrap=True),
                )
            )
    if not rows:
        return [text("The log holds no gate.", muted=True)]
    caption = (
        "Gates, with thresholds that were written down before; failures first. Of a gate that ran often its last line is shown."
    )
    return [numbering.table(caption, head("<gate", "lines", "value", "threshold", "<verdict", "<detail"), rows)]


def predictions(
    runs: Sequence[RunData], judged: Mapping[str, Mapping[str, Sequence[Judged]]], numbering: Numbering, linker: Linker
) -> list[Part]:
    """The tables "works if", with what came out.

    Args:
        judged: run -> name of the file -> its rows.
    """
    out: list[Part] = []
    for r in runs:
        for name, rows_ in judged[r.name].items():
            line = next(x for x in r.log if x["gate"] == PREDICTED and x["value"]["name"] == name)
            rows = []
            for j in rows_:
                p, n = j.prediction, j.number
                base = (
                    "-"
                    if p.baseline is None
                    else f"{number(p.baseline.value)}" + (f" ({p.baseline.source})" if p.baseline.source else "")
                )
                limit = (
                    "-"
                    if math.isnan(p.threshold)
                    else f"{'difference ' if p.against == 'baseline' else ''}{p.comparison} {number(p.threshold)}"
                )
                value = cell("-") if n is None else cell(number(n.value), link=linker.link(r.name, n.episodes), title=p.metric)
                if n is not None and n.low is not None:
                    value["tip"] = f"95% {number(n.low)} to {number(n.high)}"
                rows.append(
                    row(
                        cell(p.metric),
                        cell(base),
                        cell(limit, notes=[p.works_if] if p.works_if else []),
                        value,
                        cell("-" if n is None else f"{n.n} {n.of}", tip=f"at least {p.at_least} {p.of}"),
                        cell(j.verdict, tone=_TONE[j.verdict], notes=[j.why] if j.why else []),
                    )
                )
            counts = Counter(j.verdict for j in rows_)
            said = ", ".join(f"{counts[v]} {v}" for v in ("pass", "fail", "void") if counts[v])
            who = f"{r.name}, " if len(runs) > 1 else ""
            caption = f"Predictions {name} ({who}SHA-256 {line['value']['sha256'][:12]}, written down {when(line['time'])} UTC, before the first episode): {said}."
            out.append(numbering.table(caption, head("<metric", "baseline", "works if", "came out", "over", "<verdict"), rows))
    return out or [text("No prediction was written down before this run.", muted=True)]


def ledger(
    runs: Sequence[RunData], numbers: Mapping[str, Mapping[str, Number]], numbering: Numbering, linker: Linker
) -> list[Part]:
    """The claims, with the state of what they stand on."""
    rows = []
    for r in runs:
        for c in claims(r.log):
            notes, bad = [], False
            stands = ", ".join(c.support)
            if c.status == "measured":
                cells = [numbers[r.name].get(k) for k in c.support]
                notes += [f"{k}: no longer in the report" for k, n in zip(c.support, cells, strict=True) if n is None]
                ids = {e for n in cells if n is not None for e in n.episodes}
                notes += _weakened(r, c.support, ids)
                bad = bool(notes)
                stands = ", ".join(f"{k} = {number(n.value)}" for k, n in zip(c.support, cells, strict=True) if n is not None)
            if c.earlier:
                notes.append(f"before: {', '.join(c.earlier)}")
            tone = {"measured": "pass", "verified in code": "pass", "retracted": "fail"}.get(c.status, "muted")
            status = "unverifiable" if any(x.endswith("are gone") or "does not know" in x for x in notes) else c.status
            rows.append(
                row(
                    cell(c.id),
                    cell(c.text, wrap=True),
                    cell(status, tone="fail" if bad else tone, notes=notes, bad_notes=bad),
                    cell(stands or (f"by {c.by}" if c.by else c.why), wrap=True),
                    cell(when(c.time)),
                    kind="invalid" if c.status == "retracted" else "",
                )
            )
    if not rows:
        return [text("No claim was made. opsd evidence claim adds one, with what it stands on.", muted=True)]
    caption = "Claims ledger. A claim is measured or verified in code where something stands behind it, and not established otherwise; its history is in the evidence."
    return [numbering.table(caption, head("<", "<claim", "<status", "<stands on", "UTC"), rows)]


def _weakened(r: RunData, keys: Sequence[str], episodes: set[str]) -> list[str]:
    """What has happened since to what a measured claim stands on."""
    states = Counter(r.states.get(e, ("unrecorded", ""))[0] for e in episodes)
    of: set[tuple[str, int | None]] = set()
    last = max((e.model_version for e in r.episodes if e.split == "eval"), default=None)
    for model in (k.split(".")[0] for k in keys):
        name, _, version = model.partition("@")
        of.add(("eval", int(version) if version else last) if name == "eval" else ("train", None))
    out = [f"its rows are invalidated: {m.reason}" for m in r.marks if any(m.covers(v) for _, v in of)]
    lost = sum(len(gone(r.log, r.states, *x)) for x in of)
    out += [f"{lost} episodes that it was measured on are gone"] * bool(lost)
    out += [f"files of {states['altered']} episodes are not as graded"] * bool(states["altered"])
    return out + [f"the evidence does not know {states['unrecorded']} episodes"] * bool(states["unrecorded"])


def evidence(runs: Sequence[RunData], numbering: Numbering) -> list[Part]:
    """State of each log, findings, and invalidations."""
    rows, out = [], []
    for r in runs:
        states = Counter(s for s, _ in r.states.values())
        wrong = [f for f in r.findings if not f.killed]
        copied = [x for x in r.log if x["gate"] == COPIED]
        rows.append(
            row(
                cell(r.name),
                cell(len(r.log)),
                cell(r.log[-1]["hash"][:16] if r.log else "-"),
                cell("whole" if not wrong else f"{len(wrong)} findings", tone="pass" if not wrong else "fail"),
                *(
                    cell(states[k], tone="fail" if k != "whole" and states[k] else "")
                    for k in ("whole", "altered", "gone", "unrecorded")
                ),
                cell(
                    copied[-1]["value"] if copied else "nowhere",
                    tone="" if copied else "warn",
                    notes=[w] if (w := warning(r.log, r.run.path)) else [],
                ),
            )
        )
        out += [text(f"{r.name}: {f}") for f in r.findings]
    heads = head("<run", "lines", "<last hash", "<chain", "whole", "altered", "gone", "unrecorded", "<copied to")
    table = numbering.table(
        "Evidence: each line of the log holds the hash of the one before; episodes by whether their files are those that were graded.",
        heads,
        rows,
    )
    marks = [
        row(
            cell(r.name),
            cell(f"{m.field}={m.value}"),
            cell(m.reason, wrap=True),
            cell(m.corpus or "this run"),
            cell(when(m.time)),
        )
        for r in runs
        for m in r.marks
    ]
    more = [numbering.table("Invalidations.", head("<run", "<where", "<reason", "<found in", "UTC"), marks)] if marks else []
    return [table, *out, *more]


def provenance(runs: Sequence[RunData], numbering: Numbering) -> list[Part]:
    """What ran: command, versions, devices, contract, configuration."""
    out: list[Part] = []
    fields = list(runs[0].contract.as_dict())
    differ = [f for f in fields if len({json.dumps(r.contract.as_dict()[f]) for r in runs}) > 1]
    for r in runs:
        m = r.meta
        if len(runs) > 1:
            out.append(heading(r.name))
        versions = ", ".join(f"{k} {v}" for k, v in m.get("versions", {}).items() if v)
        harness = m.get("harness", {})
        rows = [
            ("run directory", str(r.run.path)),
            ("command", " ".join(m.get("argv", []))),
            ("started (UTC)", when(m["started"]) if "started" in m else "-"),
            ("student", m.get("student")),
            ("endpoint", m.get("endpoint")),
            ("brief of the actors", r.opsd.actor_brief.name if r.opsd.actor_brief.name != "none" else None),
            *_training(r),
            ("devices", ", ".join(map(str, m.get("devices", []))) or None),
            ("versions", f"Python {m.get('python', '-')}, {versions}"),
            ("harness", f"{harness.get('name', '-')} {harness.get('version', '')}, tree {harness.get('tree_hash', '-')[:12]}"),
            ("contract", r.contract.hash),
            ("seconds by stage", ", ".join(f"{k} {v:.0f}" for k, v in (r.report.get("seconds") or {}).items()) or None),
            *((f"episodes: {name}", words) for name, words in spent_rows(r.report.get("spent") or {})),
            *device_rows(r.report),
        ]
        out.append(
            numbering.table(
                f"What ran{f' as {r.name}' if len(runs) > 1 else ''}.",
                head("<", "<"),
                [row(cell(k), cell(v, wrap=True)) for k, v in rows if v is not None],
            )
        )
        config = json.dumps(m.get("opsd", {}), indent=1, default=str)
        out.append(details("Configuration", [{"kind": "pre", "text": config}]))
    heads = head("<field", *(f"<{r.name}" for r in runs))
    rows_ = [
        row(cell(f, tone="warn" if f in differ else ""), *(cell(_short(r.contract.as_dict()[f]), wrap=True) for r in runs))
        for f in fields
    ]
    if differ:
        out.insert(0, text(f"The runs have different contracts ({', '.join(differ)}): their scores are not comparable."))
    out.append(
        details("Contract", [numbering.table("The frozen contract under which agents acted and were graded.", heads, rows_)])
    )
    return out


def _training(r: RunData) -> list[tuple[str, str]]:
    """Teacher, brief and loss; an evaluation has none."""
    if r.opsd.mode == "evaluate":
        return []
    teacher, brief, loss = r.opsd.teacher, r.opsd.brief, r.opsd.loss
    return [
        ("teacher", f"{teacher.kind}{f', {teacher.path}' if teacher.path else ''}"),
        ("brief", f"{brief.name}, placement {brief.placement}"),
        ("loss", f"{loss.divergence}, anchor {loss.anchor:g}, {loss.reduction} mean, {loss.epochs} epochs"),
    ]


def _short(x: Any) -> str:
    if isinstance(x, float):
        return number(x)
    return "-" if x is None else str(x)
