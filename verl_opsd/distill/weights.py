"""Weights of loss positions. All of them compose by product.

Static weights are known before the update (masks by turn, segment and token class, position weights, ``max_prefix``, a
threshold taken at collection): plain functions over the positions of one row, which ``reduction`` turns into
coefficients and counts in the denominator. Data-dependent weights (threshold, surprisal gate, clip) need the current
student: they are part of :class:`~verl_opsd.distill.loss.LossSpec`, act inside the head on detached values, and never
enter a denominator, since a micro-batch does not know the global one.

The one choice between both is the threshold mask, named by where it is taken and what it is divided by:

    taken at collection, denominator kept   ``threshold_mask`` among the static weights of ``reduction.coefficients``
    taken at collection, denominator all    ``threshold_mask`` among its numerator weights
    taken at current weights, all           ``Threshold`` in ``LossSpec.weights``
    taken at current weights, kept          the same, and the trainer divides the step's gradient once, after its last
                                            micro-batch, by the sum of the kept coefficients: a token mean only

Shape suffixes: N loss positions of one row, C loss positions of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class TokenValues:
    """Detached values at the positions of a chunk, at the current weights; nats, [C] each."""

    divergence_C: Tensor
    student_logprob_C: Tensor
    entropy_C: Tensor


class Weight(Protocol):
    """A data-dependent weight: values of a chunk -> weights >= 0, [C]."""

    def __call__(self, values: TokenValues) -> Tensor: ...


@dataclass(frozen=True)
class Threshold:
    """1 where the divergence is above ``above`` nats, else 0; the denominator stays that of all positions."""

    above: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.above < math.inf:
            raise OpsdError(f"threshold above={self.above} nats", "a divergence is at least 0", "set it to 0 or more")

    def __call__(self, values: TokenValues) -> Tensor:
        return threshold_mask(values.divergence_C, self.above)


@dataclass(frozen=True)
class SurprisalGate:
    """sigmoid(kappa * (log p - gamma)) of the sampled token under the student: small where the token surprises it."""

    kappa: float
    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.kappa < math.inf or not math.isfinite(self.gamma):
            raise OpsdError(
                f"gate kappa={self.kappa} gamma={self.gamma}",
                "kappa is above 0, or the gate is open to what surprises the student; gamma is a log-probability",
                "raise kappa, or leave the gate out",
            )

    def __call__(self, values: TokenValues) -> Tensor:
        return self.of(values.student_logprob_C)

    def of(self, logprob_C: Tensor) -> Tensor:
        """The weight at log-probabilities of sampled tokens."""
        return torch.sigmoid(self.kappa * (logprob_C - self.gamma))


@dataclass(frozen=True)
class Clip:
    """min(1, limit / divergence): a position pulls with at most ``limit`` nats, in the direction in which it pulled.

    Clamping the divergence itself would set the gradient of exactly the largest positions to 0. An infinite one is not clipped
    to 0: it stops the step.
    """

    limit: float

    def __post_init__(self) -> None:
        if not 0 < self.limit < math.inf:
            raise OpsdError(
                f"clip at {self.limit} nats", "a clip is above 0 and finite", "correct the limit, or leave the clip out"
            )

    def __call__(self, values: TokenValues) -> Tensor:
        size_C = values.divergence_C.abs()
        return torch.where(size_C.isinf(), 1.0, torch.clamp(self.limit / size_C, max=1.0))


def product(weights: Iterable[Weight], values: TokenValues) -> Tensor:
    """Product of data-dependent weights, [C]; 1 when there are none."""
    result_C = torch.ones_like(values.divergence_C)
    for weight in weights:
        result_C = result_C * weight(values)
    return result_C


def threshold_mask(divergence_N: Tensor, above: float = 0.05) -> Tensor:
    """0.0 where the divergence is at most ``above`` nats, else 1.0: one that is no number is kept, so that it stops the step."""
    return (~(divergence_N <= above)).to(divergence_N.dtype)


def class_weight(token_class_N: Tensor, weight_of: Mapping[int, float]) -> Tensor:
    """Weight of each position by its token class; a class that is not named is refused, so nothing is dropped unseen.

    Raises:
        OpsdError: a class has no weight.
    """
    unnamed = sorted(set(token_class_N.unique().tolist()) - set(weight_of))
    if unnamed:
        raise OpsdError(f"token classes {unnamed}", "each class that occurs has a weight", "name them; 0 masks a class")
    weight_N = torch.zeros(token_class_N.shape, dtype=torch.float32)
    for code, weight in weight_of.items():
        weight_N[token_class_N == code] = weight
    return weight_N


def turn_mask(turn_N: Tensor, keep: Iterable[int]) -> Tensor:
    """1.0 at positions of the turns to keep."""
    return torch.isin(turn_N, torch.tensor(sorted(keep), dtype=turn_N.dtype)).to(torch.float32)


def segment_mask(position_N: Tensor, segments: Iterable[Sequence[int]]) -> Tensor:
    """1.0 where the *scored* token (position + 1) lies in one of the half-open spans of the row's tokens."""
    mask_N = torch.zeros(position_N.shape, dtype=torch.bool)
    for start, end in segments:
        mask_N |= (position_N + 1 >= start) & (position_N + 1 < end)
    return mask_N.to(torch.float32)


def position_weight(turn_N: Tensor, half_life: float) -> Tensor:
    """0.5 ** (rank / half_life), rank = loss positions since the first of the same turn (tokens)."""
    rank_N = torch.zeros(turn_N.shape, dtype=torch.float32)
    for turn in turn_N.unique().tolist():
        at_N = turn_N == turn
        rank_N[at_N] = torch.arange(int(at_N.sum()), dtype=torch.float32)
    return torch.pow(0.5, rank_N / half_life)


def prefix_weight(position_N: Tensor, turn_N: Tensor, half_life: float) -> Tensor:
    """0.5 ** (prefix / half_life), prefix = tokens before the first scored token of the position's turn."""
    return torch.pow(0.5, _prefix(position_N, turn_N) / half_life)


def max_prefix(position_N: Tensor, turn_N: Tensor, limit: int) -> Tensor:
    """1.0 at positions of turns whose prefix is shorter than ``limit`` tokens.

    The prefix of a turn is what stands before its first scored token: position + 1 tokens.
    """
    return (_prefix(position_N, turn_N) < limit).to(torch.float32)


def _prefix(position_N: Tensor, turn_N: Tensor) -> Tensor:
    prefix_N = torch.zeros(position_N.shape, dtype=torch.float32)
    for turn in turn_N.unique().tolist():
        at_N = turn_N == turn
        prefix_N[at_N] = float(position_N[at_N].min()) + 1
    return prefix_N


def kept_share(weight_N: Tensor) -> float:
    """Share of positions whose weight is not 0; to be printed beside any mask."""
    return float((weight_N != 0).to(torch.float64).mean()) if weight_N.numel() else 0.0
