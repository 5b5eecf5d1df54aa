"""What a design can show: against studies simulated here, and the announcements of a whole comparison."""

import math

import numpy as np
import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation import statistics
from verl_opsd.evaluation.compare import Outcomes, compare
from verl_opsd.evaluation.design import CANNOT, Design, Rerun, noise_floor
from verl_opsd.evaluation.statistics import mcnemar, permutation


def study(rng, design, moved):
    """Pass counts of both models on every pair, drawn from the design's model of a study."""
    low = (1 - math.sqrt(1 - 2 * design.discordance)) / 2
    movable = 1 - (design.base - low) / (1 - 2 * low)
    kind = rng.random(design.pairs)
    before = np.where(kind > movable, 1 - low, low)
    after = np.where((kind > movable) | (kind < moved), 1 - low, low)
    return rng.binomial(design.seeds, before), rng.binomial(design.seeds, after)


def announced(design, moved, studies, seed):
    rng, found = np.random.default_rng(seed), 0
    for _ in range(studies):
        a, b = study(rng, design, moved)
        p = mcnemar(list(a), list(b)) if design.seeds == 1 else permutation(a / design.seeds, b / design.seeds, rng)
        found += p <= design.alpha
    return found / studies


def test_the_smallest_effect_of_one_seed_meets_its_power():
    design = Design(pairs=40)
    moved = design.smallest() / math.sqrt(1 - 2 * design.discordance)  # 1 - 2 low
    assert announced(design, moved, 1500, 1) == pytest.approx(0.8, abs=0.035)
    assert announced(design, 0.8 * moved, 1500, 2) < 0.75  # and no smaller one does


