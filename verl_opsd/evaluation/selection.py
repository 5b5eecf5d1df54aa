"""Choosing among checkpoints by what they do: qualification gates over behaviour metrics, with the untouched base as an arm.

Gates are data: a name, a metric of ``behaviour.definitions``, and the bounds of its value. The validation loss stands beside them and
decides nothing, because the checkpoint with the lowest loss may be the one that acts worst.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.definitions import DEFINITIONS
from verl_opsd.evaluation.behaviour.table import behaviour
from verl_opsd.evaluation.shapes import BehaviourValue
from verl_opsd.tokens.records import Episode


@dataclass(frozen=True)
class QualificationGate:
    """Passed by an arm whose metric is in [``least``, ``most``]; with ``over_base`` also at least that much above the base's."""

    name: str
    metric: str
    least: float | None = None
    most: float | None = None
    over_base: float | None = None


#: A: agents that hand in something; C: agents that submit. Further gates are the user's (``--gates``).
DEFAULT = (QualificationGate("A", "empty_patches", most=0.5), QualificationGate("C", "submitted", least=0.5))


def read_gates(path: Path) -> tuple[QualificationGate, ...]:
    """Gates of a JSON file, a list of objects with the fields of :class:`QualificationGate`.

    Raises:
        OpsdError: another form, an unknown metric, a gate that none passes, without a bound or with one that is no finite number, or
            two of one name.
    """
    form = 'a list of {"name": ..., "metric": ..., "least" | "most" | "over_base": number}'
    try:
        gates = tuple(QualificationGate(**entry) for entry in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OpsdError(f"{path}: {error}", f"gates are {form}", "correct the file") from error
    known = set(DEFINITIONS)
    for gate in gates:
        if gate.metric not in known:
            raise OpsdError(f"{path}: metric {gate.metric!r}", f"metrics are {', '.join(sorted(known))}", "choose one of them")
        bounds = [b for b in (gate.least, gate.most, gate.over_base) if b is not None]
        if not all(type(b) in (int, float) and math.isfinite(b) for b in bounds):
            raise OpsdError(f"{path}: gate {gate.name} with bounds {bounds}", f"gates are {form}, finite", "correct the file")
        if gate.least is not None and gate.most is not None and gate.least > gate.most:
            raise OpsdError(
                f"{path}: gate {gate.name} of at least {gate.least}, at most {gate.most}",
                "no value passes it",
                "correct the file",
            )
        if not bounds:
            raise OpsdError(f"{path}: gate {gate.name} without a bound", f"gates are {form}", "give it one")
    if not gates or len({g.name for g in gates}) != len(gates):
        raise OpsdError(f"{path}: gates {[g.name for g in gates]}", "gates have names of their own", "rename one")
    return gates


@dataclass(frozen=True)
class Verdict:
    """One arm under one gate. ``value`` is None, and the gate not passed, where the metric has no denominator."""

    gate: str
    value: BehaviourValue
    passed: bool


@dataclass(frozen=True)
class Arm:
    """One model: its gates, the share of features that it passed, its validation loss in nats a token where there is one."""

    name: str
    verdicts: tuple[Verdict, ...]
    features: BehaviourValue
    val_loss: float | None

    @property
    def qualified(self) -> bool:
        """All gates passed."""
        return all(v.passed for v in self.verdicts)


def scan(
    models: Mapping[str, Iterable[Episode]], base: str, gates: Sequence[QualificationGate], losses: Mapping[str, float]
) -> list[Arm]:
    """Every arm's verdicts, the base first.

    Args:
        models: name -> evaluation episodes, of the same pairs.
        losses: name -> validation loss.

    Raises:
        OpsdError: no base among the models, a loss of no model, or models that played other pairs.
    """
    played_by = {name: list(episodes) for name, episodes in models.items()}
    if base not in models or not set(losses) <= set(models):
        raise OpsdError(
            f"models {sorted(models)}, base {base}, losses of {sorted(losses)}",
            "every scan runs the untouched base as an arm",
            "name the base's run, and losses of models that are there",
        )
    played = {name: sorted(e.pair_key for e in episodes) for name, episodes in played_by.items()}
    other = [name for name, keys in played.items() if keys != played[base]]
    if other:
        raise OpsdError(
            f"{', '.join(other)} played other pairs than {base}",
            "arms are compared on the same pairs, as often",
            "evaluate all of them on one subset",
        )
    table = {m.key: m for m in behaviour(played_by).metrics}
    arms = []
    for name in sorted(models, key=lambda n: n != base):
        verdicts = tuple(_verdict(g, table[g.metric].values[name], table[g.metric].values[base]) for g in gates)
        arms.append(Arm(name, verdicts, table["features_passed"].values[name], losses.get(name)))
    return arms


def _verdict(gate: QualificationGate, value: BehaviourValue, base: BehaviourValue) -> Verdict:
    x = value.value
    if x is None:
        return Verdict(gate.name, value, False)
    passed = (gate.least is None or x >= gate.least) and (gate.most is None or x <= gate.most)
    if gate.over_base is not None:
        passed = passed and base.value is not None and x >= base.value + gate.over_base
    return Verdict(gate.name, value, passed)


def chosen(arms: Sequence[Arm], base: str) -> str | None:
    """The qualified arm, other than the base, with the most features; None where none beats the base. Ties: the first."""
    floor = next(a for a in arms if a.name == base).features.value or 0.0
    best = [a for a in arms if a.name != base and a.qualified and (a.features.value or 0.0) > floor]
    return max(best, key=lambda a: a.features.value or 0.0).name if best else None


def val_losses(metrics: Path) -> dict[int, float]:
    """Step -> validation loss, from the ``metrics.jsonl`` of a warm start; of a step that was run twice the last.

    Raises:
        OpsdError: another form.
    """
    out: dict[int, float] = {}
    try:
        for line in metrics.read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            if "val/loss" in entry["data"]:
                out[int(entry["step"])] = float(entry["data"]["val/loss"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OpsdError(
            f"{metrics}: {type(error).__name__}: {error}",
            'it is the metrics.jsonl of a warm start: {"step": ..., "data": {...}} a line',
            "correct the path",
        ) from error
    return out
