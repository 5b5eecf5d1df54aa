"""The page as one file: sections, the index of episodes, their conversations in compressed blocks, style and script inline.

Nothing is loaded from anywhere. Conversations that would make the file larger than its budget are left out, and the page and the
caller are told which.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from verl_opsd import __version__
from verl_opsd.evaluation.page import results, training, trust
from verl_opsd.evaluation.page.episodes import Options, conversations, index, packed
from verl_opsd.evaluation.page.gather import RunData
from verl_opsd.evaluation.page.measure import Page
from verl_opsd.evaluation.page.parts import Linker, Model, Numbering, Part, head, percent
from verl_opsd.evaluation.page.plots import number
from verl_opsd.evaluation.shapes import Standing
from verl_opsd.evidence.copies import warning
from verl_opsd.evidence.predictions import Judged


def render(page: Page, options: Options) -> str:
    """The page as one HTML file."""
    runs, models, found, table, numbers, judged = page.runs, page.models, page.found, page.table, page.numbers, page.judged
    linker, numbering = Linker.over(runs), Numbering()
    sections: list[dict[str, Any]] = []

    def section(title: str, parts: list[Part]) -> None:
        sections.append({"id": title.lower().replace(" ", "-"), "title": title, "parts": parts})

    if table is not None:
        section(
            "Standings",
            results.standings(models, found, numbering, linker) + results.comparisons(page.compared, models, numbering),
        )
        section("Tasks", results.grid(models, found, numbering, linker))
        section("Distillation", training.training(runs, models, found, table, numbering))
        section("Behaviour", results.behaviour(models, table, numbering, linker, _reference()))
        section("Merges", results.merges(models, numbering))
    section("Gates", trust.gates(runs, numbering))
    section("Predictions", trust.predictions(runs, judged, numbering, linker))
    section("Claims", trust.ledger(runs, numbers, numbering, linker))
    section("Evidence", trust.evidence(runs, numbering))
    section("Provenance", trust.provenance(runs, numbering))
    episodes = [(r, e) for r in runs for e in r.episodes]
    talks, why_not, notes = conversations(runs, options)
    context = {
        "title": _title(runs),
        "lede": _lede(runs),
        "stamps": _stamps(runs, judged, options, notes),
        "glance": _glance(models, found, runs, linker),
        "sections": sections,
        "version": __version__,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "footer": "One file, nothing is loaded. Intervals are 95%; divergences in nats a token at temperature 1.",
        "index_head": head("<split", "version", "<pair", "<outcome", "features", "<merge", "steps", "messages", "minutes"),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
    }
    environment = Environment(loader=FunctionLoader(_source), autoescape=True, trim_blocks=True, lstrip_blocks=False)
    template = environment.get_template("page.html.jinja")
    empty = template.render(**context, index="", episodes_text="", blocks=[])
    common, kept, left = packed(talks, options.budget - len(empty.encode(errors="backslashreplace")) - 600 * len(episodes))
    rows = index(episodes, {i: n for n, i in enumerate(kept)}, why_not, runs)
    words = f"{len(episodes)} episodes. An episode opens as the two agents' conversations side by side, tokens coloured by their divergence where they were trained on."
    if left:
        words += f" The conversations of {len(left)} episodes are left out, so that the file stays below {options.budget / 1e6:.0f} MB: opsd report RUN_DIR --max-mb puts more in."
    return str(template.render(**context, index=rows, common=common, blocks=list(kept.values()), episodes_text=words))


def _title(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"{', '.join(r.name for r in runs[:-1])} and {runs[-1].name} compared"
    r = runs[0]
    if r.opsd.mode == "evaluate":
        return f"{r.opsd.recipe}: {Path(r.meta['student']).name} evaluated"
    return f"{r.opsd.recipe}: {Path(r.meta['student']).name} taught by {'its own base' if r.opsd.teacher.kind == 'self' else Path(str(r.opsd.teacher.path)).name} with {r.opsd.brief.name.replace('_', ' ')}"


def _lede(runs: Sequence[RunData]) -> str:
    r = runs[0]
    if len(runs) > 1:
        return f"{len(runs)} runs; the first is the baseline. " + "; ".join(f"{x.name}: {x.run.path}" for x in runs)
    started = trust.when(r.meta["started"]) if "started" in r.meta else "unknown"
    what = f"contract {r.contract.hash[:12]}, started {started} UTC, {r.run.path}"
    if r.opsd.mode == "evaluate":
        return f"{len(r.episodes)} episodes, {what}"
    return f"Scale {r.opsd.scale}, {r.opsd.loss.divergence.replace('_', ' ')}, brief in {r.opsd.brief.placement.replace('_', ' ')}, {what}"


def _stamps(
    runs: Sequence[RunData], judged: Mapping[str, Mapping[str, Sequence[Judged]]], options: Options, notes: Sequence[str]
) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if options.reveal:
        out.append(
            {
                "bad": True,
                "text": "This file shows hidden tests and answers: it must not reach what trains or evaluates an agent.",
            }
        )
    for r in runs:
        who = f"{r.name}: " if len(runs) > 1 else ""
        out += [{"bad": True, "text": f"{who}Invalidated, {m.field}={m.value}: {m.reason}"} for m in r.marks]
        wrong = [f for f in r.findings if not f.killed]
        if wrong:
            out.append(
                {
                    "bad": True,
                    "text": f"{who}The evidence was changed: {wrong[0]}{f', and {len(wrong) - 1} more' if len(wrong) > 1 else ''}.",
                }
            )
        altered = [e for e, (s, _) in r.states.items() if s == "altered"]
        if altered:
            out.append(
                {"bad": True, "text": f"{who}{len(altered)} episodes are not as they were graded ({', '.join(altered[:3])})."}
            )
        failed = sorted({x["gate"] for x in r.log if x["verdict"] == "fail" and not x["gate"].startswith("prediction:")})
        if failed:
            out.append({"bad": True, "text": f"{who}Failed gates: {', '.join(failed)}."})
        near = sorted({e.near_benchmark for e in r.episodes if e.near_benchmark})
        out += [{"text": f"{who}Not a CooperBench score: {reason}"} for reason in near]
        if r.opsd.brief.allow_answer:
            out.append({"text": f"{who}The teacher's brief may hold answers (allow_answer)."})
        if w := warning(r.log, r.run.path):
            out.append({"text": f"{who}{w}"})
    return out + [{"text": n} for n in notes]


def _glance(
    models: Sequence[Model], found: Sequence[Standing], runs: Sequence[RunData], linker: Linker
) -> list[dict[str, Any]]:
    out = []
    for m, s in [x for x in zip(models, found, strict=True) if not x[0].key.startswith("train")][-3:]:
        ends = (
            f"{percent(s.pairs.value)}, 95% {percent(s.pairs.low)} to {percent(s.pairs.high)}"
            if s.pairs.total
            else "none scored"
        )
        out.append(
            {
                "term": f"pairs passed, {m.label}",
                "text": f"{s.pairs.passed}/{s.pairs.total}",
                "small": ends,
                "link": linker.link(m.run.name, s.pairs.hits),
                "title": f"{m.label}: pairs passed",
            }
        )
    for r in runs if len(runs) == 1 else ():
        rounds = (r.report.get("distillation") or {}).get("kl_by_round") or []
        if rounds:
            out.append(
                {
                    "term": "divergence, nats a token",
                    "text": f"{number(rounds[0])} → {number(rounds[-1])}",
                    "small": f"first to last of {len(rounds)} rounds",
                }
            )
    gates = [
        x["verdict"] for r in runs for x in r.log if x["threshold"] is not None and not x["gate"].startswith("prediction:")
    ]
    out.append({"term": "gates", "text": f"{gates.count('pass')} passed, {gates.count('fail')} failed"})
    return out


def _reference() -> str:
    return str(json.loads((files("verl_opsd.evaluation.behaviour") / "reference.json").read_text())["source"])


def _asset(name: str) -> Markup:
    return Markup((files(__package__) / name).read_text())


def _source(name: str) -> str:
    return (files(__package__) / name).read_text()