def test_the_smallest_effect_of_several_seeds_meets_its_power(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    design = Design(pairs=20, seeds=3)
    moved = design.smallest() / math.sqrt(1 - 2 * design.discordance)
    assert announced(design, moved, 400, 3) == pytest.approx(0.8, abs=0.07)


def test_ten_pairs_with_one_seed_show_nothing():
    assert Design(10).smallest() is None and CANNOT in Design(10).text()
    # without any variance between runs six discordant pairs are needed: P(Binomial(10, w) >= 6) = 0.8
    w = Design(10, discordance=0.0).smallest()
    assert sum(math.comb(10, k) * w**k * (1 - w) ** (10 - k) for k in range(6, 11)) == pytest.approx(0.8, abs=1e-4)
    assert "6.7 pairs" in Design(10, discordance=0.0).text()


def test_more_seeds_and_more_pairs_show_smaller_effects():
    found = [Design(20).smallest(), Design(20, 3).smallest(), Design(60, 3).smallest()]
    assert found == sorted(found, reverse=True)


def test_a_baseline_that_always_passes_leaves_nothing_to_show():
    assert Design(100, base=1.0).smallest() is None


@pytest.mark.parametrize(
    "wrong", [{"pairs": 0}, {"pairs": 5, "discordance": 0.6}, {"pairs": 5, "alpha": 0.0}, {"pairs": 5, "seeds": 0}]
)
def test_designs_out_of_range_are_refused(wrong):
    with pytest.raises(OpsdError, match="correct it"):
        Design(**wrong)


def test_the_floor_of_two_reruns_by_hand():
    """The field experiments' re-run: one pair in ten passes, and it is another one."""
    pairs = [f"r/task{i}/f1_f2" for i in range(10)]
    runs = [Rerun({p: float(i == k) for i, p in enumerate(pairs)}, "node-a", k) for k in (0, 1)]
    floor = noise_floor(runs)
    assert (floor.runs, floor.pairs, floor.discordance, floor.largest) == (2, 10, 0.2, 0.0)
    assert floor.value == pytest.approx(1.96 * math.sqrt(0.02))
    assert "sampling and serving variance on one node (node-a)" in floor.of
    one_seed = [Rerun(r.values, n, 0) for r, n in zip(runs, "ab", strict=True)]
    assert "serving variance alone (one sampling seed) between 2 nodes" in noise_floor(one_seed).of


def test_the_floor_takes_common_pairs_and_at_least_what_was_seen():
    runs = [Rerun({"a": 1.0, "b": 1.0, "c": 0.0}, "n", 0), Rerun({"a": 0.0, "b": 0.0}, "n", 1)]
    floor = noise_floor(runs)
    assert (floor.pairs, floor.largest) == (2, 1.0) and floor.value == pytest.approx(1.96 * math.sqrt(0.5))
    for wrong in (runs[:1], [runs[0], Rerun({"z": 1.0}, "n", 1)], []):
        with pytest.raises(OpsdError, match="at least two runs"):
            noise_floor(wrong)


def outcomes(name, values):
    return Outcomes(name, "pairs", {f"r{i % 4}/task{i}/f1_f2": (float(v),) for i, v in enumerate(values)})


def test_without_an_effect_better_is_announced_in_at_most_one_of_twenty(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 50)
    rng = np.random.default_rng(5)
    design, verdicts = Design(20), []
    for _ in range(200):
        a, b = study(rng, design, 0.0)
        verdicts += [c.verdict for c in compare(outcomes("base", a), [outcomes("m", b)], rng)]
    assert verdicts.count("better") <= 10 and verdicts.count("worse") <= 10


def test_four_models_without_an_effect_are_corrected_together(monkeypatch):
    """Any 'better' among four: Holm keeps it at one study of twenty."""
    monkeypatch.setattr(statistics, "RESAMPLES", 50)
    monkeypatch.setattr("gc.collect", lambda: 0)  # statsmodels collects at every correction
    rng = np.random.default_rng(6)
    design, any_better = Design(20, discordance=0.4), 0
    for _ in range(80):
        base, _ = study(rng, design, 0.0)
        models = [outcomes(f"m{i}", study(rng, design, 0.0)[1]) for i in range(4)]
        any_better += any(c.verdict == "better" for c in compare(outcomes("base", base), models, rng))
    assert any_better <= 8


def test_verdicts_by_hand():
    rng = np.random.default_rng(0)
    base = outcomes("base", [0] * 20)
    (better,) = compare(base, [outcomes("m", [1] * 8 + [0] * 12)], rng)
    assert (better.verdict, better.p, better.test, better.common) == ("better", 2 / 2**8, "exact McNemar", 20)
    assert "m is better than base: pairs 40% against 0% on 20 common pairs" in better.sentence
    (worse,) = compare(outcomes("m", [1] * 8 + [0] * 12), [base], rng)
    assert worse.verdict == "worse"
    (none,) = compare(base, [outcomes("m", [1] * 4 + [0] * 16)], rng)
    assert none.verdict == "not shown"
    ten = outcomes("base", [1, 1] + [0] * 8)
    (cannot,) = compare(ten, [outcomes("m", [1, 1, 1, 1] + [0] * 6)], rng)
    assert cannot.verdict == CANNOT and cannot.smallest is None and CANNOT in cannot.sentence


def test_a_difference_inside_the_floor_is_called_so_whatever_its_p():
    pairs = [f"r{i % 4}/task{i}/f1_f2" for i in range(20)]
    reruns = [Rerun(dict.fromkeys(pairs, float(k)) | {p: 0.0 for p in pairs[8:]}, "n", k) for k in (0, 1)]
    floor = noise_floor(reruns)  # the same weights moved by 8 pairs
    (c,) = compare(outcomes("base", [0] * 20), [outcomes("m", [1] * 8 + [0] * 12)], np.random.default_rng(0), floor=floor)
    assert c.p <= 0.05 and c.verdict == "inside the floor" and c.floor == floor.value


def test_models_are_compared_on_common_pairs_only():
    base, model = outcomes("base", [0] * 10), outcomes("m", [1] * 6)
    (c,) = compare(base, [model], np.random.default_rng(0))
    assert (c.common, c.dropped, c.value_baseline, c.value_model) == (6, 4, 0.0, 1.0)
    elsewhere = Outcomes("m", "pairs", {"z/task1/f1_f2": (1.0,)})
    for wrong in (elsewhere, Outcomes("m", "features", base.values)):
        with pytest.raises(OpsdError, match="common pairs"):
            compare(base, [wrong], np.random.default_rng(0))


def test_several_seeds_take_the_permutation_test():
    base = Outcomes("base", "pairs", {f"r/task{i}/f1_f2": (0.0, 1.0) for i in range(6)})
    model = Outcomes("m", "pairs", {p: (1.0, 1.0, 1.0) for p in base.values})
    (c,) = compare(base, [model], np.random.default_rng(0))
    assert (c.test, c.seeds, c.p, c.difference) == ("paired permutation", 2, 2 / 2**6, 0.5)
