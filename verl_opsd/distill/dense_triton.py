"""The two passes of ``dense`` as Triton kernels, one program a row. Same formulas, float32 logits, any gradient dtype.

Each lane keeps its own running maximum and sums, so the loop over the vocabulary has no reduction in it.

Shape suffixes: C loss positions of one chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 32


@triton.jit
def _norms_kernel(student, teacher, student_norm, teacher_norm, mean_d, entropy, agree, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    s_max = tl.full([BLOCK], -float("inf"), tl.float32)
    t_max = tl.full([BLOCK], -float("inf"), tl.float32)
    s_at = tl.zeros([BLOCK], tl.int32)
    t_at = tl.zeros([BLOCK], tl.int32)
    s_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
    diff = tl.zeros([BLOCK], tl.float32)  # sum of exp(s - max) (s - t)
    first = tl.zeros([BLOCK], tl.float32)  # sum of exp(s - max) (s - max)
    for start in range(0, V, BLOCK):
        at = start + lane
        inside = at < V
        s = tl.load(student + row * V + at, mask=inside, other=-float("inf"))
        t = tl.load(teacher + row * V + at, mask=inside, other=-float("inf"))
        s_at = tl.where(s > s_max, at, s_at)
        t_at = tl.where(t > t_max, at, t_at)
        s_new = tl.maximum(s_max, s)
        t_new = tl.maximum(t_max, t)
        s_scale = tl.where(s_max == s_new, 1.0, tl.exp(s_max - s_new))
        t_scale = tl.where(t_max == t_new, 1.0, tl.exp(t_max - t_new))
        e = tl.where(inside, tl.exp(s - s_new), 0.0)
        first = tl.where(inside, (first + s_sum * tl.where(s_sum > 0, s_max - s_new, 0.0)) * s_scale + e * (s - s_new), first)
        diff = tl.where(inside, diff * s_scale + e * (s - t), diff)
        s_sum = s_sum * s_scale + e
        t_sum = t_sum * t_scale + tl.where(inside, tl.exp(t - t_new), 0.0)
        s_max = s_new
        t_max = t_new
    s_top = tl.max(s_max, 0)
    t_top = tl.max(t_max, 0)
    s_scale = tl.exp(s_max - s_top)
    s_total = tl.sum(s_sum * s_scale, 0)
    t_total = tl.sum(t_sum * tl.exp(t_max - t_top), 0)
    used = s_sum > 0
    first_total = tl.sum(tl.where(used, (first + s_sum * (s_max - s_top)) * s_scale, 0.0), 0)
    s_log = s_top + tl.log(s_total)
    t_log = t_top + tl.log(t_total)
    s_best = tl.min(tl.where(s_max == s_top, s_at, V), 0)
    t_best = tl.min(tl.where(t_max == t_top, t_at, V), 0)
    tl.store(student_norm + row, s_log)
    tl.store(teacher_norm + row, t_log)
    tl.store(mean_d + row, tl.sum(diff * s_scale, 0) / s_total - (s_log - t_log))
    tl.store(entropy + row, tl.log(s_total) - first_total / s_total)
    tl.store(agree + row, tl.where(s_best == t_best, 1.0, 0.0))


@triton.jit
def _kl_grad_kernel(
    student, teacher, student_norm, teacher_norm, mean_d, coef, kl, grad, V, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    s_log = tl.load(student_norm + row)
    t_log = tl.load(teacher_norm + row)
    total = tl.zeros([BLOCK], tl.float32)
    if WRITE:
        mean = tl.load(mean_d + row)
        c = tl.load(coef + row)
    for start in range(0, V, BLOCK):
        at = start + lane
        inside = at < V
        s = tl.load(student + row * V + at, mask=inside, other=0.0)
        t = tl.load(teacher + row * V + at, mask=inside, other=0.0)
        d = (s - t) - (s_log - t_log)
        p = tl.exp(s - s_log)
        b = tl.maximum(d, -1.0)
        # expm1(-b) + b: by its series (terms to b^9) where the sum would cancel
        series = 1.0 / 5040 - b * (1.0 / 40320 - b * (1.0 / 362880))
        series = 1.0 / 24 - b * (1.0 / 120 - b * (1.0 / 720 - b * series))
        series = b * b * (0.5 - b * (1.0 / 6 - b * series))
        near = p * tl.where(tl.abs(b) < 0.5, series, tl.exp(-b) - 1.0 + b)
        far = tl.exp(t - t_log) - p + p * d
        total += tl.where(inside, tl.where(d < -1.0, far, near), 0.0)
        if WRITE:
            g = tl.where(c == 0.0, 0.0, c * p * (d - mean))
            tl.store(grad + row * V + at, g.to(grad.dtype.element_ty), mask=inside)
    tl.store(kl + row, tl.sum(total, 0))


def norms(student_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``dense.Norms``. Both inputs contiguous float32."""
    rows, vocab = student_CV.shape
    out = student_CV.new_empty(5, rows)
    _norms_kernel[(rows,)](student_CV, teacher_CV, *out, vocab, BLOCK=BLOCK, num_warps=WARPS)
    return out[0], out[1], out[2], out[3], out[4]


def kl_and_grad(
    student_CV: Tensor,
    teacher_CV: Tensor,
    student_norm_C: Tensor,
    teacher_norm_C: Tensor,
    mean_d_C: Tensor,
    coef_C: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """See ``dense.kl_and_grad``. Both logits contiguous float32."""
    rows, vocab = student_CV.shape
    kl_C = student_CV.new_empty(rows)
    grad_CV = None if coef_C is None else student_CV.new_empty(rows, vocab, dtype=dtype)
    _kl_grad_kernel[(rows,)](
        student_CV,
        teacher_CV,
        student_norm_C,
        teacher_norm_C,
        mean_d_C,
        coef_C if coef_C is not None else kl_C,
        kl_C,
        grad_CV if grad_CV is not None else kl_C,
        vocab,
        WRITE=coef_C is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return kl_C, grad_CV
