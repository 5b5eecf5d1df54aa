"""The passes of ``dense`` as Triton kernels. Same formulas, float32 logits, any gradient dtype.

In the first two passes a program has one row, and each lane keeps its own running maximum and sums, so the loop over the vocabulary has no
reduction in it.

Shape suffixes: C loss positions of one chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_opsd.distill.dense import REVERSE_KL, Mixture, Norms, Passes

#: Tokens of a step of the first two passes, and of a program of the gradient's.
BLOCK, SPAN = 4096, 4096
WARPS = 32
#: Numbers of a row between the passes: the fields of ``Norms``, the teacher's logit of the student's top token, the value, the mean pull.
FIELDS = 9


@triton.jit
def kl_terms(p, q, d):
    """q - p + p d, by the series of exp(-d) - 1 + d (to d^7) where the sum would cancel."""
    series = 1.0 / 24 - d * (1.0 / 120 - d * (1.0 / 720 - d * (1.0 / 5040)))
    series = d * d * (0.5 - d * (1.0 / 6 - d * series))
    return tl.where(tl.abs(d) < 0.25, p * series, q - p + p * d)


@triton.jit
def _expm1(x):
    series = 1.0 + x * (1.0 / 5) * (1.0 + x * (1.0 / 6) * (1.0 + x * (1.0 / 7)))
    series = x * (1.0 + x * 0.5 * (1.0 + x * (1.0 / 3) * (1.0 + x * 0.25 * series)))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):
    z = x / (2.0 + x)
    zz = z * z
    series = 2.0 * z * (1.0 + zz * (1.0 / 3 + zz * (1.0 / 5 + zz * (1.0 / 7 + zz * (1.0 / 9)))))
    return tl.where(tl.abs(x) < 0.3, series, tl.log(1.0 + x))


@triton.jit
def _terms(p, q, d, W: tl.constexpr, OF_TEACHER: tl.constexpr, OF_STUDENT: tl.constexpr):
    """See ``dense.terms``."""
    if W == 1.0:
        log_m = -d
        log_q = d * 0.0
    elif W == 0.0:
        log_m = d * 0.0
        log_q = -d
    else:
        smaller = tl.exp(-tl.abs(d))
        far = tl.log(tl.where(d > 0.0, (1.0 - W) + W * smaller, W + (1.0 - W) * smaller))
        near = _log1p(W * _expm1(tl.minimum(tl.maximum(-d, -1.0), 1.0)))
        log_m = tl.where(d > 1.0, far, tl.where(d < -1.0, far - d, near))
        log_q = tl.where(d < -1.0, -far, -d - log_m)
    m = W * q + (1.0 - W) * p
    value = d * 0.0
    h = d * 0.0
    if OF_TEACHER != 0.0:
        value += OF_TEACHER * kl_terms(q, m, log_q)
        if W == 0.0:
            near = p * _expm1(tl.minimum(tl.maximum(log_q, -0.25), 0.25))
            h -= OF_TEACHER * tl.where(tl.abs(log_q) < 0.25, near, q - p)
        elif W < 1.0:
            h -= OF_TEACHER * (1.0 - W) * _expm1(log_q)
    if OF_STUDENT != 0.0:
        value += OF_STUDENT * kl_terms(p, m, -log_m)
        if W > 0.0:
            h -= OF_STUDENT * log_m
            if W < 1.0:
                h -= OF_STUDENT * (1.0 - W) * _expm1(-log_m)
    return value, h


@triton.jit
def _pull(p, h, h_top, W: tl.constexpr):
    """p (h - h of the student's top token); see ``dense.Passes``."""
    if W == 0.0:
        pull = h - p * h_top
    else:
        pull = p * (h - h_top)
    return pull


@triton.jit
def _norms_kernel(student, teacher, out, at_out, V, C, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    s_max = tl.full([BLOCK], -float("inf"), tl.float32)
    t_max = tl.full([BLOCK], -float("inf"), tl.float32)
    s_at = tl.zeros([BLOCK], tl.int32)
    t_at = tl.zeros([BLOCK], tl.int32)
    s_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
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
        s_sum = s_sum * s_scale + e
        t_sum = t_sum * t_scale + tl.where(inside, tl.exp(t - t_new), 0.0)
        s_max = s_new
        t_max = t_new
    s_top = tl.max(s_max, 0)
    t_top = tl.max(t_max, 0)
    s_scale = tl.exp(s_max - s_top)
    s_total = tl.sum(s_sum * s_scale, 0)
    t_total = tl.sum(t_sum * tl.exp(t_max - t_top), 0)
    first_total = tl.sum(tl.where(s_sum > 0, (first + s_sum * (s_max - s_top)) * s_scale, 0.0), 0)
    s_best = tl.min(tl.where(s_max == s_top, s_at, V), 0)
    t_best = tl.min(tl.where(t_max == t_top, t_at, V), 0)
    there = s_best < V  # nowhere, in a row that holds NaN
    tl.store(out + row, s_top)
    tl.store(out + C + row, tl.log(s_total))
    tl.store(out + 2 * C + row, t_top)
    tl.store(out + 3 * C + row, tl.log(t_total))
    tl.store(out + 4 * C + row, tl.log(s_total) - first_total / s_total)
    tl.store(out + 5 * C + row, tl.where(s_best == t_best, 1.0, 0.0))
    tl.store(out + 6 * C + row, tl.load(teacher + row * V + s_best, mask=there, other=float("nan")))
    tl.store(at_out + row, s_best)


@triton.jit
def _row(norms, row, C):
    """What a row's pulls are made from: both tops and logs, whether the tops are close, what the logits' difference counts from, and that
    difference at the student's top token."""
    s_top = tl.load(norms + row)
    s_log = tl.load(norms + C + row)
    t_top = tl.load(norms + 2 * C + row)
    t_log = tl.load(norms + 3 * C + row)
    t_there = tl.load(norms + 6 * C + row)
    apart = s_top - t_top
    close = tl.abs(apart) <= 8.0
    offset = tl.where(close, apart, 0.0) + (s_log - t_log)
    return s_top, s_log, t_top, t_log, close, offset, tl.where(close, s_top - t_there, t_top - t_there), t_there


@triton.jit
def _at_top(s_log, t_top, t_log, t_there, offset, top, W: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """h of the student's top token."""
    p = tl.exp(-s_log)
    _, h = _terms(p, tl.exp((t_there - t_top) - t_log), top - offset, W, A, B)
    if W == 0.0:
        h = h / p
    return h


@triton.jit
def _value_kernel(
    student,
    teacher,
    norms,
    at_in,
    V,
    C,
    W: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence, and the sum of all pulls."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    s_top, s_log, t_top, t_log, close, offset, top, t_there = _row(norms, row, C)
    h_top = _at_top(s_log, t_top, t_log, t_there, offset, top, W, A, B)
    s_best = tl.load(at_in + row)
    total = tl.zeros([BLOCK], tl.float32)
    pulls = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + lane
        inside = at < V
        s = tl.load(student + row * V + at, mask=inside, other=0.0)
        t = tl.load(teacher + row * V + at, mask=inside, other=0.0)
        difference = tl.where(close, s - t, (s - s_top) - (t - t_top))
        p = tl.exp((s - s_top) - s_log)
        value, h = _terms(p, tl.exp((t - t_top) - t_log), difference - offset, W, A, B)
        if W == 1.0:
            pull = p * (difference - top)
        else:
            pull = _pull(p, h, h_top, W)
        total += tl.where(inside, value, 0.0)
        pulls += tl.where(inside & (at != s_best), pull, 0.0)
    tl.store(norms + 7 * C + row, tl.sum(total, 0))
    tl.store(norms + 8 * C + row, tl.sum(pulls, 0))


@triton.jit
def _grad_kernel(
    student,
    teacher,
    norms,
    at_in,
    coef,
    grad,
    V,
    C,
    W: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < V
    s_top, s_log, t_top, t_log, close, offset, top, t_there = _row(norms, row, C)
    s = tl.load(student + row * V + at, mask=inside, other=0.0)
    t = tl.load(teacher + row * V + at, mask=inside, other=0.0)
    difference = tl.where(close, s - t, (s - s_top) - (t - t_top))
    p = tl.exp((s - s_top) - s_log)
    if W == 1.0:
        pull = p * (difference - top)
    else:
        _, h = _terms(p, tl.exp((t - t_top) - t_log), difference - offset, W, A, B)
        pull = _pull(p, h, _at_top(s_log, t_top, t_log, t_there, offset, top, W, A, B), W)
    pull = tl.where(at == tl.load(at_in + row), 0.0, pull)
    c = tl.load(coef + row)
    g = tl.where(c == 0.0, 0.0, c * (pull - p * tl.load(norms + 8 * C + row)))
    tl.store(grad + row * V + at, g.to(grad.dtype.element_ty), mask=inside)


class KernelPasses(Passes):
    """``dense.Passes`` by kernels; both logits contiguous float32."""

    def __init__(self, student_CV: Tensor, teacher_CV: Tensor, mixture: Mixture = REVERSE_KL):
        rows, vocab = student_CV.shape
        self._logits = student_CV, teacher_CV
        self._mixture = mixture
        self._known = student_CV.new_empty(FIELDS, rows)
        self._at_C = torch.empty(rows, dtype=torch.int32, device=student_CV.device)
        _norms_kernel[(rows,)](*self._logits, self._known, self._at_C, vocab, rows, BLOCK=BLOCK, num_warps=WARPS)
        args = (*self._logits, self._known, self._at_C, vocab, rows, *self._mixture)
        _value_kernel[(rows,)](*args, BLOCK=BLOCK, num_warps=WARPS)
        self.norms, self.value_C = Norms(*self._known[:6]), self._known[7]

    def grad(self, coef_C: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Passes.grad``."""
        rows, vocab = self._logits[0].shape
        grad_CV = self._known.new_empty(rows, vocab, dtype=dtype)
        args = (*self._logits, self._known, self._at_C, coef_C, grad_CV, vocab, rows, *self._mixture)
        _grad_kernel[(rows, triton.cdiv(vocab, SPAN))](*args, SPAN=SPAN, num_warps=8)
        return grad_CV
