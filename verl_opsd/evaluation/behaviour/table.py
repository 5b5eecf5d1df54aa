"""Models side by side: values, what tells nothing apart, drift from the base, distance to a reference, strata of message volume."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.definitions import DEFINITIONS, Definition
from verl_opsd.evaluation.behaviour.metrics import Measured, measure, summed
from verl_opsd.evaluation.behaviour.patterns import VERSION
from verl_opsd.evaluation.memory import uncollected
from verl_opsd.evaluation.shapes import BehaviourMetric, BehaviourTable, BehaviourValue, Stratum
from verl_opsd.evaluation.statistics import rate, wilson
from verl_opsd.tokens.records import Episode

#: Messages a pair: up to 3, 4 to 5, 6 and more.
STRATA: tuple[tuple[int, int | None], ...] = ((0, 3), (4, 5), (6, None))

#: A share that moves by no more than this stays where it is.
STILL = 0.005

#: Added to both sides of a ratio, so that a share of 0 is a finite way from the reference.
OFFSET = 0.01


@cache
def reference() -> dict[str, float]:
    """The reference corpus' value of each metric that it has (``reference.json``)."""
    values: dict[str, float] = json.loads((files(__package__) / "reference.json").read_text())["values"]
    return values


@uncollected()
def behaviour(
    models: Mapping[str, Iterable[Episode]], *, base: str | None = None, teacher: str | None = None
) -> BehaviourTable:
    """The behaviour of several models; episodes without a grade, and those in which an agent read an answer, are
    counted in ``void`` and in nothing else.

    Args:
        models: name -> its episodes, from any number of runs.
        base, teacher: names of those that drift is measured from and towards; both or none.

    Raises:
        OpsdError: no model, the same episode twice, or a base or teacher that is not one of the models, or that are one.
    """
    drifts = base is not None and teacher is not None and base != teacher and {base, teacher} <= set(models)
    if not models or not (drifts or base is teacher is None):
        raise OpsdError(
            f"models {sorted(models)}, base {base}, teacher {teacher}",
            "a table has a model, and drift needs a base and a teacher among them, two of them",
            "name both, or none of them",
        )
    measured: dict[str, list[Measured]] = {}
    void: dict[str, int] = {}
    for name, episodes in models.items():
        episodes = list(episodes)
        twice = [k for k, n in Counter(e.episode_id for e in episodes).items() if n > 1]
        if twice:
            raise OpsdError(f"{name}: {', '.join(sorted(twice)[:3])} twice", "an episode counts once", "leave one run out")
        scored = sorted((e for e in episodes if e.in_standings), key=lambda e: e.episode_id)
        measured[name] = measure(scored)
        void[name] = len(episodes) - len(scored)
    rows = tuple(_row(d, measured, base, teacher) for d in DEFINITIONS.values())
    everyone = {"all": [m for ms in measured.values() for m in ms]} if len(measured) > 1 else {}
    return BehaviourTable(
        version=VERSION,
        models=tuple(models),
        pairs={name: len(ms) for name, ms in measured.items()},
        void=void,
        metrics=rows,
        strata=tuple(s for name, ms in {**everyone, **measured}.items() for s in _strata(name, ms)),
        distance={name: distance({m.key: m.values[name].value for m in rows}) for name in models},
        base=base,
        teacher=teacher,
    )


def distance(values: Mapping[str, float | None]) -> float | None:
    """Mean over the reference's metrics of |ln((value + 0.01) / (reference + 0.01))|; None where one of them has no value."""
    ways = []
    for key, wanted in reference().items():
        value = values[key]
        if value is None:
            return None
        ways.append(abs(math.log((value + OFFSET) / (wanted + OFFSET))))
    return sum(ways) / len(ways)


def drift(base: float | None, teacher: float | None, model: float | None) -> str | None:
    """How a share moved (``shapes.DRIFTS``); None where one of the three is not known."""
    if base is None or teacher is None or model is None:
        return None
    way, wanted = model - base, teacher - base
    if abs(way) <= STILL:
        return "still"
    if way * wanted <= 0:
        return "away"
    return "overshot" if abs(way) > abs(wanted) else "toward"


def _row(d: Definition, measured: Mapping[str, Sequence[Measured]], base: str | None, teacher: str | None) -> BehaviourMetric:
    values = {name: _value(d, ms) for name, ms in measured.items()}
    shown = [v.value for v in values.values()]
    moved: dict[str, str] = {}
    if base is not None and teacher is not None and d.group == "actions":
        for name, v in values.items():
            way = drift(values[base].value, values[teacher].value, v.value)
            if name not in (base, teacher) and way is not None:
                moved[name] = way
    return BehaviourMetric(
        key=d.key,
        title=d.title,
        group=d.group,
        definition=d.definition,
        unit=d.unit,
        reference=reference().get(d.key),
        values=values,
        constant=len(shown) > 1 and len(set(shown)) == 1,
        drift=moved,
    )


def _value(d: Definition, measured: Sequence[Measured]) -> BehaviourValue:
    value, numerator, denominator = summed(d, [m.parts[d.key] for m in measured])
    hits = tuple(m.episode_id for m in measured if m.parts[d.key].numerator or m.parts[d.key].values)
    ends = wilson(int(numerator), denominator) if d.kind == "share" and numerator is not None else None
    low, high = ends or (None, None)
    return BehaviourValue(value, numerator, denominator, low, high, hits)


def _strata(name: str, measured: Sequence[Measured]) -> list[Stratum]:
    out = []
    for low, high in STRATA:
        inside = [m for m in measured if low <= m.messages and (high is None or m.messages <= high)]
        conflicts = [m.episode_id for m in inside if m.merge == "conflicts"]
        passed = [m.episode_id for m in inside if m.features]
        out.append(
            Stratum(
                model=name,
                low=low,
                high=high,
                pairs=len(inside),
                conflicts=rate(len(conflicts), len(inside), "pairs of the stratum", conflicts),
                features=rate(sum(m.features for m in inside), 2 * len(inside), "features of the stratum's pairs", passed),
            )
        )
    return out
