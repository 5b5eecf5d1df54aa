"""The distillation losses in float64, from their definitions: no stabilised form, no chunk, no code of the library.

Shape suffixes: N loss positions, V vocabulary, J outcomes of a support (its tokens and the rest).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def log_softmax(logits_NV: Tensor) -> Tensor:
    """log(exp(z_v) / sum_u exp(z_u)), float64."""
    z_NV = logits_NV.to(torch.float64)
    z_NV = z_NV - z_NV.detach().max(-1, keepdim=True).values
    return z_NV - z_NV.exp().sum(-1, keepdim=True).log()


def softmax(logits_NV: Tensor) -> Tensor:
    """Probabilities, float64."""
    return log_softmax(logits_NV).exp()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v log(p_v / q_v) over outcomes with p_v > 0; nats."""
    possible = p > 0
    ratio = torch.where(possible, p, 1.0) / torch.where(possible, q, 1.0)
    return (p * ratio.log()).sum(-1)


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p; p is the student."""
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


#: (student probabilities, teacher probabilities) -> [N]
DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse_kl": kl,
    "forward_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: jsd(p, q, 0.3),
    "skewed_reverse_kl": lambda p, q: kl(p, 0.2 * p + 0.8 * q),
    "skewed_forward_kl": lambda p, q: kl(q, 0.2 * q + 0.8 * p),
}
#: The parameters that the functions above fix.
PARAMETERS: dict[str, dict[str, float]] = {
    "jsd": {"beta": 0.3},
    "skewed_reverse_kl": {"skew": 0.2},
    "skewed_forward_kl": {"skew": 0.2},
}


def of_logprobs(name: str, logp: Tensor, logq: Tensor) -> Tensor:
    """A divergence of ``DIVERGENCES`` by logarithms, so that no probability underflows: [N] from float64 [N, J]; -inf on both sides adds 0."""

    def log_kl(loga: Tensor, logb: Tensor) -> Tensor:
        there = loga > -torch.inf
        return (loga.exp() * (torch.where(there, loga, 0.0) - torch.where(there, logb, 0.0))).sum(-1)

    def mixture(loga: Tensor, logb: Tensor, share: float) -> Tensor:
        there = loga > -torch.inf
        mixed = torch.logaddexp(
            torch.where(there, loga, 0.0) + math.log(share), torch.where(there, logb, 0.0) + math.log1p(-share)
        )
        return torch.where(there, mixed, -torch.inf)

    if name == "jsd":
        m = mixture(logq, logp, 0.3)
        return 0.3 * log_kl(logq, m) + 0.7 * log_kl(logp, m)
    pair = (logq, logp) if "forward" in name else (logp, logq)
    return log_kl(pair[0], mixture(*pair, 0.2) if "skewed" in name else pair[1])


def support_of(side: str, p_V: Tensor, q_V: Tensor, label: int, k: int) -> list[int]:
    """Token ids of a support, by sorting probabilities in Python."""

    def top(prob_V: Tensor) -> set[int]:
        values = prob_V.tolist()
        return set(sorted(range(len(values)), key=lambda v: -values[v])[:k])

    sets = {"student_topk": top(p_V), "teacher_topk": top(q_V), "union_topk": top(p_V) | top(q_V)}
    return sorted(sets[side] | {label})


def outcomes(p_V: Tensor, ids: list[int]) -> Tensor:
    """Probabilities of the ids, and of everything else as one outcome."""
    rest = [v for v in range(p_V.numel()) if v not in set(ids)]
    return torch.cat([p_V[ids], p_V[rest].sum()[None]])
