"""Statistics against numpy and by hand, exact merging, and a ledger that sums."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.distill.telemetry import ACCURACY, DEPTHS, MEANS, Distribution, ExactSum, Ledger, Telemetry, bucket, parts
from verl_opsd.errors import OpsdError

floats = st.floats(-1e3, 1e3, width=32)


def values(div: list[float], coef: list[float] | None = None, **more: list[float]) -> dict[str, np.ndarray]:
    n = len(div)
    known = {"divergence": div, "coef": [1.0] * n if coef is None else coef, **more}
    unknown = {k: [np.nan] * n for k in ("anchor", *MEANS) if k not in known}
    return {k: np.array(v, np.float32) for k, v in (known | unknown).items()}


def sketch(numbers) -> Distribution:
    d = Distribution()
    d.add_all(np.asarray(numbers, np.float32))
    return d


@given(st.lists(floats, max_size=60), st.lists(floats, max_size=60))
@settings(max_examples=60, deadline=None)
def test_sums_are_exact_however_they_are_cut(a: list[float], b: list[float]) -> None:
    one, two = ExactSum(), ExactSum()
    one.add(np.array(a, np.float32))
    two.add(np.array(b, np.float32))
    one.merge(two)
    assert one.count == len(a) + len(b)
    assert one.total == float(sum((Fraction(float(np.float32(x))) for x in a + b), Fraction(0)))


def test_infinite_values_have_no_mean() -> None:
    with pytest.raises(OpsdError, match="finite"):
        ExactSum().add(np.array([1.0, np.inf]))


@given(st.lists(floats, min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
@settings(max_examples=80, deadline=None)
def test_quantiles_are_those_of_numpy_within_the_accuracy(numbers: list[float], share: float) -> None:
    numbers32 = np.array(numbers, np.float32).astype(np.float64)
    want = np.quantile(numbers32, share, method="lower")
    assert sketch(numbers).quantile(share) == pytest.approx(want, rel=1.001 * ACCURACY, abs=1e-37)


def test_statistics_by_hand() -> None:
    stats = sketch(np.random.default_rng(0).permutation(np.arange(1.0, 201.0))).stats()
    assert (stats["mean"], stats["max"], stats["max_over_mean"]) == (100.5, 200.0, 200 / 100.5)
    for name, want in (("median", 100.0), ("p90", 180.0), ("p99", 198.0), ("top1pct_share", (199 + 200) / 20100)):
        assert stats[name] == pytest.approx(want, rel=1.001 * ACCURACY), name
    assert sketch([]).stats() == {} == sketch([np.nan]).stats()
    alone = sketch([3.0, np.nan]).stats()
    assert (alone["mean"], alone["median"], alone["top1pct_share"]) == (3.0, 3.0, pytest.approx(1.0, abs=ACCURACY))
    zero = sketch([0.0, 0.0]).stats()
    assert (zero["mean"], zero["p99"], zero["max_over_mean"], zero["top1pct_share"]) == (0, 0, None, None)


def test_values_of_both_signs_have_no_share_of_the_largest() -> None:
    """3 - 1 - 1 = 1: the largest would hold three times the sum."""
    stats = sketch([3.0, -1.0, -1.0]).stats()
    assert (stats["mean"], stats["max_over_mean"], stats["top1pct_share"]) == (pytest.approx(1 / 3), pytest.approx(9.0), None)


def test_inside_and_outside_of_the_mask_are_apart() -> None:
    t = Telemetry()
    t.add(values([1.0, 3.0, 100.0, 50.0], [0.5, 0.5, 0.0, 0.5], anchor=[0.1, 0.3, 0.8, 0.6], weight=[1, 2, 1, 0]), {})
    s = t.summary()["all"]
    assert (s["positions"], s["loss_positions"]) == (4, 2)
    assert (s["divergence"]["mean"], s["divergence"]["max"], s["weight"]) == (2.0, 3.0, 1.5)
    assert s["drift"]["mean"] == pytest.approx(0.45) and s["drift"]["max"] == pytest.approx(0.8)
    assert (s["drift"]["inside"], s["drift"]["outside"]) == (pytest.approx(0.2), pytest.approx(0.7))
    assert "entropy" not in s


def test_groups_by_label() -> None:
    t = Telemetry()
    t.add(values([1.0, 3.0, 5.0], agree=[1, 0, 1]), {"class": np.array([0, 0, 2]), "epoch": np.array([1, 1, 1])})
    s = t.summary()["by"]
    assert {k: (c["divergence"]["mean"], c["agree"], c["positions"]) for k, c in s["class"].items()} == {
        "0": (2.0, 0.5, 2),
        "2": (5.0, 1.0, 1),
    }
    assert s["epoch"]["1"]["loss_positions"] == 3


@given(st.lists(st.tuples(floats, st.integers(0, 2), st.booleans()), min_size=2, max_size=40), st.data())
@settings(max_examples=40, deadline=None)
def test_merging_is_bit_equal_however_positions_are_cut(rows, data) -> None:
    """Ranks and micro-batches: any order, any cut, any nesting of the merges."""

    def of(some) -> Telemetry:
        t = Telemetry()
        div, code, inside = (list(x) for x in zip(*some, strict=True)) if some else ([], [], [])
        t.add(values(div, [float(x) for x in inside], anchor=div, entropy=div), {"class": np.array(code, np.int64)})
        return t

    order = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=2, max_size=2)))
    a, b, c = of(order[: cuts[0]]), of(order[cuts[0] : cuts[1]]), of(order[cuts[1] :])
    b.merge(c)
    a.merge(b)
    assert json.dumps(a.summary(), sort_keys=True) == json.dumps(of(rows).summary(), sort_keys=True)


def test_every_cell_of_many_labels_is_a_plain_loop_over_its_positions() -> None:
    """Seven labels of 28,800 combinations, more than are kept apart at a time; ranks hold 0, 1, 150 and 249 positions."""
    g, n = np.random.default_rng(3), 400
    codes = {"class": 5, "turn": 10, "depth": 8, "quarter": 4, "third": 3, "epoch": 2, "round": 3}
    labels = {k: g.integers(0, size, n) * 7 - 3 for k, size in codes.items()}
    found = {k: np.exp(g.normal(-4, 3, n)).astype(np.float32) for k in ("divergence", "anchor", *MEANS)}
    found["coef"] = g.choice([0.0, 0.25], n, p=[0.3, 0.7]).astype(np.float32)
    found["weight"] = g.choice([0.0, 0.5, 1.0, np.nan], n).astype(np.float32)
    found["divergence"][::9], found["divergence"][::11], found["anchor"][::5] = 0.0, -1.5, np.nan
    merged = Telemetry()
    for rank in np.split(g.permutation(n), [0, 1, 151]):
        part = Telemetry()
        part.add({k: v[rank] for k, v in found.items()}, {k: v[rank] for k, v in labels.items()})
        merged.merge(part)
    summary = merged.summary()
    cells = [(summary["all"], range(n))]
    for label, code_N in labels.items():
        assert list(summary["by"][label]) == [str(c) for c in sorted(set(code_N.tolist()))]
        cells += [(summary["by"][label][str(c)], [i for i in range(n) if code_N[i] == c]) for c in set(code_N.tolist())]

    def known(name: str, at: list[int]) -> list[float]:
        return sorted(float(found[name][i]) for i in at if not np.isnan(found[name][i]))

    def mean(some: list[float]) -> float:
        return math.fsum(some) / len(some)

    for cell, at in cells:
        inside = [i for i in at if found["coef"][i] != 0 and found["weight"][i] != 0]
        assert (cell["positions"], cell["loss_positions"]) == (len(at), len(inside))
        for got, some in (
            (cell["divergence"], known("divergence", inside)),
            (cell["drift"], known("anchor", list(at))),
        ):
            assert (got["mean"], got["max"]) == (mean(some), some[-1])
            assert got["max_over_mean"] == (None if mean(some) <= 0 else some[-1] / mean(some))
            for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
                assert got[name] == pytest.approx(some[math.floor(share * (len(some) - 1))], rel=1.001 * ACCURACY)
            top = math.fsum(some[-max(1, len(some) // 100) :]) / math.fsum(some)
            want = None if some[0] < 0 else pytest.approx(top, rel=1.001 * ACCURACY)
            assert got["top1pct_share"] == want
        outside = [i for i in at if i not in set(inside)]
        assert cell["drift"]["inside"] == mean(known("anchor", inside))
        assert cell["drift"]["outside"] == mean(known("anchor", outside))
        assert all(cell[k] == mean(known(k, inside)) for k in MEANS)


def test_parts_of_a_run() -> None:
    assert parts(0, 10, 10, 4).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]  # as numpy.array_split
    assert parts(4, 3, 10, 4).tolist() == [1, 1, 2]
    assert parts(0, 2, 2, 3).tolist() == [0, 1]


def test_buckets_are_named_by_their_lower_bound() -> None:
    assert bucket(np.array([0, 1, 255, 256, 511, 512, 70000]), DEPTHS).tolist() == [0, 0, 0, 256, 256, 512, 65536]


@pytest.mark.parametrize(
    "counts",
    [
        {"states": 1, "usable": 2, "dropped": {"no brief": -1}},
        {"states": 1, "usable": -1, "dropped": {"no brief": 2}},
        {"reply_tokens": 1, "by_class": {"think": 2}, "left_out": {"weight 0": -1}},
        {"reply_tokens": 1, "by_class": {"think": -1}, "left_out": {"weight 0": 2}},
    ],
)
def test_ledger_that_sums_by_a_negative_count_is_refused(counts: dict) -> None:
    with pytest.raises(OpsdError, match="ledger"):
        Ledger(**counts)


def test_ledger_sums_or_is_refused() -> None:
    a = Ledger(5, 4, {"malformed": 1}, 100, {"think": 60, "code": 30}, {"max_prefix": 10})
    b = Ledger(2, 1, {"infra": 1}, 10, {"think": 10})
    total = a + b
    assert total == Ledger(7, 5, {"infra": 1, "malformed": 1}, 110, {"code": 30, "think": 70}, {"max_prefix": 10})
    assert total.loss_positions == 100
    for broken in ({"states": 2, "usable": 1}, {"reply_tokens": 3, "by_class": {"think": 2}}):
        with pytest.raises(OpsdError, match="ledger"):
            Ledger(**broken)
