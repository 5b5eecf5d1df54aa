"""Coefficients of a round: each optimizer step for itself, and the threshold at collection by hand."""

from __future__ import annotations

import pytest
import torch

from verl_opsd.config import LossConfig, ThresholdConfig
from verl_opsd.distill.reduction import coefficients
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.reduce import with_coefficients, with_rewards, with_threshold

# Step 0: episode a with branches a_0_0 (turns 0, 0, 1) and a_0_1 (turn 2). Step 1: episode b (turn 0, 0), and a padding row.
KEYS, GROUPS = ["a_0_0", "a_0_1", "b_0_0", "p_0_0"], [0, 0, 1, 1]
TURNS = [torch.tensor(t, dtype=torch.int64) for t in ([0, 0, 1], [2], [0, 0], [])]
STATIC = [torch.tensor(w) for w in ([1.0, 2.0, 1.0], [0.0], [1.0, 1.0], [])]
KL = [torch.tensor(d) for d in ([0.01, 0.06, 0.05], [9.0], [0.2, 0.0], [])]


def static_rows() -> list[dict[str, torch.Tensor]]:
    return [
        {"opsd_turn": t, "opsd_coef": w.clone(), "opsd_anchor": torch.ones_like(w)} for t, w in zip(TURNS, STATIC, strict=True)
    ]


def thresholded(reduction: str, denominator: str) -> tuple[list[list[float]], float]:
    loss = LossConfig(reduction=reduction, threshold=ThresholdConfig(0.05, "collection", denominator))
    rows = with_coefficients(static_rows(), KEYS, GROUPS, loss)
    coefs, share = with_threshold(rows, KL, KEYS, GROUPS, loss)
    return [c.tolist() for c in coefs], share


def test_every_step_has_its_own_denominator_and_the_anchor_its_own_positions() -> None:
    rows = with_coefficients(static_rows(), KEYS, GROUPS, LossConfig(anchor=0.5))
    assert [r["opsd_coef"].tolist() for r in rows] == [[0.25, 0.5, 0.25], [0], [0.5, 0.5], []]
    assert [r["opsd_anchor"].tolist() for r in rows] == [[0.125] * 3, [0.125], [0.25] * 2, []]


def test_threshold_at_collection_by_hand() -> None:
    # Above 0.05 nats: the second position of a_0_0, and the first of b; the position of a_0_1 has no weight to lose.
    coefs, share = thresholded("token", "all")
    assert coefs == [[0, 0.5, 0], [0], [0.5, 0], []] and share == 2 / 5
    coefs, share = thresholded("token", "kept")
    assert coefs == [[0, 1, 0], [0], [1, 0], []] and share == 2 / 5
    assert thresholded("turn", "all")[0] == [[0, pytest.approx(1 / 3), 0], [0], [0.5, 0], []]
    assert thresholded("turn", "kept")[0] == [[0, 1, 0], [0], [1, 0], []]


@pytest.mark.parametrize("reduction", ["token", "turn", "branch", "episode"])
def test_kept_denominators_are_those_of_the_mask_among_the_static_weights(reduction: str) -> None:
    g = torch.Generator().manual_seed(0)
    sizes, keys = [5, 3, 8, 4], ["a_0_0", "a_0_1", "b_0_0", "b_1_0"]
    rows = [
        {
            "opsd_turn": torch.randint(3, (n,), generator=g),
            "opsd_coef": torch.rand(n, generator=g),
            "opsd_anchor": torch.ones(n),
        }
        for n in sizes
    ]
    kl = [torch.rand(n, generator=g) for n in sizes]
    loss = LossConfig(reduction=reduction, threshold=ThresholdConfig(0.4, "collection", "kept"))
    got, share = with_threshold(with_coefficients(rows, keys, [0] * 4, loss), kl, keys, [0] * 4, loss)
    masked = [r["opsd_coef"] * (d > 0.4) for r, d in zip(rows, kl, strict=True)]
    want = coefficients(reduction, [r["opsd_turn"] for r in rows], keys, ["a_0", "a_0", "b_0", "b_1"], masked)
    torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=1e-6, atol=0)
    assert share == pytest.approx(float((torch.cat(kl) > 0.4).float().mean()))


def test_a_step_that_keeps_nothing_has_no_mean() -> None:
    loss = LossConfig(threshold=ThresholdConfig(0.1, "collection", "kept"))
    rows = with_coefficients(static_rows(), KEYS, GROUPS, loss)  # step 0 has no weight above 0.1 nats
    with pytest.raises(OpsdError, match="no weight"):
        with_threshold(rows, KL, KEYS, GROUPS, loss)


def test_rewards_by_hand() -> None:
    """Rewards 1 and 0: advantages 1 and -1. Step 0 has the 4 positions of a, step 1 the 2 of b."""
    rows = [{"opsd_position": t} for t in TURNS]
    got = with_rewards(rows, KEYS, GROUPS, {"a_0": 1.0, "b_0": 0.0}, coef=0.1)
    want = [[0.025] * 3, [0.025], [-0.05] * 2, []]
    assert [r["opsd_reward"].tolist() for r in got] == [pytest.approx(w) for w in want]
    with pytest.raises(OpsdError, match="two or more"):
        with_rewards(rows[:2], KEYS[:2], [0, 0], {"a_0": 1.0}, coef=0.1)
