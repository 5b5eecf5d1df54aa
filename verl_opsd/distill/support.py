"""Supports: a divergence over a few tokens of the vocabulary plus one bucket that holds the rest of the mass.

Merging outcomes can only lower a divergence (data processing), so a truncated value never exceeds the exact one, and it
equals it when the support is the vocabulary. Nothing is clamped and nothing renormalised: a student that moves mass out
of the support meets it again in the tail bucket.

Unused slots of a support are id -1 with log-probability -inf on both sides; they add 0.

Shape suffixes: C positions, V vocabulary, K slots of the support, J = K + 1 outcomes (the last one is the tail).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError

Side = Literal["student_topk", "teacher_topk", "union_topk"]


def support_ids(side: Side, logp_CV: Tensor, logq_CV: Tensor, labels_C: Tensor, k: int) -> Tensor:
    """The ids of a support, int64 [C, K]: top-k of one side or both, and the sampled token; each id once, -1 unused.

    Args:
        side: whose most probable tokens.
        labels_C: int64 sampled tokens.
        k: tokens taken from a side, at most V.
    """
    k = min(k, logp_CV.shape[-1])
    parts = [labels_C[:, None]]
    if side in ("student_topk", "union_topk"):
        parts.append(logp_CV.detach().topk(k, dim=-1).indices)
    if side in ("teacher_topk", "union_topk"):
        parts.append(logq_CV.detach().topk(k, dim=-1).indices)
    ids_CK = torch.cat(parts, dim=-1).sort(dim=-1).values
    repeated_CK = torch.zeros_like(ids_CK, dtype=torch.bool)
    repeated_CK[:, 1:] = ids_CK[:, 1:] == ids_CK[:, :-1]
    return ids_CK.masked_fill(repeated_CK, -1)


def check_ids(ids_CK: Tensor, labels_C: Tensor, vocab: int) -> None:
    """Refuses a given support that repeats an id, leaves the vocabulary or lacks the sampled token.

    Raises:
        OpsdError: with the first position at fault.
    """
    way_out = "build supports with distill.support.support_ids, or ask the server for the sampled token beside its top-k"
    if bool((ids_CK >= vocab).any()) or bool((ids_CK < -1).any()):
        raise OpsdError(f"support ids up to {int(ids_CK.max())} for a vocabulary of {vocab}", "ids are -1..V-1", way_out)
    ordered_CK = ids_CK.sort(dim=-1).values
    repeated_C = ((ordered_CK[:, 1:] == ordered_CK[:, :-1]) & (ordered_CK[:, 1:] >= 0)).any(-1)
    if bool(repeated_C.any()):
        raise OpsdError(f"support {int(repeated_C.nonzero()[0])} repeats an id", "its mass would count twice", way_out)
    missing_C = ~(ids_CK == labels_C[:, None]).any(-1)
    if bool(missing_C.any()):
        raise OpsdError(
            f"support {int(missing_C.nonzero()[0])} lacks the sampled token",
            "the sampled token is in the support",
            way_out,
        )


#: How far the mass of a given support and its tail may be from 1: log-probabilities that were rounded on their way, not another distribution.
MASS_TOLERANCE = 1e-3


def check_mass(logprobs_NK: Tensor, tail_N: Tensor, carries_N: Tensor) -> None:
    """Refuses a given support whose outcomes are no distribution, where ``carries_N``; elsewhere nothing is made of it.

    Raises:
        OpsdError: with the first position at fault, and its mass.
    """
    mass_N = logprobs_NK.double().exp().sum(-1) + tail_N.double().exp()
    wrong_N = carries_N & ~((mass_N - 1).abs() <= MASS_TOLERANCE)
    if bool(wrong_N.any()):
        at = int(wrong_N.nonzero()[0])
        raise OpsdError(
            f"support {at} has the mass {float(mass_N[at]):.4g} with its tail",
            "the probabilities of the support's tokens and of the tail sum to 1",
            "give log-probabilities of the whole distribution (temperature 1, no top_p), and the log of what is left as the tail",
        )


def _inside(ids_CK: Tensor, vocab: int) -> Tensor:
    """Which tokens a support holds, bool[C, V]."""
    inside_CV = torch.zeros(ids_CK.shape[0], vocab + 1, dtype=torch.bool, device=ids_CK.device)
    return inside_CV.scatter_(1, torch.where(ids_CK >= 0, ids_CK, vocab), True)[:, :-1]  # column V swallows unused slots


def with_tail(logp_CV: Tensor, ids_CK: Tensor) -> Tensor:
    """Log-probabilities [C, J] of the support's tokens and of everything else.

    The tail is the log-sum-exp of the tokens outside, not 1 - sum: it keeps its digits when it is small. It is -inf where none is.
    """
    used_CK = ids_CK >= 0
    slots_CK = torch.where(used_CK, logp_CV.gather(-1, ids_CK.clamp_min(0)), -torch.inf)
    outside_CV = logp_CV.masked_fill(_inside(ids_CK, logp_CV.shape[1]), -torch.inf)
    return torch.cat([slots_CK, torch.logsumexp(outside_CV, dim=-1, keepdim=True)], dim=-1)


def to_logits(grad_CJ: Tensor, outcomes_CJ: Tensor, logp_CV: Tensor, ids_CK: Tensor) -> Tensor:
    """Gradient by the logits of all tokens, [C, V], from that by the logits of the outcomes: a token of the support has its own, the others
    share the tail's by their probability. A row of zeros stays exactly 0, whatever its log-probabilities hold.
    """
    tail_C1 = outcomes_CJ[:, -1:]
    grad_CV = torch.exp(logp_CV - tail_C1) * grad_CJ[:, -1:]
    of_tail_CV = ~_inside(ids_CK, logp_CV.shape[1]) & (tail_C1 > -torch.inf)
    grad_CV = torch.where(of_tail_CV, grad_CV, 0.0)
    return grad_CV.scatter_add_(1, ids_CK.clamp_min(0), torch.where(ids_CK >= 0, grad_CJ[:, :-1], 0.0))


def coverage(outcomes_CJ: Tensor) -> Tensor:
    """Probability mass of the support without the tail, [C]."""
    return outcomes_CJ[:, :-1].exp().sum(-1)
