"""Divergences per position, in nats, from log-probabilities. The direction is in the name.

    reverse KL   KL(student || teacher)   mode-seeking: the student is punished for what the teacher would not say
    forward KL   KL(teacher || student)   mass-covering: it is punished for missing what the teacher would say

>>> import math, torch
>>> student = torch.log(torch.tensor([0.9, 0.1], dtype=torch.float64))
>>> teacher = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
>>> round(reverse_kl(student, teacher).item(), 6), round(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), 6)
(0.368064, 0.368064)
>>> round(forward_kl(student, teacher).item(), 6), round(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 6)
(0.510826, 0.510826)

Every function takes ``logp`` (student) and ``logq`` (teacher) of one shape [..., V], each summing to one over the last
dimension (a full vocabulary, or a support with its tail bucket), and returns [...]. An outcome of probability 0 is
-inf. Gradients flow into both arguments. Sampled-token estimators take the sampled token's log-probabilities, [...],
instead.

Sources: generalised JSD: Agarwal et al. 2024 (GKD); skewed KL: Ko et al. 2024 (DistiLLM); k1, k2, k3: Schulman,
"Approximating KL divergence", 2020.

Shape suffix: V vocabulary or support.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_opsd.distill.dense import NEAR, excess_near_zero, kl_terms
from verl_opsd.errors import OpsdError

#: Log-ratios above this overflow exp in float32 (ln of the largest float32 is 88.72).
MAX_LOG_RATIO = 88.0


def _kl(loga: Tensor, logb: Tensor) -> Tensor:
    """KL(a || b) as ``sum_v b - a + a * d``, d = log a - log b: every term >= 0. +inf where b lacks what a has."""
    a, b = loga.exp(), logb.exp()
    absent = loga == -torch.inf  # the term is b alone; the stand-ins keep NaN out of the unused branches' gradients
    d = torch.where(absent, 0.0, loga) - torch.where(absent, 0.0, logb)
    lacking = ~absent & (logb == -torch.inf)
    term = torch.where(absent, b, kl_terms(a, b, torch.where(lacking, 0.0, d)))
    return torch.where(lacking, torch.inf, term).sum(-1)


def reverse_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(student || teacher) = sum_v p_v (log p_v - log q_v)."""
    return _kl(logp, logq)


def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(teacher || student) = sum_v q_v (log q_v - log p_v)."""
    return _kl(logq, logp)


def _log_mixture(loga: Tensor, logb: Tensor, weight_a: float) -> Tensor:
    """log(weight_a * a + (1 - weight_a) * b) for 0 < weight_a < 1; -inf where both are absent."""
    loga = loga + math.log(weight_a)
    logb = logb + math.log1p(-weight_a)
    absent = (loga == -torch.inf) & (logb == -torch.inf)
    mixed = torch.logaddexp(torch.where(absent, 0.0, loga), torch.where(absent, 0.0, logb))
    return torch.where(absent, -torch.inf, mixed)


def jsd(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Generalised JSD: beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.

    ``jsd / beta`` tends to forward KL as beta goes to 0, ``jsd / (1 - beta)`` to reverse KL as beta goes to 1; at 0
    and 1 itself the definition is 0, so those values are refused instead of being given another meaning.

    >>> import torch
    >>> p, q = torch.log(torch.tensor([0.9, 0.1])), torch.log(torch.tensor([0.2, 0.8]))
    >>> bool(torch.isclose(jsd(p, q, 0.5), jsd(q, p, 0.5)))
    True

    Raises:
        OpsdError: beta outside (0, 1).
    """
    if not 0 < beta < 1:
        raise OpsdError(f"beta={beta}", "generalised JSD needs 0 < beta < 1", "name the limit: forward_kl or reverse_kl")
    logm = _log_mixture(logq, logp, beta)
    return beta * _kl(logq, logm) + (1 - beta) * _kl(logp, logm)


