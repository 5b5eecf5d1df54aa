"""Intervals and tests against closed forms, enumerations and published counts."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation import statistics
from verl_opsd.evaluation.statistics import (
    adjust,
    bootstrap,
    count_permutation,
    fisher,
    mcnemar,
    permutation,
    poisson,
    rate,
    wilson,
)


def rng():
    return np.random.default_rng(0)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_its_formula(counts):
    k, n = counts
    z, p = 1.959963984540054, k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = wilson(k, n)
    assert (low, high) == pytest.approx(((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)), abs=1e-12)


def test_published_counts():
    """The rates and p-values that the field experiments' log prints."""
    assert tuple(round(x, 2) for x in wilson(5, 10)) == (0.24, 0.76)
    assert round(fisher(12, 20, 18, 18), 4) == 0.0035
    assert round(fisher(9, 20, 16, 18), 4) == 0.0064


@pytest.mark.parametrize("passed,total", [(3, 2), (-1, 4)])
def test_impossible_counts_are_refused(passed, total):
    with pytest.raises(OpsdError, match="numerator"):
        rate(passed, total, "pairs")
    with pytest.raises(OpsdError, match="numerator"):
        fisher(passed, total, 1, 2)


def test_a_rate_names_its_denominator_and_hits():
    r = rate(2, 4, "features of scored pairs", ["b", "a", "b"])
    assert (r.value, r.of, r.hits) == (0.5, "features of scored pairs", ("a", "b"))
    empty = rate(0, 0, "pairs")
    assert (empty.value, empty.low, empty.high) == (None, None, None)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 5))
def test_mcnemar_is_a_binomial_test_on_the_pairs_that_differ(only_a, only_b, both):
    a = [True] * only_a + [False] * only_b + [True] * both
    b = [False] * only_a + [True] * only_b + [True] * both
    if not a:
        return
    n, k = only_a + only_b, min(only_a, only_b)
    want = min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)
    assert mcnemar(a, b) == pytest.approx(want, abs=1e-12)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=8))
def test_permutation_is_the_share_of_sign_flips_as_far_out(difference):
    flips = [
        sum(s * d for s, d in zip(signs, difference, strict=True))
        for signs in itertools.product((1, -1), repeat=len(difference))
    ]
    want = np.mean([abs(f) >= abs(sum(difference)) - 1e-9 for f in flips])
    assert permutation([0.0] * len(difference), difference, rng()) == pytest.approx(want)


def test_permutation_of_means_of_three_seeds_that_sum_to_nothing_is_1():
    """Thirds don't sum to 0 in floats: the sums of all flips are then as far out as none, or half of them farther."""
    a, b = [2 / 3, 1 / 3, 1, 0], [1 / 3, 2 / 3, 2 / 3, 1 / 3]
    for order in itertools.permutations(range(4)):
        assert permutation([a[i] for i in order], [b[i] for i in order], rng()) == 1.0
    assert permutation([1, 1 / 3, 2 / 3, 1], [2 / 3, 2 / 3, 1, 2 / 3], rng()) == 1.0


def test_mcnemar_and_permutation_agree_on_passes():
    a, b = [0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 0]
    assert mcnemar(a, b) == pytest.approx(permutation(a, b, rng())) == pytest.approx(2 * 8 / 128)


def test_poisson_is_a_binomial_test_of_the_split():
    n, k = 36, 9
    want = 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert poisson(9, 7, 27, 7) == pytest.approx(want, rel=1e-6)


def test_count_permutation_enumerates_small_samples():
    # of the 20 ways to choose three of six, only the observed and its mirror are as far out
    assert count_permutation([0, 1, 2], [7, 8, 9], rng()) == pytest.approx(2 / 20)


def test_corrections_by_hand():
    assert adjust([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust([0.01, 0.04, 0.03], "bh") == pytest.approx([0.03, 0.04, 0.04])
    assert adjust([]) == []


def test_bootstrap_draws_whole_clusters():
    """Two repositories with opposite differences: drawn whole, the mean is 0, 1/2 or 1; drawn by pair, anything between."""
    a = {f"{r}/task{i}/f1_f2": (0.0,) for r in "xy" for i in range(8)}
    b = {p: (1.0,) if p[0] == "x" else (0.0,) for p in a}
    assert bootstrap(a, b, lambda p: p[0], rng()) == (0.0, 1.0)
    low, high = bootstrap(a, b, str, rng())
    sd = math.sqrt(0.25 / 16)
    assert (low, high) == pytest.approx((0.5 - 1.96 * sd, 0.5 + 1.96 * sd), abs=0.04)


def test_bootstrap_keeps_the_seeds_of_a_pair_together():
    """The same pairs with each seed written twice are no more data."""
    a = {f"r/task{i}/f1_f2": (0.0,) for i in range(10)}
    b = {p: (float(i % 2),) for i, p in enumerate(a)}
    twice = {p: v * 2 for p, v in b.items()}
    assert bootstrap(a, b, str, rng()) == bootstrap(a, twice, str, rng())


def test_bootstrap_covers_the_truth(monkeypatch):
    """95% intervals of 40 clusters hold the true difference about 95 times in 100."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    draw, held = rng(), 0
    for _ in range(400):
        b = {f"r/task{i}/f1_f2": tuple(x) for i, x in enumerate(draw.normal(draw.normal(0, 1, (40, 1)), 0.5, (40, 3)) + 0.3)}
        low, high = bootstrap(dict.fromkeys(b, (0.0,)), b, str, draw)
        held += low <= 0.3 <= high
    assert 360 <= held <= 394


@pytest.mark.parametrize("test", [mcnemar, lambda a, b: permutation(a, b, rng())])
def test_unequal_pairs_are_refused(test):
    for a, b in (([1], [1, 0]), ([], [])):
        with pytest.raises(OpsdError, match="same pairs"):
            test(a, b)
