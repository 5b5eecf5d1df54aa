"""From static weights to the final coefficient of each loss position: ``loss of the step = sum of coef * divergence``.

The denominators are those of the whole global batch and stand inside the coefficients. So the loss and its gradient do
not depend on how the rows are split over micro-batches, accumulation steps or ranks: any split of one sum is that
sum.

    token     every position counts by its weight           sum w d / sum w
    turn      mean over turns of the mean within a turn     a turn without weight does not count
    branch    the same over branches
    episode   the same over episodes

Shape suffix: N loss positions of one row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError

Reduction = Literal["token", "turn", "branch", "episode"]


def coefficients(
    reduction: Reduction,
    turns: Sequence[Tensor],
    branches: Sequence[Hashable],
    episodes: Sequence[Hashable],
    weights: Sequence[Tensor],
    numerator_weights: Sequence[Tensor] | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """Final coefficients, float32[N] a row, over all rows of one optimizer step on all ranks.

    Args:
        turns: int64[N] a row, the turn of each loss position.
        branches, episodes: one id a row. Turns are told apart by (branch, turn), so a branch may be cut into several
            rows.
        weights: float[N] a row, >= 0; they count in the denominators, and 0 takes a position out of the loss.
        numerator_weights: float[N] a row, >= 0; they multiply the coefficient and are not in any denominator.
        scale: factor of all coefficients, e.g. the anchor's lambda.

    Raises:
        OpsdError: lengths differ, a weight is negative or not finite, or no position of the batch carries weight.
    """
    if reduction not in ("token", "turn", "branch", "episode"):
        raise OpsdError(f"reduction={reduction!r}", "token, turn, branch or episode", "name one of these")
    rows = len(weights)
    numerators = [torch.ones_like(w) for w in weights] if numerator_weights is None else list(numerator_weights)
    if not rows == len(turns) == len(branches) == len(episodes) == len(numerators):
        raise OpsdError(f"{rows} rows of weights", "all lists have one entry a row", "give the rows of one step in order")
    for i, (w, turn, numerator) in enumerate(zip(weights, turns, numerators, strict=True)):
        if not w.shape == turn.shape == numerator.shape:
            raise OpsdError(
                f"row {i}: {len(w)} weights, {len(turn)} turns, {len(numerator)} numerator weights",
                "each has one entry a loss position",
                "take them from the same row",
            )
        for values in (w, numerator):
            if bool((values < 0).any()) or not bool(torch.isfinite(values).all()):
                raise OpsdError(f"row {i} has a negative or non-finite weight", "weights are finite and >= 0", "correct it")
    keys = [_groups(reduction, turn, branches[i], episodes[i]) for i, turn in enumerate(turns)]
    totals: dict[Hashable, float] = {}
    for row_keys, w in zip(keys, weights, strict=True):
        for key, weight in zip(row_keys, w.to(torch.float64).tolist(), strict=True):
            totals[key] = totals.get(key, 0.0) + weight
    groups = sum(total > 0 for total in totals.values())
    if groups == 0:
        raise OpsdError(
            f"no weight on any of the {sum(map(len, keys))} loss positions of the step",
            "a step without a loss position teaches nothing and divides by zero",
            "leave the step out, or loosen the masks",
        )
    result = []
    for row_keys, w, numerator in zip(keys, weights, numerators, strict=True):
        total_N = torch.tensor([totals[key] or 1.0 for key in row_keys], dtype=torch.float64)
        coef_N = scale * w.to(torch.float64) * numerator.to(torch.float64) / (total_N * groups)
        result.append(coef_N.to(torch.float32))
    return result


def _groups(reduction: Reduction, turn_N: Tensor, branch: Hashable, episode: Hashable) -> list[Hashable]:
    """The group of each position; within one, positions share a denominator."""
    if reduction == "turn":
        return [(branch, turn) for turn in turn_N.tolist()]
    key: Hashable = {"token": None, "branch": branch, "episode": episode}[reduction]
    return [key] * turn_N.numel()
