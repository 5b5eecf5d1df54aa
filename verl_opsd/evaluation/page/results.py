"""Sections about results: standings, comparisons, the task grid, behaviour, merges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from verl_opsd.evaluation.page import plots
from verl_opsd.evaluation.page.parts import (
    Linker,
    Model,
    Numbering,
    Part,
    cell,
    details,
    head,
    percent,
    rate_cell,
    row,
    standing_of,
    text,
    value_cell,
)
from verl_opsd.evaluation.shapes import CAUSES, MERGES, WORK, BehaviourTable, Comparison, Standing

#: Groups of the behaviour table that have a table of their own above the fold.
_SHOWN = ("actions", "communication")
#: Lines under a rate that say where the two verdicts on a feature differ.
_DIFFERENCES = 3
_WORDS = {
    "one_did_both": "one did both",
    "both_empty": "both empty",
    "clean_both": "clean, both",
    "clean_one_empty": "clean, one empty",
    "missing_input": "missing input",
    "merge_conflict": "merge conflict",
    "submitted_nothing": "submitted nothing",
    "near_miss": "near miss",
    "wrong_code": "wrong code",
}


def standings(models: Sequence[Model], found: Sequence[Standing], numbering: Numbering, linker: Linker) -> list[Part]:
    """Passes with intervals, what was handed in and what it took, merges, failure causes and who did the work, one row a model."""
    first, second = [], []
    for m, s in zip(models, found, strict=True):
        kind, notes = standing_of(m)
        name, void = m.run.name, sum(s.void.values())
        label = cell(m.label, notes=[*notes, *s.stamps], bad_notes=bool(notes), keep=True)
        first.append(
            row(
                label,
                cell("-" if s.planned is None else s.planned),
                cell(s.ran, link=linker.link(name, s.episodes), title=f"{m.label}: episodes"),
                cell(void, tip=", ".join(f"{k} {n}" for k, n in s.void.items()), tone="warn" if void else ""),
                cell(s.scored),
                rate_cell(s.pairs, f"{m.label}: pairs passed", name, linker, plot=True),
                rate_cell(s.pairs_any, f"{m.label}: pairs with a pass", name, linker),
                rate_cell(s.features, f"{m.label}: features passed", name, linker, plot=True),
                rate_cell(s.features_strict, f"{m.label}: features passed, strictly", name, linker)
                | {"notes": list(s.differences[:_DIFFERENCES])}
                if s.differences
                else cell(""),
                kind=kind,
            )
        )
        per_pair = (
            s.messages_per_pair,
            s.minutes_per_pair,
            s.policy_tokens_per_pair,
            s.prompt_tokens_per_pair,
            s.cost_per_pair,
        )
        second.append(
            row(
                cell(m.label, keep=True),
                rate_cell(s.non_empty, f"{m.label}: non-empty patches", name, linker),
                rate_cell(s.submitted, f"{m.label}: submitted", name, linker),
                cell(plots.number(s.median_patch_bytes), tip=f"of non-empty patches {plots.number(s.median_non_empty_bytes)}"),
                cell(plots.number(s.median_steps)),
                *(cell(_count(x)) for x in per_pair),
                *(cell("-" if n is None else f"{n:,}") for n in (s.parameters, s.active_parameters)),
                cell(
                    s.serving.get("manifest") or s.serving.get("engine") or s.serving.get("serving") or "-",
                    notes=[f"{k} {v}" for k, v in s.serving.items() if k not in ("manifest", "engine", "serving")],
                ),
                kind=kind,
            )
        )
    out = [
        numbering.table(
            "Standings. Passes are counted on the merged tree over scored pairs; bars are 95% Wilson intervals from 0 to 100%. "
            "Infrastructure faults are void and in no denominator. An underlined number shows the episodes behind it.",
            head("<", "planned", "ran", "void", "scored", "both features pass", "one or both", "features passed", "strictly"),
            first,
            known=True,
        ),
        numbering.table(
            "What agents handed in (of agents that ended their run), and what a scored pair took.",
            head(
                "<",
                "non-empty",
                "submitted",
                "median patch, B",
                "median steps",
                "messages",
                "minutes",
                "tokens written",
                "tokens read",
                "cost",
                "parameters",
                "active",
                "<serving",
            ),
            second,
            known=True,
        ),
    ]
    causes = [c for c in CAUSES if any(s.causes.get(c) for s in found)]
    merges = [x for x in MERGES if any(s.merges.get(x) for s in found)]
    third = numbering.table(
        "How patches met (pairs) and what became of features; each feature has one cause, the first that holds from left to right.",
        head("<", *(_WORDS.get(x, x) for x in merges), *(_WORDS.get(x, x) for x in causes)),
        [
            row(
                cell(m.label, keep=True),
                *(cell(s.merges.get(x, 0)) for x in merges),
                *(cell(s.causes.get(x, 0)) for x in causes),
                kind=standing_of(m)[0],
            )
            for m, s in zip(models, found, strict=True)
        ],
    )
    work = [w for w in WORK if any(s.work.get(w) for s in found)]
    if not set(work) - {"ungraded"}:
        return [
            *out,
            third,
            text("Who did the work is not known: no patch was graded alone (opsd standings --grade-alone).", True),
        ]
    fourth = numbering.table(
        "Who did a pair's work, from each patch alone on both suites.",
        head("<", *(_WORDS.get(x, x) for x in work)),
        [
            row(cell(m.label, keep=True), *(cell(s.work.get(x, 0)) for x in work), kind=standing_of(m)[0])
            for m, s in zip(models, found, strict=True)
        ],
    )
    return [*out, third, fourth]


def _count(x: float | None) -> str:
    return "-" if x is None else f"{x:,.0f}" if abs(x) >= 100 else plots.number(x)


def comparisons(found: Sequence[Comparison], models: Sequence[Model], numbering: Numbering) -> list[Part]:
    """Paired comparisons against the baseline; struck through where one of the two is invalidated."""
    marked = {m.label for m in models if standing_of(m)[0]}
    if not found:
        return []
    heads = head(
        "<",
        "<metric",
        "<verdict",
        ("pairs", "pairs that both were scored on"),
        "baseline",
        "model",
        "difference",
        "95% interval",
        ("p", "two-sided"),
        "p, corrected",
        ("floor", "difference that re-runs of the same weights explain"),
        ("smallest", "smallest true difference that this design can show"),
    )
    rows = [
        row(
            cell(c.model, tip=c.sentence),
            cell(c.metric),
            cell(c.verdict, tone={"better": "pass", "worse": "fail"}.get(c.verdict, "muted"), wrap=True),
            cell(c.common, tip=f"{c.dropped} pairs that only one has are left out"),
            cell(percent(c.value_baseline)),
            cell(percent(c.value_model)),
            cell(f"{100 * c.difference:+.0f}"),
            cell("-" if c.low is None or c.high is None else f"{100 * c.low:+.0f} to {100 * c.high:+.0f}"),
            cell(f"{c.p:.2g}", tip=c.test),
            cell(f"{c.p_adjusted:.2g}", tip=c.correction),
            cell("-" if c.floor is None else f"{100 * c.floor:.0f}", tip=c.floor_of),
            cell("none" if c.smallest is None else f"{100 * c.smallest:.0f}"),
            kind="invalid" if c.model in marked or c.baseline in marked else "",
        )
        for c in found
    ]
    floors = sorted({c.floor_of for c in found})
    return [
        numbering.table(
            f"Against {found[0].baseline}, on common pairs; differences in percentage points. {found[0].test[0].upper()}{found[0].test[1:]}; noise floor: {'; '.join(floors)}.",
            heads,
            rows,
            known=True,
        )
    ]


def grid(models: Sequence[Model], found: Sequence[Standing], numbering: Numbering, linker: Linker) -> list[Part]:
    """One row a pair, one column a model."""
    pairs = sorted({c.pair for s in found for c in s.grid})
    by = [{c.pair: c for c in s.grid} for s in found]
    rows = []
    for pair in pairs:
        cells = [cell(pair)]
        for m, cs in zip(models, by, strict=True):
            c = cs.get(pair)
            if c is None:
                cells.append(cell("", tip="not run"))
                continue
            merges = ", ".join(f"{_WORDS.get(k, k)}{f' x{n}' if n > 1 else ''}" for k, n in c.merges.items())
            void = f"{c.void} void" if c.void else ""
            tip = f"{merges or 'none scored'}; {plots.number(c.minutes)} min, {plots.number(c.messages)} messages"
            shown = f"{c.features}/{c.of}" if c.of else void or "-"
            made = cell(shown, tip=tip, link=linker.link(m.run.name, c.episodes), title=f"{m.label}, {pair}")
            if c.of:
                made["tone"] = "pass" if c.features == c.of else "muted" if not c.features else ""
                if void or any(k not in ("clean_both",) for k in c.merges):
                    made["notes"] = [x for x in (", ".join(_WORDS.get(k, k) for k in c.merges if k != "clean_both"), void) if x]
            cells.append(made)
        rows.append(row(*cells))
    table = numbering.table(
        "Features passed of those that could, by pair; merges that were not clean, and void seeds, stand below.",
        head("<pair", *(m.label for m in models)),
        rows,
    )
    return [table] if len(rows) <= 40 else [details(f"{len(rows)} pairs", [table])]


def behaviour(models: Sequence[Model], table: BehaviourTable, numbering: Numbering, linker: Linker, source: str) -> list[Part]:
    """Action mix with its drift, the message profile beside the reference corpus, and the other groups on demand."""
    names = list(table.models)
    by_key = dict(zip(names, models, strict=True))
    out: list[Part] = []
    actions = [m for m in table.metrics if m.group == "actions"]
    if any(m.values[n].value for m in actions for n in names):
        rows = [(m.title, {n: m.values[n].value for n in names}) for m in actions]
        labels = [by_key[n].label for n in names]
        out.append(
            numbering.figure(
                "Action mix: share of executed commands with a label. A command may have several, so that shares do not sum to 100%.",
                svg=plots.dumbbells([(t, {by_key[n].label: v for n, v in cells.items()}) for t, cells in rows], labels),
                legend=plots.legend(labels),
            )
        )
    else:
        out.append(text("No command was executed."))
    for group in dict.fromkeys([*_SHOWN, *(m.group for m in table.metrics)]):
        members = [m for m in table.metrics if m.group == group]
        if all(v.value is None for m in members for v in m.values.values()):
            continue
        reference = any(m.reference is not None for m in members)
        drift = any(m.drift for m in members)
        rows_ = []
        for m in members:
            cells = [
                cell(
                    m.title,
                    tip=m.definition,
                    notes=["constant over models"] if m.constant and m.values[names[0]].value is not None else [],
                )
            ]
            cells += [
                value_cell(m.values[n], m.unit, f"{by_key[n].label}: {m.title}", by_key[n].run.name, linker) for n in names
            ]
            if reference:
                cells.append(
                    cell(
                        "-" if m.reference is None else percent(m.reference) if m.unit == "share" else plots.number(m.reference)
                    )
                )
            if drift:
                cells += [_drift(m.drift.get(n, "")) for n in names]
            cells.append(cell("" if m.unit == "share" else m.unit))
            rows_.append(row(*cells))
        heads = ["<", *(by_key[n].label for n in names)] + (["reference"] if reference else [])
        heads += [f"drift, {by_key[n].label}" for n in names] if drift else []
        made = numbering.table(
            _caption(group, table, by_key, source if reference else "", drift), head(*heads, "<unit"), rows_, known=True
        )
        out.append(made if group in _SHOWN else details(f"{group.capitalize()} ({len(members)} metrics)", [made]))
    return out


def _drift(word: str) -> dict[str, str]:
    return cell(word, tone={"overshot": "fail", "away": "warn", "toward": "pass"}.get(word, "muted"), wrap=True)


def _caption(group: str, table: BehaviourTable, by_key: Mapping[str, Model], source: str, drift: bool) -> str:
    said = {
        "actions": "Action mix." + (" Drift is from the base towards the teacher: past it is overshot." if drift else ""),
        "communication": "Message profile.",
    }.get(group, f"{group.capitalize()}.")
    if source:
        away = ", ".join(f"{by_key[n].label} {plots.number(d)}" for n, d in table.distance.items() if d is not None)
        said += f" Reference: {source}. Mean distance to it (log ratio; 0.69 is a factor of two): {away or 'not defined'}."
    return f"{said} Definitions of version {table.version}, on hover."


def merges(models: Sequence[Model], numbering: Numbering) -> list[Part]:
    """From patches to merges to features, over the pairs of the last model."""
    from verl_opsd.evaluation.outcomes import is_empty, merge_of

    m = models[-1]
    patches: Counter[str] = Counter()
    met: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    links: Counter[tuple[int, str, str]] = Counter()
    for e in m.episodes:
        if e.grade is None:
            continue
        empty = sum(is_empty(a, e.grade) for a in e.agents)
        a = ("both wrote", "one wrote", "neither wrote")[empty]
        b = _WORDS.get(merge_of(e.grade), merge_of(e.grade))
        c = ("0 features pass", "1 feature passes", "2 features pass")[sum(f.passed for f in e.grade.features)]
        patches[a] += 1
        met[b] += 1
        passed[c] += 1
        links[0, a, b] += 1
        links[1, b, c] += 1
    if not patches:
        return [text(f"{m.label}: no pair was scored.")]
    order = [_WORDS.get(x, x) for x in MERGES]
    stages = [
        ("patches", {k: patches[k] for k in ("both wrote", "one wrote", "neither wrote") if patches[k]}),
        ("merge", {k: met[k] for k in sorted(met, key=lambda k: order.index(k) if k in order else len(order))}),
        ("merged tree", {k: passed[k] for k in sorted(passed, reverse=True)}),
    ]
    return [
        numbering.figure(f"Merge flow of the {sum(patches.values())} scored pairs of {m.label}.", svg=plots.flow(stages, links))
    ]
