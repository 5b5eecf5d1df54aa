"""Reverse KL over the full vocabulary in one pass over float32 logits, a slice of the vocabulary at a time.

While a slice of both sides' logits is hot it is worked off by the chain rule of KL over blocks b of ``BLOCK`` tokens, with P, Q the blocks'
masses and p_b, q_b the distributions within a block:

    KL(student || teacher) = KL(P || Q) + sum_b P_b KL(p_b || q_b)        every part is >= 0: nothing cancels

Values are float32 throughout. For the gradient alone two numbers a token are kept in 16 bits, p_b(v) and e_b(v), the difference of the two
logits around its mean m_b under p_b; the gradient itself (bf16) takes the place of the first:

    dKL / ds_v = p_v (d_v - KL),   p_v = P_b p_b(v),   d_v - KL = e_b(v) + k_b,   k_b = m_b - sum_b P_b m_b

Each is rounded by at most 2^-11 of its own size (p_b is kept times 2^15: a small one would be a subnormal), e_b by 2^-25 nats where that is
more. Around another number than m_b they would cancel where the student is sure of one token.

Four bytes a logit are kept where logits and their gradient would take ten, so a chunk may hold more positions, and the products are nearer
to their full speed.

Shape suffixes: C loss positions of one chunk, S student and T teacher hidden size, V vocabulary, W width of a slice of it, B blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_opsd.distill.dense import Norms
from verl_opsd.distill.dense_triton import kl_terms

#: Tokens of a block of the chain rule, and of a slice of the vocabulary in a whole chunk.
BLOCK, SLICE = 512, 11264
#: Warps that work off a block: the fewer, the more of its sums stays within a thread.
WARPS = 1
#: Statistics of a block; the gradient's factors take the place of the first two.
STATS = 8


@triton.jit
def _block_kernel(student, teacher, prob, diff, stats, start, W, FROM, TO, B, SIZE, BLOCK: tl.constexpr):
    """One block of one row: statistics, and what the gradient needs. Past the end both logits are so low that the
    sums get exact zeros. ``FROM`` and ``TO`` are the row strides of the logits and of what is kept."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < W
    s = tl.load(student + row * FROM + at, mask=inside, other=-1e30)
    t = tl.load(teacher + row * FROM + at, mask=inside, other=-1e30)
    s_max = tl.max(s, 0)
    t_max = tl.max(t, 0)
    t_there = tl.max(tl.where(s == s_max, t, -1e30), 0)  # the teacher's logit of the block's top token
    close = tl.abs(s_max - t_max) <= 8.0
    s_low = s - s_max
    t_low = t - t_max
    difference = tl.where(close, s - t, s_low - t_low)
    p = tl.exp(s_low)
    q = tl.exp(t_low)
    first = tl.sum(p * s_low, 0)
    s_sum = tl.sum(p, 0)
    t_sum = tl.sum(q, 0)
    s_log = tl.log(s_sum)
    ratio = tl.log(tl.div_rn(s_sum, t_sum))  # of the normalisers; their own difference is rounded at their size
    p *= 1.0 / s_sum
    q *= 1.0 / t_sum
    kl = kl_terms(p, q, difference - (tl.where(close, s_max - t_max, 0.0) + ratio))
    tl.store(prob + row * TO + start + at, (p * 32768.0).to(prob.dtype.element_ty), mask=inside)
    # From the block's top token, then around the mean: where the student is sure of it, its number is near 0 and keeps its digits.
    top = tl.where(close, s_max, t_max) - t_there
    difference -= top
    mean = tl.sum(p * difference, 0)
    tl.store(diff + row * TO + start + at, (difference - mean).to(diff.dtype.element_ty), mask=inside)
    place = stats + row * B + start // BLOCK + block
    tl.store(place, s_log)
    tl.store(place + SIZE, ratio)
    tl.store(place + 2 * SIZE, tl.sum(kl, 0))
    tl.store(place + 3 * SIZE, top + mean)
    tl.store(place + 4 * SIZE, s_log - first / s_sum)
    tl.store(place + 5 * SIZE, s_max)
    tl.store(place + 6 * SIZE, t_max)
    tl.store(place + 7 * SIZE, tl.where(t_there == t_max, 1.0, 0.0))