def skewed_reverse_kl(logp: Tensor, logq: Tensor, skew: float) -> Tensor:
    """KL(student || skew * student + (1 - skew) * teacher); bounded by -log(skew).

    Raises:
        OpsdError: skew outside (0, 1).
    """
    _check_skew(skew)
    return _kl(logp, _log_mixture(logp, logq, skew))


def skewed_forward_kl(logp: Tensor, logq: Tensor, skew: float) -> Tensor:
    """KL(teacher || skew * teacher + (1 - skew) * student); bounded by -log(skew).

    Raises:
        OpsdError: skew outside (0, 1).
    """
    _check_skew(skew)
    return _kl(logq, _log_mixture(logq, logp, skew))


def _check_skew(skew: float) -> None:
    if not 0 < skew < 1:
        raise OpsdError(f"skew={skew}", "skewed KL needs 0 < skew < 1", "for skew 0 name reverse_kl or forward_kl")


def k1(logp: Tensor, logq: Tensor) -> Tensor:
    """log p - log q of a token sampled from the student: unbiased for reverse KL in value, of either sign.

    Its own gradient, E[grad log p], is zero in expectation: as a loss it teaches nothing. Use ``policy_gradient``.
    """
    return logp - logq


def k2(logp: Tensor, logq: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 of a sampled token: biased in value; its gradient in expectation is that of reverse KL."""
    return 0.5 * (logp - logq).square()


def k3(logp: Tensor, logq: Tensor, max_log_ratio: float | None = None) -> Tensor:
    """q/p - 1 - log(q/p) of a sampled token: unbiased for reverse KL in value, >= 0; its gradient in expectation is
    that of forward KL.

    Args:
        max_log_ratio: log q - log p (nats) above which the value goes on as a straight line, so that the pull stays the one at
            the limit, in its own direction; None: refuse instead where exp would leave float32.

    Raises:
        OpsdError: no limit is set and a log-ratio leaves the range of float32.
    """
    r = logq - logp
    if max_log_ratio is None:
        if bool(leaves_float32(r).any()):
            raise OpsdError(
                f"k3: a log-ratio of {r.detach().max().item():.1f} nats",
                f"exp of more than {MAX_LOG_RATIO} nats leaves float32",
                "set max_log_ratio to state a clip, or use an analytic divergence, which needs none",
            )
        return _k3_of(r)
    near = r.clamp_max(max_log_ratio)
    return _k3_of(near) + math.expm1(max_log_ratio) * (r - near)


def _k3_of(r: Tensor) -> Tensor:
    return torch.where(r.abs() < NEAR, excess_near_zero(-r), torch.expm1(r) - r)


def leaves_float32(log_ratio: Tensor) -> Tensor:
    """Where exp of a log-ratio (nats) would overflow."""
    return log_ratio.detach() > MAX_LOG_RATIO


def policy_gradient(logp: Tensor, logq: Tensor, behaviour_logp: Tensor, trust: tuple[float, float]) -> Tensor:
    """Sampled-token reverse KL as a policy-gradient loss: -ratio * advantage * [trust[0] <= ratio <= trust[1]].

    advantage = log q - log p, detached; ratio = p / behaviour, which carries the gradient. In expectation over tokens
    of the behaviour policy, with every ratio trusted, the gradient is that of reverse KL. The range of trust is its only clip, and is
    applied to the log-ratio: nothing overflows, whatever the ratio. A ratio that is no number is trusted, and stops the step.

    Args:
        behaviour_logp: log-probabilities under the policy that sampled the tokens.
        trust: ratios outside this range get weight 0 (the mask is detached); the upper end is at most ``exp(MAX_LOG_RATIO)``.
    """
    log_ratio = logp - behaviour_logp
    low, high = (math.log(x) if x > 0 else -math.inf for x in trust)
    outside = (log_ratio.detach() < low) | (log_ratio.detach() > high)
    ratio = torch.exp(torch.where(outside, 0.0, log_ratio))
    return torch.where(outside, 0.0, -ratio * (logq - logp).detach())
