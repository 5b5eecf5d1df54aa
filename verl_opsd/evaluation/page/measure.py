"""What the page and ``report.json`` say alike: models, standings, behaviour, comparisons, numbers, verdicts on predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_opsd.evaluation.behaviour.table import behaviour as behaviour_table
from verl_opsd.evaluation.numbers import behaviour_numbers, training_numbers
from verl_opsd.evaluation.page.gather import RunData
from verl_opsd.evaluation.page.parts import Model
from verl_opsd.evaluation.shapes import BehaviourTable, Comparison, Standing
from verl_opsd.evaluation.sources import comparisons
from verl_opsd.evaluation.standings import model_info, rows_of_run, standing
from verl_opsd.evidence.predictions import Judged, Number, judge


@dataclass(frozen=True)
class Page:
    """What the page and ``report.json`` say alike.

    Attributes:
        found: standing of each of ``models``. compared: paired comparisons with the first of them.
        numbers, judged: run name -> its numbers; -> its predictions by the name of their file.
    """

    runs: Sequence[RunData]
    models: Sequence[Model]
    found: Sequence[Standing]
    compared: Sequence[Comparison]
    table: BehaviourTable | None
    numbers: Mapping[str, Mapping[str, Number]]
    judged: Mapping[str, Mapping[str, Sequence[Judged]]]


#: Behind a model's name in every table, plot and comparison, where an invalidation reaches it.
MARKED = " (invalidated)"


def models_of(runs: Sequence[RunData]) -> list[Model]:
    """The models that the tables compare: of one run its training episodes and every version that was evaluated; of several, the last
    evaluated version of each (its training episodes where none was)."""
    out: list[Model] = []
    for r in runs:
        rows = rows_of_run(r.episodes, r.log)
        if len(runs) > 1:
            last = next((row for row in reversed(rows) if row[1] is not None), None)
            chosen = [(f"{r.name}:eval", r.name, *last[1:])] if last else []
            chosen = chosen or [(f"{r.name}:train", f"{r.name} (training)", *row[1:]) for row in rows]
        else:
            chosen = [(k, "training episodes" if v is None else f"evaluation, version {v}", v, own) for k, v, own in rows]
        out += [
            Model(
                key,
                label + MARKED * any(m.covers(version) for m in r.marks),
                r,
                "train" if version is None else "eval",
                version,
                episodes,
            )
            for key, label, version, episodes in chosen
        ]
    return out


def numbers_of(run: RunData, models: Sequence[Model], table: BehaviourTable | None) -> dict[str, Number]:
    """The numbers of one run, by the keys of ``evaluation.numbers``."""
    found = training_numbers(run.report)
    if table is not None:
        mine = {m.key: m.key.removeprefix(f"{run.name}:") for m in models if m.run is run}
        for key, n in behaviour_numbers(table).items():
            model, _, metric = key.rpartition(".")
            if model in mine:
                found[f"{mine[model]}.{metric}"] = n
    return found


def measure(runs: Sequence[RunData], teacher: str | None = None, reruns: Sequence[str] = ()) -> Page:
    """Standings, behaviour, comparisons and verdicts on predictions of the runs.

    Args:
        teacher: name of the run in which the teacher itself acted: the action mix is then shown with its drift from the first run.
        reruns: names of the runs that are the first run's weights again: the noise floor.

    The versions of one run, and the runs of a comparison, are compared with the first of them by pairs and by features.
    """
    models = models_of(runs)
    base = models[0].key if teacher is not None else None
    taught = next((m.key for m in models if m.run.name == teacher), None)
    table = behaviour_table({m.key: m.episodes for m in models}, base=base, teacher=taught) if models else None
    numbers = {r.name: numbers_of(r, models, table) for r in runs}
    infos = (model_info(m.run.run.path, m.episodes, m.split, m.version, (m.run.log, m.run.states)) for m in models)
    found = [standing(m.label, m.episodes, info) for m, info in zip(models, infos, strict=True)]
    return Page(
        runs=runs,
        models=models,
        found=found,
        compared=_compared([m for m in models if m.version is not None], found, reruns),
        table=table,
        numbers=numbers,
        judged={r.name: judge(r.run.path, numbers[r.name]) for r in runs},
    )


def _compared(models: Sequence[Model], found: Sequence[Standing], reruns: Sequence[str]) -> list[Comparison]:
    """Every model that has a scored pair in common with the first, against it."""
    scored = [{e.pair_key for e in m.episodes if e.in_standings} for m in models]
    kept = [m for m, pairs in zip(models, scored, strict=True) if pairs & scored[0]]
    again = [m.label for m in kept[1:] if m.run.name in reruns]
    if len(kept) < 2 + len(again):
        return []
    nodes = {s.model: s.serving.get("node", "node not recorded") for s in found}
    return comparisons({m.label: m.episodes for m in kept}, kept[0].label, again, nodes)


def as_json(numbers: Mapping[str, Number]) -> dict[str, Any]:
    """Numbers as plain values, for ``report.json``; the episodes are left to the page."""
    return {k: {x: y for x, y in asdict(n).items() if x != "episodes"} for k, n in numbers.items()}
