"""Reverse KL over the full vocabulary with its gradient written by hand: the hot path of the head.

Two passes over the logits, in plain torch here and as Triton kernels (``dense_triton``) on a GPU; nothing is saved for
autograd. With p = softmax(s), q = softmax(t), d = log p - log q:

    KL(p || q)    = sum_v p_v (expm1(-d_v) + d_v)     every term is q - p + p d >= 0; p, q both sum to one
    dKL / ds_v    = p_v (d_v - sum_u p_u d_u)

The first form keeps the digits of small divergences: rounding of the two normalisers cancels to first order, which in
``sum p d`` it does not. In the gradient it is the other way round: ``d - sum p d`` is where they cancel. d itself is the difference of
the logits minus that of the normalisers: near logits differ without rounding, near log-probabilities do not.

Shape suffixes: C loss positions of one chunk, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Log-ratios (nats) below which the series is used; above it the sum loses less than 2e-6 of its value in float32.
NEAR = 1 / 4


class Norms(NamedTuple):
    """What the first pass finds, [C] each in the dtype of the logits.

    student_norm, teacher_norm: log-sum-exp of the logits; mean_d: sum p d, nats; entropy of the student, nats; agree: 1
    where both have the same most probable token, else 0.
    """

    student_norm_C: Tensor
    teacher_norm_C: Tensor
    mean_d_C: Tensor
    entropy_C: Tensor
    agree_C: Tensor


def kl_terms(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """``q - p + p d`` with d = log p - log q, elementwise: >= 0, and without cancellation near d = 0."""
    return torch.where(d.abs() < NEAR, p * excess_near_zero(d), q - p + p * d)


def excess_near_zero(d: Tensor) -> Tensor:
    """``exp(-d) - 1 + d`` for abs(d) < NEAR, by its series; d is held inside so that no branch not taken overflows."""
    d = d.clamp(-NEAR, NEAR)
    # Relative error below 2e-8 (to d^7) and 1e-16 (to d^12).
    top = 12 if d.dtype == torch.float64 else 7
    series = torch.full_like(d, 1 / math.factorial(top))
    for n in range(top - 1, 1, -1):
        series = 1 / math.factorial(n) - series * d
    return series * d * d


def uses_triton(student_CV: Tensor) -> bool:
    """Whether the kernels take this input: float32 on a CUDA device, with Triton installed."""
    return student_CV.is_cuda and student_CV.dtype == torch.float32 and importlib.util.find_spec("triton") is not None


def norms(student_CV: Tensor, teacher_CV: Tensor) -> Norms:
    """First pass."""
    if uses_triton(student_CV):
        from verl_opsd.distill import dense_triton

        return Norms(*dense_triton.norms(student_CV, teacher_CV))
    student_norm_C = torch.logsumexp(student_CV, dim=-1)
    teacher_norm_C = torch.logsumexp(teacher_CV, dim=-1)
    logp_CV = student_CV - student_norm_C[:, None]
    p_CV = torch.exp(logp_CV)
    return Norms(
        student_norm_C=student_norm_C,
        teacher_norm_C=teacher_norm_C,
        mean_d_C=(p_CV * (student_CV - teacher_CV)).sum(-1) - (student_norm_C - teacher_norm_C),
        entropy_C=-(p_CV * logp_CV).sum(-1),
        agree_C=(student_CV.argmax(-1) == teacher_CV.argmax(-1)).to(student_CV.dtype),
    )


def kl_and_grad(
    student_CV: Tensor, teacher_CV: Tensor, norms: Norms, coef_C: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Second pass: KL(student || teacher), [C], nats; and the gradient of ``sum_c coef_c KL_c`` with respect to the
    student's logits, [C, V] in ``dtype``, or None without coefficients.

    A row of coefficient 0 has gradient exactly 0, whatever its logits hold.
    """
    if uses_triton(student_CV):
        from verl_opsd.distill import dense_triton

        return dense_triton.kl_and_grad(student_CV, teacher_CV, *norms[:3], coef_C, dtype)
    d_CV = (student_CV - teacher_CV) - (norms.student_norm_C - norms.teacher_norm_C)[:, None]
    p_CV = torch.exp(student_CV - norms.student_norm_C[:, None])
    kl_C = kl_terms(p_CV, torch.exp(teacher_CV - norms.teacher_norm_C[:, None]), d_CV).sum(-1)
    if coef_C is None:
        return kl_C, None
    grad_CV = coef_C[:, None] * p_CV * (d_CV - norms.mean_d_C[:, None])
    grad_CV[coef_C == 0] = 0.0
    return kl_C, grad_CV.to(dtype)
