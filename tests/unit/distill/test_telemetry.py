"""Statistics by hand, exact merging, and a ledger that sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.distill.head import HeadResult
from verl_opsd.distill.telemetry import Ledger, Telemetry, distribution, part_of_run
from verl_opsd.errors import OpsdError


def result(div: list[float], drift: list[float] | None = None) -> HeadResult:
    n = len(div)
    unknown = torch.full((n,), torch.nan)
    drift_N = unknown if drift is None else torch.tensor(drift)
    half = torch.full((n,), 0.5)
    return HeadResult(torch.tensor(div), drift_N, unknown, unknown, half, half, unknown, half, half)


def test_distribution_by_hand() -> None:
    stats = distribution(torch.arange(1.0, 201.0)[torch.randperm(200)])
    assert stats == {
        "mean": 100.5,
        "median": 100.0,
        "p90": 180.0,
        "p99": 198.0,
        "max": 200.0,
        "max_over_mean": 200 / 100.5,
        "top1pct_share": (199 + 200) / 20100,
    }
    assert distribution(torch.tensor([torch.nan])) == {} and distribution(torch.zeros(0)) == {}
    assert distribution(torch.tensor([3.0, torch.nan]))["median"] == 3.0


def test_summary_keeps_inside_and_outside_of_the_mask_apart() -> None:
    part = Telemetry.of(result([1.0, 3.0, 100.0], [0.1, 0.3, 0.8]), torch.tensor([0.5, 0.5, 0.0]), {})
    summary = part.summary()
    assert summary["positions"] == 3 and summary["loss_positions"] == 2
    assert summary["divergence/mean"] == 2.0 and summary["divergence/max"] == 3.0
    assert summary["drift/mean"] == pytest.approx(0.4) and summary["drift/inside"] == pytest.approx(0.2)
    assert summary["drift/outside"] == pytest.approx(0.8) and summary["agree"] == 0.5
    assert "student_logprob" not in summary


def test_groups_by_label() -> None:
    labels = {"token_class": torch.tensor([0, 0, 2]), "quarter": torch.tensor([1, 1, 1])}
    part = Telemetry.of(result([1.0, 3.0, 5.0]), torch.ones(3), labels)
    means = {k: v.summary()["divergence/mean"] for k, v in part.by("token_class").items()}
    assert means == {0: 2.0, 2: 5.0}
    assert part.where(token_class=2, quarter=1).summary()["divergence/max"] == 5.0


@given(st.lists(st.floats(0, 1e3, width=32), min_size=2, max_size=40), st.data())
@settings(max_examples=40, deadline=None)
def test_merging_is_bit_equal_however_positions_are_cut(div, data) -> None:
    whole = Telemetry.of(result(div), torch.ones(len(div)), {})
    order = data.draw(st.permutations(range(len(div))))
    cut = data.draw(st.integers(0, len(div)))
    parts = [Telemetry.of(result([div[i] for i in ids]), torch.ones(len(ids)), {}) for ids in (order[:cut], order[cut:])]
    assert str(Telemetry.merge(parts).summary()) == str(whole.summary())


def test_merge_refuses_different_labels_and_nothing() -> None:
    one = Telemetry.of(result([1.0]), torch.ones(1), {})
    other = Telemetry.of(result([1.0]), torch.ones(1), {"epoch": torch.zeros(1, dtype=torch.int64)})
    for parts in ([one, other], []):
        with pytest.raises(OpsdError, match="same labels"):
            Telemetry.merge(parts)


def test_parts_of_a_run() -> None:
    assert [part_of_run(s, 8, 4) for s in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [part_of_run(s, 3, 3) for s in range(3)] == [0, 1, 2]
    with pytest.raises(OpsdError, match="length of the whole run"):
        part_of_run(8, 8, 4)


def test_ledger_sums_or_is_refused() -> None:
    a = Ledger(5, 4, {"malformed": 1}, 100, {"think": 60, "code": 30}, {"max_prefix": 10})
    b = Ledger(2, 1, {"infra": 1}, 10, {"think": 10})
    total = a + b
    assert total == Ledger(7, 5, {"infra": 1, "malformed": 1}, 110, {"code": 30, "think": 70}, {"max_prefix": 10})
    assert total.loss_positions == 100
    for broken in ({"states": 2, "usable": 1}, {"reply_tokens": 3, "by_class": {"think": 2}}):
        with pytest.raises(OpsdError, match="ledger"):
            Ledger(**broken)
