"""The numbers of a report by key, each with its denominator: what predictions and claims name.

    <model>.<metric>       a row of the behaviour table: eval.pairs_passed, eval.action_write, eval@2.patch_bytes, train.steps
    kl.mean, kl.quarter.4  divergence over loss positions, nats; agreement.quarter.1, drift.quarter.4 likewise
    loss.round.3           the loss of a round

``eval`` is the policy of the last version that was evaluated, ``eval@N`` that of version N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from verl_opsd.evaluation.shapes import BehaviourMetric, BehaviourTable
from verl_opsd.evidence.predictions import Number

#: What the letters of the definitions stand for.
_WORDS = {"P": "scored pairs", "2 P": "features of scored pairs", "A": "agents of scored pairs", "S": "delivered sends"}


def denominator(metric: BehaviourMetric) -> str:
    """What a behaviour metric's denominator counts, in words; of a median, what it is over."""
    if over := re.search(r"mean over ([A-Z])$", metric.definition):
        return _WORDS[over[1]]
    text = re.sub(r"\s*(\(.*\)|;.*)$", "", metric.definition)
    if over := re.search(r"median (?:length )?over ([A-Z]|agents with a patch)\b", text):
        return _WORDS.get(over[1], over[1])
    if " / " in text:
        last = text.rsplit(" / ", 1)[1].removeprefix("1000 ")
        return _WORDS.get(last, last)
    return text


def behaviour_numbers(table: BehaviourTable) -> dict[str, Number]:
    """Every value of a behaviour table. Pairs that infrastructure faults took away are counted in each metric's own unit, at as many a
    pair as the scored ones have."""
    found = {}
    for metric in table.metrics:
        of = denominator(metric)
        for model, v in metric.values.items():
            pairs, void = table.pairs[model], table.void[model]
            lost = math.ceil(void * v.denominator / pairs) if pairs else void
            found[f"{model}.{metric.key}"] = Number(v.value, v.denominator, of, lost, v.low, v.high, v.episodes)
    return found


def training_numbers(report: Mapping[str, Any]) -> dict[str, Number]:
    """Divergence, agreement, drift and loss of a run's updates."""
    d, found = report.get("distillation") or {}, {}
    if d:
        n = int(d["loss_positions"])
        of = "loss positions"
        for key in ("mean", "median", "p99", "max_over_mean"):
            found[f"kl.{key}"] = Number(d.get(f"kl_{key}"), n, of)
        for name, key in (("kl", "kl_by_quarter"), ("agreement", "agreement_by_quarter"), ("drift", "drift_by_quarter")):
            cells = list(d["summary"]["by"]["quarter"].values())
            for q, value in enumerate(d.get(key, ()), 1):
                found[f"{name}.quarter.{q}"] = Number(value, int(cells[q - 1]["loss_positions"]), of)
    for i, loss in enumerate(report.get("loss_by_round") or (), 1):
        found[f"loss.round.{i}"] = Number(loss, 1, "rounds")
    return found
