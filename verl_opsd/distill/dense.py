"""Divergences over the full vocabulary with their gradient written by hand: the hot path of the head.

Three passes over the logits, in plain torch here and as Triton kernels (``dense_triton``) on a GPU; nothing is saved for autograd.
With p = softmax(s), q = softmax(t), d = log p - log q, every divergence of the library is one of

    D = a KL(q || m) + b KL(p || m),    m = w q + (1 - w) p            (``Mixture``)

and has the gradient of an f-divergence:

    dD / ds_v = p_v (h_v - sum_u p_u h_u),    h = dD / dp, up to a constant of the row

Digits. KL is summed as ``sum_v b - a + a log(a/b)``: every term is >= 0, and the rounding of the two normalisers cancels to first order.
Logits count from the row's largest, so that an offset of all of them costs nothing; d is the difference of near logits themselves, which
is not rounded. h counts from that of the student's most probable token: where the student is sure of it, everything else cancels.

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
#: Distance (nats) of the two largest logits up to which logits are compared as they are.
CLOSE = 8.0


class Mixture(NamedTuple):
    """``of_teacher KL(q || m) + of_student KL(p || m)`` with ``m = teacher q + (1 - teacher) p``; p is the student.

    Reverse KL is (1, 0, 1), forward KL (0, 1, 0), JSD (beta, beta, 1 - beta), skewed reverse KL (1 - skew, 0, 1), skewed forward KL
    (skew, 1, 0).
    """

    teacher: float
    of_teacher: float
    of_student: float


REVERSE_KL = Mixture(1.0, 0.0, 1.0)


class Norms(NamedTuple):
    """What is known of each position, [C] each in the dtype of the logits.

    student_top, teacher_top: the largest logit; student_log, teacher_log: log-sum-exp of the logits above it, so that a log-probability is
    ``(logit - top) - log``; entropy of the student, nats; agree: 1 where both have the same most probable token, else 0.
    """

    student_top_C: Tensor
    student_log_C: Tensor
    teacher_top_C: Tensor
    teacher_log_C: Tensor
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


def log_ratios(d: Tensor, teacher: float) -> tuple[Tensor, Tensor]:
    """log(m / p) and log(q / m), elementwise, each without cancellation where it is small."""
    if teacher in (0.0, 1.0):
        return -d * teacher, -d * (1 - teacher)
    smaller = torch.exp(-d.abs())
    far = torch.log(
        torch.where(d > 0, (1 - teacher) + teacher * smaller, teacher + (1 - teacher) * smaller)
    )  # m over the larger of p, q
    near = torch.log1p(teacher * torch.expm1(-d.clamp(-1, 1)))
    log_m = torch.where(d > 1, far, torch.where(d < -1, far - d, near))
    return log_m, torch.where(d < -1, -far, -d - log_m)


def terms(p: Tensor, q: Tensor, d: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """(terms of the divergence, h with h = 0 where d = 0), elementwise; of forward KL p h in place of h, which is not finite where p
    vanishes."""
    w, of_teacher, of_student = mixture
    log_m, log_q = log_ratios(d, w)
    m = w * q + (1 - w) * p
    value, h = torch.zeros_like(d), torch.zeros_like(d)
    if of_teacher:
        value = value + of_teacher * kl_terms(q, m, log_q)
        if w == 0:
            h = h - of_teacher * torch.where(log_q.abs() < NEAR, p * torch.expm1(log_q), q - p)
        elif w < 1:
            h = h - of_teacher * (1 - w) * torch.expm1(log_q)  # q / m - 1
    if of_student:
        value = value + of_student * kl_terms(p, m, -log_m)
        if w > 0:
            h = h - of_student * log_m
        if 0 < w < 1:
            h = h - of_student * (1 - w) * torch.expm1(-log_m)
    return value, h


class Passes:
    """A divergence of a chunk from the logits of both sides.

    Attributes:
        norms: see :class:`Norms`.
        value_C: the divergence, nats.
    """

    def __init__(self, student_CV: Tensor, teacher_CV: Tensor, mixture: Mixture = REVERSE_KL):
        s_top_C, at_C = student_CV.max(-1)
        t_top_C, teacher_at_C = teacher_CV.max(-1)
        s_CV, t_CV = student_CV - s_top_C[:, None], teacher_CV - t_top_C[:, None]
        s_log_C, t_log_C = torch.logsumexp(s_CV, dim=-1), torch.logsumexp(t_CV, dim=-1)
        p_CV, q_CV = torch.exp(s_CV - s_log_C[:, None]), torch.exp(t_CV - t_log_C[:, None])
        apart_C = s_top_C - t_top_C
        close_C = apart_C.abs() <= CLOSE
        difference_CV = torch.where(close_C[:, None], student_CV - teacher_CV, s_CV - t_CV)
        d_CV = difference_CV - (torch.where(close_C, apart_C, 0.0) + (s_log_C - t_log_C))[:, None]
        value_CV, h_CV = terms(p_CV, q_CV, d_CV, mixture)
        self.norms = Norms(
            student_top_C=s_top_C,
            student_log_C=s_log_C,
            teacher_top_C=t_top_C,
            teacher_log_C=t_log_C,
            entropy_C=s_log_C - (p_CV * s_CV).sum(-1),
            agree_C=(at_C == teacher_at_C).to(student_CV.dtype),
        )
        self.value_C = value_CV.sum(-1)
        at_C1 = at_C[:, None]
        if mixture.teacher == 0:
            pull_CV = h_CV - p_CV * (h_CV.gather(1, at_C1) / p_CV.gather(1, at_C1))
        else:  # the difference first: equal h leave exactly nothing, however much of the mass they have
            h_CV = difference_CV if mixture == REVERSE_KL else h_CV
            pull_CV = p_CV * (h_CV - h_CV.gather(1, at_C1))
        self._p_CV, self._pull_CV = p_CV, pull_CV

    def grad(self, coef_C: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of ``sum_c coef_c D_c`` with respect to the student's logits, [C, V] in ``dtype``.

        A row of coefficient 0 has gradient exactly 0, whatever its logits hold.
        """
        grad_CV = coef_C[:, None] * (self._pull_CV - self._p_CV * self._pull_CV.sum(-1, keepdim=True))
        grad_CV[coef_C == 0] = 0.0
        return grad_CV.to(dtype)


def score(student_CV: Tensor, teacher_CV: Tensor, mixture: Mixture = REVERSE_KL) -> Passes:
    """The divergence of a chunk, by the kernels where they take it; logits contiguous."""
    if uses_triton(student_CV):
        from verl_opsd.distill.dense_triton import KernelPasses

        return KernelPasses(student_CV, teacher_CV, mixture)
    return Passes(student_CV, teacher_CV, mixture)
