"""Static weights by hand, data-dependent weights by formula, and every contradiction of a LossSpec."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.distill import weights
from verl_opsd.distill.loss import ANALYTIC, LossSpec
from verl_opsd.errors import OpsdError

TURN = torch.tensor([0, 0, 0, 2, 2, 5])
POSITION = torch.tensor([9, 10, 11, 40, 41, 99])


def test_static_weights_by_hand() -> None:
    classes = torch.tensor([0, 1, 1, 2, 2, 0])
    assert weights.class_weight(classes, {0: 0.0, 1: 2.0, 2: 1.0}).tolist() == [0, 2, 2, 1, 1, 0]
    with pytest.raises(OpsdError, match=r"\[2\]"):
        weights.class_weight(classes, {0: 1.0, 1: 1.0})
    assert weights.turn_mask(TURN, [0, 5]).tolist() == [1, 1, 1, 0, 0, 1]
    # The scored token stands one after the position: token 10 is scored at position 9, token 42 at 41.
    assert weights.segment_mask(POSITION, [(10, 12), (42, 43)]).tolist() == [1, 1, 0, 0, 1, 0]
    assert weights.position_weight(TURN, 1.0).tolist() == [1, 0.5, 0.25, 1, 0.5, 1]
    # Prefixes are 10, 41 and 100 tokens; "shorter than" is strict.
    want = [0.5] * 3 + [0.5**4.1] * 2 + [0.5**10]
    assert weights.prefix_weight(POSITION, TURN, 10.0).tolist() == pytest.approx(want)
    assert weights.max_prefix(POSITION, TURN, 41).tolist() == [1, 1, 1, 0, 0, 0]
    assert weights.max_prefix(POSITION, TURN, 42).tolist() == [1, 1, 1, 1, 1, 0]
    assert weights.threshold_mask(torch.tensor([0.01, 0.05, 0.06])).tolist() == [0, 0, 1]
    assert weights.kept_share(torch.tensor([0.0, 0.5, 2.0, 0.0])) == 0.5


def values(div: float, logp: float = -1.0) -> weights.TokenValues:
    return weights.TokenValues(torch.tensor([div]), torch.tensor([logp]), torch.tensor([1.0]))


@given(div=st.floats(-1e3, 1e3).filter(lambda d: abs(d) > 1e-6), limit=st.floats(1e-3, 1e3))
def test_clip_keeps_the_sign_of_the_pull_and_bounds_it(div: float, limit: float) -> None:
    weight = weights.Clip(limit)(values(div)).item()
    assert 0 < weight <= 1
    assert abs(weight * div) <= limit * (1 + 1e-6)
    assert weight == 1 or abs(weight * div) == pytest.approx(limit, rel=1e-5)


def test_clip_leaves_a_zero_divergence_alone() -> None:
    assert weights.Clip(1.0)(values(0.0)).item() == 1.0
    with pytest.raises(OpsdError, match="above 0"):
        weights.Clip(0.0)


def test_gate_and_product_by_formula() -> None:
    gate = weights.SurprisalGate(kappa=2.0, gamma=-3.0)
    assert gate(values(1.0, -3.0)).item() == 0.5
    assert gate(values(1.0, -4.0)).item() == pytest.approx(1 / (1 + math.exp(2)))
    both = weights.product((gate, weights.Clip(0.25), weights.Threshold(0.05)), values(1.0, -3.0))
    assert both.item() == 0.125
    assert weights.product((gate, weights.Threshold(2.0)), values(1.0)).item() == 0.0
    assert weights.product((), values(1.0)).item() == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: weights.SurprisalGate(x, -3.0),
        lambda x: weights.SurprisalGate(1.0, math.inf if x == 0 else math.nan),
        lambda x: weights.Clip(x),
        lambda x: weights.Threshold(x or -0.1),
    ],
    ids=["kappa", "gamma", "clip", "threshold"],
)
@pytest.mark.parametrize("broken", [0.0, -1.0, math.nan])
def test_weights_out_of_range_are_refused(make, broken: float) -> None:
    with pytest.raises(OpsdError, match="way out"):
        make(broken)


@pytest.mark.parametrize(
    "fields",
    [
        {"divergence": "kl"},
        {"support": "top_k"},
        {"divergence": "jsd"},
        {"beta": 0.5},
        {"divergence": "jsd", "beta": 1.0},
        {"divergence": "skewed_forward_kl"},
        {"divergence": "skewed_forward_kl", "skew": 0.0},
        {"skew": 0.5},
        {"support": "student_topk"},
        {"top_k": 5},
        {"support": "signal", "top_k": 5},
        {"support": "union_topk", "top_k": 0},
        {"divergence": "policy_gradient"},
        {"divergence": "policy_gradient", "trust": (1.5, 2.0)},
        {"trust": (0.5, 2.0)},
        {"divergence": "policy_gradient", "trust": (0.5, 1e39)},
        {"divergence": "policy_gradient", "trust": (0.5, 2.0), "max_log_ratio": 5.0},
        {"max_log_ratio": 5.0},
        {"divergence": "k3", "max_log_ratio": 100.0},
        {"divergence": "k2", "support": "teacher_topk", "top_k": 5},
        *({"divergence": name, "weights": (weights.Threshold(),)} for name in ("k1", "k2", "k3", "nll")),
        {"divergence": "policy_gradient", "trust": (0.5, 2.0), "weights": (weights.Clip(1.0), weights.Threshold())},
    ],
    ids=str,
)
def test_unknown_missing_or_ignored_options_are_refused(fields: dict) -> None:
    with pytest.raises(OpsdError, match="way out"):
        LossSpec(**fields)


def test_an_own_divergence_is_one_registry_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANALYTIC, "half_reverse", lambda logp, logq, spec: (logp.exp() * (logp - logq)).sum(-1) / 2)
    assert LossSpec(divergence="half_reverse").divergence == "half_reverse"


@pytest.mark.parametrize("weight", [weights.Threshold(0.05), weights.Clip(1.0)])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_divergence_that_is_no_number_reaches_the_loss(weight: weights.Weight, broken: float) -> None:
    """A weight of 0 there would train on without it; the gradient's norm then stops the step."""
    divergence = torch.tensor([0.01, broken, 0.5])
    values = weights.TokenValues(divergence, torch.zeros(3), torch.zeros(3))
    loss = torch.where(weight(values) == 0, 0.0, weight(values) * divergence).sum()
    assert not torch.isfinite(loss)
    assert weights.threshold_mask(divergence).tolist() == [0, 1, 1]