@triton.jit
def _combine_kernel(stats, out, C, B, SIZE, BLOCKS: tl.constexpr):
    """The chain rule of one row: ``out`` gets the fields of ``Norms`` and KL; the first two statistics become P_b and k_b. Logits count from
    the largest of either side."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    there = at < B
    place = stats + row.to(tl.int64) * B + at
    s_max = tl.load(place + 5 * SIZE, mask=there, other=-float("inf"))
    t_max = tl.load(place + 6 * SIZE, mask=there, other=-float("inf"))
    s_top = tl.max(s_max, 0)
    t_top = tl.max(t_max, 0)
    close = tl.abs(s_max - t_max) <= 8.0
    moved = tl.where(there, (s_max - s_top) - (t_max - t_top), 0.0)
    offset = tl.where(there & close, (s_max - t_max) - (s_top - t_top), moved)
    offset += tl.load(place + SIZE, mask=there, other=0.0)
    s_block = tl.where(there, (s_max - s_top) + tl.load(place, mask=there, other=0.0), -float("inf"))
    most = tl.max(s_block, 0)
    s_sum = tl.sum(tl.exp(s_block - most), 0)
    mass = tl.exp(s_block - most) / s_sum
    # The teacher's masses are the student's times exp(-offset), over their sum. Near the mean offset nothing but offsets is rounded.
    centre = tl.sum(mass * offset, 0)
    c = tl.where(there, offset - centre, 0.0)
    t_block = s_block - most - c
    t_most = tl.max(t_block, 0)
    t_sum = tl.sum(tl.exp(t_block - t_most), 0)
    far = t_most + tl.log(t_sum / s_sum)
    near = tl.log(tl.div_rn(tl.sum(mass * tl.exp(-tl.minimum(tl.maximum(c, -1.0), 1.0)), 0), tl.sum(mass, 0)))
    total = centre - tl.where(tl.max(tl.abs(c), 0) < 1.0, near, far)
    s_log = most + tl.log(s_sum)
    between = kl_terms(mass, tl.exp(t_block - t_most) / t_sum, offset - total)
    within = mass * tl.load(place + 2 * SIZE, mask=there, other=0.0)
    block_mean = tl.load(place + 3 * SIZE, mask=there, other=0.0) + tl.where(close, t_top - s_top, moved)
    block_mean -= tl.max(tl.where(s_block == most, block_mean, -float("inf")), 0)
    mean = tl.sum(tl.where(there, mass * block_mean, 0.0), 0)
    entropy = tl.load(place + 4 * SIZE, mask=there, other=0.0) - tl.where(there, s_block - s_log, 0.0)
    both = tl.load(place + 7 * SIZE, mask=there, other=0.0)
    best = (s_max == s_top) & (t_max == t_top)
    tl.store(out + row, s_top)
    tl.store(out + C + row, s_log)
    tl.store(out + 2 * C + row, t_top)
    tl.store(out + 3 * C + row, s_log - total)
    tl.store(out + 4 * C + row, tl.sum(mass * entropy, 0))
    tl.store(out + 5 * C + row, tl.max(tl.where(best, both, 0.0), 0))
    tl.store(out + 6 * C + row, tl.sum(tl.where(there, between + within, 0.0), 0))
    tl.store(place, mass / 32768.0, mask=there)
    tl.store(place + SIZE, block_mean - mean, mask=there)


@triton.jit
def _grad_kernel(prob, diff, stats, coef, grad, V, STRIDE, B, SIZE, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    place = stats + row * B + block
    c = tl.load(coef + row)
    p = tl.load(prob + row * STRIDE + at, mask=inside, other=0.0).to(tl.float32) * tl.load(place)
    d = tl.load(diff + row * STRIDE + at, mask=inside, other=0.0).to(tl.float32) + tl.load(place + SIZE)
    g = tl.where(c == 0.0, 0.0, c * p * d)
    tl.store(grad + row * STRIDE + at, g.to(grad.dtype.element_ty), mask=inside)


def takes(weight_VS: Tensor, weight_VT: Tensor) -> bool:
    """Whether what is kept in 16 bits loses nothing that the gradient keeps: both weights bf16 on a GPU."""
    return all(w.is_cuda and w.dtype == torch.bfloat16 for w in (weight_VS, weight_VT))


class Blocks:
    """KL(student || teacher) of a chunk, and its gradient by the student's logits.

    Attributes:
        norms: of ``dense``; kl_C: nats. float32.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device, keep: torch.dtype = torch.float16):
        """``keep``: dtype of the two numbers a token that the gradient needs."""
        self.blocks = triton.cdiv(vocab, BLOCK)
        self._kept = torch.empty(2, rows, triton.cdiv(vocab, 8) * 8, dtype=keep, device=device)  # rows of whole 16 bytes
        self.prob_CV, self.diff_CV = self._kept[..., :vocab]
        self.stats = torch.empty(STATS, rows, self.blocks, dtype=torch.float32, device=device)

    def add(self, start: int, student_CW: Tensor, teacher_CW: Tensor) -> None:
        """Works off the logits of the tokens from ``start``, a multiple of ``BLOCK``; float32, of one row stride, contiguous in a row."""
        rows, width = student_CW.shape
        assert start % BLOCK == 0 and student_CW.stride() == teacher_CW.stride() == (student_CW.stride(0), 1)
        kept = (self.prob_CV, self.diff_CV, self.stats)
        grid = (triton.cdiv(width, BLOCK), rows)
        shape = (start, width, student_CW.stride(0), self.prob_CV.stride(0), self.blocks, self.stats[0].numel())
        _block_kernel[grid](student_CW, teacher_CW, *kept, *shape, BLOCK=BLOCK, num_warps=WARPS)

    def combine(self) -> tuple[Norms, Tensor]:
        """Norms and KL, after all slices."""
        rows = self.stats.shape[1]
        out = torch.empty(7, rows, dtype=torch.float32, device=self.stats.device)
        size, blocks = self.stats[0].numel(), triton.next_power_of_2(self.blocks)
        _combine_kernel[(rows,)](self.stats, out, rows, self.blocks, size, BLOCKS=blocks, num_warps=4)
        return Norms(*out[:6]), out[6]

    def grad(self, coef_C: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of ``sum_c coef_c KL_c``, [C, V], after :meth:`combine`; once: one of 16 bits takes the place of what was kept. A row
        of coefficient 0 has gradient exactly 0, whatever its logits hold."""
        rows, vocab = self.prob_CV.shape
        same = self.prob_CV.element_size() == dtype.itemsize
        grad_CV = self.prob_CV.view(dtype) if same else torch.empty_like(self._kept[0], dtype=dtype)[:, :vocab]
        kept = (self.prob_CV, self.diff_CV, self.stats)
        shape = (vocab, grad_CV.stride(0), self.blocks, self.stats[0].numel())
        _grad_kernel[(self.blocks, rows)](*kept, coef_C, grad_CV, *shape, BLOCK=BLOCK, num_warps=max(BLOCK // 256, 1))
        return grad_CV
