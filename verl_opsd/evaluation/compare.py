"""One model against another on their common pairs: value, interval, test, floor, and what may be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.design import ASSUMED_DISCORDANCE, CANNOT, Design, Floor
from verl_opsd.evaluation.shapes import Comparison, Verdict
from verl_opsd.evaluation.statistics import adjust, bootstrap, mcnemar, permutation

ALPHA = 0.05


@dataclass(frozen=True)
class Outcomes:
    """Scores of a model. ``values``: pair -> one score (0 to 1) a scored seed; pairs without a scored seed are left out."""

    model: str
    metric: str
    values: dict[str, tuple[float, ...]]


def repository(pair: str) -> str:
    """The repository in a pair's key ``repo/task<ID>/f<A>_f<B>``."""
    return pair.split("/", 1)[0]


def compare(
    baseline: Outcomes,
    models: Sequence[Outcomes],
    rng: np.random.Generator,
    *,
    floor: Floor | None = None,
    correction: Literal["holm", "bh"] = "holm",
) -> list[Comparison]:
    """Every model against the baseline; the p-values are corrected for their number.

    The test follows from the design alone: exact McNemar for passes with one seed, otherwise the paired permutation test on the
    pairs' means. The interval is the wider one of the bootstraps by pair and by repository. ``smallest`` is of a design in which a
    pair passes or does not, with the floor's discordance.

    Raises:
        OpsdError: other metrics than the baseline's, or a model without a common pair.
    """
    rows = [_compared(baseline, m, rng, floor, len(models)) for m in models]
    adjusted = adjust([r.p for r in rows], correction)
    return [_judged(replace(r, p_adjusted=p, correction=correction)) for r, p in zip(rows, adjusted, strict=True)]


def _compared(base: Outcomes, model: Outcomes, rng: np.random.Generator, floor: Floor | None, rows: int) -> Comparison:
    common = sorted(set(base.values) & set(model.values))
    if base.metric != model.metric or not common:
        raise OpsdError(
            f"{model.model} ({model.metric}) against {base.model} ({base.metric}): {len(common)} common pairs",
            "models are compared on one metric and on pairs that both were scored on",
            "evaluate both on the same subset",
        )
    a, b = ({p: o.values[p] for p in common} for o in (base, model))
    mean_a, mean_b = ([float(np.mean(v[p])) for p in common] for v in (a, b))
    seeds = min(len(v) for m in (a, b) for v in m.values())
    one = all(len(v) == 1 and v[0] in (0, 1) for m in (a, b) for v in m.values())
    p = mcnemar([x == 1 for x in mean_a], [x == 1 for x in mean_b]) if one else permutation(mean_a, mean_b, rng)
    by_pair, by_repository = bootstrap(a, b, str, rng), bootstrap(a, b, repository, rng)
    low, high = max(by_pair, by_repository, key=lambda ends: ends[1] - ends[0])
    value_a, value_b = float(np.mean(mean_a)), float(np.mean(mean_b))
    discordance = ASSUMED_DISCORDANCE if floor is None else min(0.5, floor.discordance)
    design = Design(len(common), seeds, value_a, discordance, ALPHA / rows)
    return Comparison(
        metric=base.metric,
        baseline=base.model,
        model=model.model,
        value_baseline=value_a,
        value_model=value_b,
        difference=value_b - value_a,
        low=low,
        high=high,
        common=len(common),
        dropped=len(set(base.values) ^ set(model.values)),
        seeds=seeds,
        test="exact McNemar" if one else "paired permutation",
        p=p,
        p_adjusted=p,
        correction="none",
        floor=None if floor is None else floor.value,
        floor_of="not measured: the baseline was not run again" if floor is None else floor.of,
        smallest=design.smallest(),
        verdict="not shown",
        sentence="",
    )


def _judged(c: Comparison) -> Comparison:
    verdict: Verdict
    if c.floor is not None and abs(c.difference) <= c.floor:
        verdict = "inside the floor"
    elif c.p_adjusted <= ALPHA:
        verdict = "better" if c.difference > 0 else "worse"
    else:
        verdict = CANNOT if c.smallest is None else "not shown"
    said = {
        "better": f"{c.model} is better than {c.baseline}",
        "worse": f"{c.model} is worse than {c.baseline}",
        "not shown": f"no difference between {c.model} and {c.baseline} is shown",
        "inside the floor": f"{c.model} is inside the noise floor of {c.baseline}",
        CANNOT: f"a difference between {c.model} and {c.baseline} {CANNOT}",
    }[verdict]
    floor = f"noise floor {'' if c.floor is None else f'{c.floor:.0%}, '}{c.floor_of}"
    sentence = (
        f"{said}: {c.metric} {c.value_model:.0%} against {c.value_baseline:.0%} on {c.common} common pairs, difference "
        f"{c.difference:+.0%} (95% {c.low:+.0%} to {c.high:+.0%}), {c.test} p={c.p:.2g}, "
        f"{c.correction} {c.p_adjusted:.2g}; {floor}"
    )
    return replace(c, verdict=verdict, sentence=sentence)
