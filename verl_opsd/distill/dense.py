"""Reverse KL over the full vocabulary with its gradient written by hand: the hot path of the head.

Two functions that a compiler fuses into a few passes over the logits; nothing is saved for autograd. With
p = softmax(s), q = softmax(t), d = log p - log q:

    KL(p || q)    = sum_v p (expm1(-d) + d)       every term >= 0 (it is q - p + p d, and p, q both sum to one)
    dKL / ds_v    = p_v (d_v - sum_u p_u d_u)

The first form keeps the digits of small divergences: rounding of the two normalisers cancels to first order, which in
``sum p d`` it does not. In the gradient it is the other way round: ``d - sum p d`` is where they cancel.

Shape suffixes: C loss positions of one chunk, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DenseStats(NamedTuple):
    """Per-position values of one chunk, all [C] in the dtype of the logits; nats."""

    kl_C: Tensor
    mean_d_C: Tensor
    student_norm_C: Tensor
    teacher_norm_C: Tensor
    entropy_C: Tensor
    agree_C: Tensor


def excess(d: Tensor) -> Tensor:
    """``expm1(-d) + d``, which is >= 0, for d >= -1. Below 1/16 by its series, since the sum would cancel."""
    series = d * d * (0.5 - d * (1 / 6 - d * (1 / 24 - d / 120)))
    return torch.where(d.abs() < 0.0625, series, torch.expm1(-d) + d)


def reverse_kl_stats(student_CV: Tensor, teacher_CV: Tensor) -> DenseStats:
    """KL(student || teacher) in nats and what its gradient needs, from logits."""
    student_norm_C = torch.logsumexp(student_CV, dim=-1)
    teacher_norm_C = torch.logsumexp(teacher_CV, dim=-1)
    logp_CV = student_CV - student_norm_C[:, None]
    logq_CV = teacher_CV - teacher_norm_C[:, None]
    d_CV = logp_CV - logq_CV
    p_CV = torch.exp(logp_CV)
    pd_CV = p_CV * d_CV
    term_CV = torch.where(d_CV < -1, torch.exp(logq_CV) - p_CV + pd_CV, p_CV * excess(d_CV))
    return DenseStats(
        kl_C=term_CV.sum(-1),
        mean_d_C=pd_CV.sum(-1),
        student_norm_C=student_norm_C,
        teacher_norm_C=teacher_norm_C,
        entropy_C=-(p_CV * logp_CV).sum(-1),
        agree_C=(student_CV.argmax(-1) == teacher_CV.argmax(-1)).to(student_CV.dtype),
    )


def reverse_kl_grad(
    student_CV: Tensor, teacher_CV: Tensor, stats: DenseStats, coef_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """Gradient of ``sum_c coef_c * KL_c`` with respect to the student's logits, [C, V] in ``dtype``.

    A row of coefficient 0 is exactly 0, whatever its logits hold.
    """
    logp_CV = student_CV - stats.student_norm_C[:, None]
    d_CV = logp_CV - (teacher_CV - stats.teacher_norm_C[:, None])
    grad_CV = coef_C[:, None] * torch.exp(logp_CV) * (d_CV - stats.mean_d_C[:, None])
    return torch.where(coef_C[:, None] == 0, 0.0, grad_CV).to(dtype)
