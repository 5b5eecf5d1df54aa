"""Intervals and tests on counts of passes: which test answers which question, on scipy and statsmodels (imported where used: seconds).

Paired questions (two models on the same pairs): :func:`mcnemar` for one seed, :func:`permutation` for several seeds or shares,
:func:`bootstrap` for an interval. Unpaired rates: :func:`fisher`. Counts of events: :func:`poisson`, :func:`count_permutation`.
All p-values are two-sided; randomness is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import special

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.shapes import Rate

#: 0.975 quantile of the standard normal distribution.
_Z = -float(special.ndtri(0.025))

#: Sign flips or resamples where all of them are too many.
RESAMPLES = 9999


def wilson(passed: int, total: int) -> tuple[float, float] | None:
    """Ends of the 95% Wilson interval of a share; None without a denominator (Wilson 1927; 5 of 10 gives 24% to 76%).

    Raises:
        OpsdError: not 0 <= passed <= total.
    """
    if not 0 <= passed <= total:
        raise OpsdError(f"{passed} of {total}", "a numerator is between 0 and its denominator", "correct the counts")
    if total == 0:
        return None
    share, scale = passed / total, 1 + _Z**2 / total
    center = (share + _Z**2 / (2 * total)) / scale
    half = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2)) / scale
    return max(0.0, center - half), min(1.0, center + half)


def rate(passed: int, total: int, of: str, hits: Iterable[str] = ()) -> Rate:
    """A share with its interval. ``of``: what the denominator counts; ``hits``: episodes of the numerator."""
    low, high = wilson(passed, total) or (None, None)
    return Rate(passed, total, low, high, of, tuple(sorted(set(hits))))


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Exact McNemar p-value of two models' passes on the same pairs, one seed each: a binomial test on the pairs that differ.

    Raises:
        OpsdError: the two have different lengths.
    """
    _same_length(a, b)
    from statsmodels.stats.contingency_tables import mcnemar as exact

    table = [[0, 0], [0, 0]]
    for x, y in zip(a, b, strict=True):
        table[bool(x)][bool(y)] += 1
    return float(exact(table, exact=True).pvalue)


def permutation(a: Sequence[float], b: Sequence[float], rng: np.random.Generator) -> float:
    """Paired permutation p-value of the mean difference: each pair's two values swap places or not.

    Args:
        a, b: one value a pair: the mean over its seeds.
        rng: for the flips; not used where all 2^pairs fit into :data:`RESAMPLES` and the p-value is exact.

    Raises:
        OpsdError: the two have different lengths, or hold no pair.
    """
    _same_length(a, b)
    from scipy.stats import permutation_test

    difference = np.asarray(b, float) - np.asarray(a, float)
    difference = difference[difference != 0]  # a pair without a difference has the same part in every permutation
    if difference.size < 2:  # its flip is as far out
        return 1.0
    found = permutation_test(
        (difference,),
        lambda x, axis: x.mean(axis=axis).round(12),  # sums that differ by rounding alone are as far out
        permutation_type="samples",
        n_resamples=RESAMPLES,
        rng=rng,
        vectorized=True,
    )
    return float(found.pvalue)


def bootstrap(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    cluster: Callable[[str], str],
    rng: np.random.Generator,
) -> tuple[float, float]:
    """95% interval of the mean difference b - a over pairs; whole clusters of pairs are drawn, with all of their seeds.

    The percentile cluster bootstrap (Davison and Hinkley 1997, 3.8): only the outermost level is drawn anew.

    Args:
        a, b: the same pairs' values, one a seed.
        cluster: of a pair: itself (``str``), or its repository.

    Raises:
        OpsdError: the two hold different pairs, none, or a pair without a value.
    """
    if set(a) != set(b) or not a or not all(len(v) for m in (a, b) for v in m.values()):
        raise OpsdError(
            f"{len(a)} and {len(b)} pairs", "a paired interval needs the same pairs, each with a value", "take the common pairs"
        )
    sums: dict[str, list[float]] = {}
    for pair in a:
        sums.setdefault(cluster(pair), []).append(float(np.mean(b[pair]) - np.mean(a[pair])))
    total = np.array([sum(v) for v in sums.values()])
    count = np.array([len(v) for v in sums.values()])
    drawn = rng.integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = total[drawn].sum(1) / count[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def fisher(passed_a: int, total_a: int, passed_b: int, total_b: int) -> float:
    """Fisher's exact p-value of two unpaired rates (12 of 20 against 18 of 18: 0.0035)."""
    from scipy.stats import fisher_exact

    wilson(passed_a, total_a), wilson(passed_b, total_b)  # refuse impossible counts
    return float(fisher_exact([[passed_a, total_a - passed_a], [passed_b, total_b - passed_b]]).pvalue)


def poisson(count_a: int, exposure_a: float, count_b: int, exposure_b: float) -> float:
    """Exact conditional p-value of two rates of independent events an exposure (agents, steps).

    Events that come in bursts are not independent: where counts a unit are at hand, use :func:`count_permutation`.
    """
    from statsmodels.stats.rates import test_poisson_2indep

    return float(test_poisson_2indep(count_a, exposure_a, count_b, exposure_b, method="exact-cond").pvalue)


def count_permutation(a: Sequence[float], b: Sequence[float], rng: np.random.Generator) -> float:
    """Permutation p-value of the difference of mean counts of two unpaired sets of units; assumes no distribution."""
    from scipy.stats import permutation_test

    if not len(a) or not len(b):
        raise OpsdError(f"{len(a)} and {len(b)} units", "both sides need one", "leave the comparison out")
    found = permutation_test(
        (np.asarray(a, float), np.asarray(b, float)),
        lambda x, y, axis: y.mean(axis=axis) - x.mean(axis=axis),
        n_resamples=RESAMPLES,
        rng=rng,
        vectorized=True,
    )
    return float(found.pvalue)


def adjust(p: Sequence[float], method: Literal["holm", "bh"] = "holm") -> list[float]:
    """p-values for several comparisons at once: Holm bounds the chance of any false one, Benjamini-Hochberg their share."""
    if len(p) < 2:
        return [float(x) for x in p]
    from statsmodels.stats.multitest import multipletests

    return [float(x) for x in multipletests(p, method={"holm": "holm", "bh": "fdr_bh"}[method])[1]]


def _same_length(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b) or not len(a):
        raise OpsdError(
            f"{len(a)} and {len(b)} pairs", "a paired test needs the same pairs on both sides", "take the common pairs"
        )
