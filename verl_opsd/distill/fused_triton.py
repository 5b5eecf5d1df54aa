"""Reverse KL over the full vocabulary from hidden states: both vocabulary products with the statistics in their epilogue.

No float32 logit reaches memory. A tile of both sides' logits is worked off while it is in registers, by the chain rule of KL over
blocks b of ``BLOCK`` tokens, with P, Q the blocks' masses and p, q the distributions within a block:

    KL(student || teacher) = KL(P || Q) + sum_b P_b KL(p_b || q_b)        every part is >= 0: nothing cancels

Values are float32 throughout. For the gradient alone two numbers a token are kept in 16 bits, p_b(v) and d_b(v) = log p_b - log q_b;
their rounding (2^-12) is below that of the gradient itself (bf16, 2^-9):

    dKL / ds_v = p_v (d_v - KL),   p_v = P_b p_b(v),   d_v - KL = d_b(v) + k_b

Shape suffixes: C loss positions of one chunk, S student and T teacher hidden size, V vocabulary, B blocks of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from verl_opsd.distill.dense import Norms

#: Tokens of a block of the chain rule.
BLOCK = 128
#: Rows, columns and depth of a tile of the products, warps and stages of their pipeline.
TILE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
#: Statistics of a block; the gradient's factors take the place of the first two.
STATS = 8


@triton.jit
def _kl_terms(p, q, d):
    """q - p + p d, by the series of exp(-d) - 1 + d (to d^7) where the sum would cancel."""
    series = 1.0 / 24 - d * (1.0 / 120 - d * (1.0 / 720 - d * (1.0 / 5040)))
    series = d * d * (0.5 - d * (1.0 / 6 - d * series))
    return tl.where(tl.abs(d) < 0.25, p * series, q - p + p * d)


@triton.jit
def _product(left, right, row, column, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        total = tl.dot(left.load([row, k]), right.load([column, k]).T, total, input_precision="ieee")
    return total


@triton.jit
def _block(s, t, row, column, prob, diff, stats, C, V, B, SIZE, BM: tl.constexpr, BLOCK: tl.constexpr):
    """One block of both sides' logits, [BM, BLOCK] in registers: statistics, and what the gradient needs. Exponentials are made twice,
    since there are no registers to keep them."""
    rows = (row + tl.arange(0, BM)).to(tl.int64)
    columns = column + tl.arange(0, BLOCK)
    inside = (columns < V)[None, :]
    s = tl.where(inside, s, -float("inf"))
    t = tl.where(inside, t, -float("inf"))
    s_max = tl.max(s, 1)
    t_max = tl.max(t, 1)
    both = tl.max(((s == s_max[:, None]) & (t == t_max[:, None])).to(tl.int32), 1)
    s_log = s_max + tl.log(tl.sum(tl.exp(s - s_max[:, None]), 1))
    t_log = t_max + tl.log(tl.sum(tl.exp(t - t_max[:, None]), 1))
    p = tl.exp(s - s_log[:, None])
    difference = tl.where(inside, s - t, 0.0)
    d = difference - (s_log - t_log)[:, None]
    kl = tl.sum(tl.where(inside, _kl_terms(p, tl.exp(t - t_log[:, None]), d), 0.0), 1)
    mean = tl.sum(p * difference, 1)
    entropy = s_log - tl.sum(tl.where(inside, p * s, 0.0), 1)
    at = rows[:, None] * V + columns[None, :]
    keep = (rows < C)[:, None] & inside
    tl.store(prob + at, p.to(prob.dtype.element_ty), mask=keep)
    tl.store(diff + at, d.to(diff.dtype.element_ty), mask=keep)
    place = stats + rows * B + column // BLOCK
    there = (rows < C) & (column < V)
    tl.store(place, s_log, mask=there)
    tl.store(place + SIZE, t_log, mask=there)
    tl.store(place + 2 * SIZE, kl, mask=there)
    tl.store(place + 3 * SIZE, mean, mask=there)
    tl.store(place + 4 * SIZE, entropy, mask=there)
    tl.store(place + 5 * SIZE, s_max, mask=there)
    tl.store(place + 6 * SIZE, t_max, mask=there)
    tl.store(place + 7 * SIZE, both.to(tl.float32), mask=there)


@triton.jit
def _tiles_kernel(
    student,
    student_weight,
    teacher,
    teacher_weight,
    scratch,
    prob,
    diff,
    stats,
    C,
    V,
    S,
    T,
    B,
    SIZE,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program works off every PROGRAMS-th tile. The teacher's waits in ``scratch``, which is small enough for the cache."""
    tl.static_assert(BN == 2 * BLOCK)
    program = tl.program_id(0)
    row_tiles = tl.cdiv(C, BM)
    tiles = row_tiles * tl.cdiv(V, BN)
    own = scratch + program * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BLOCK)[None, :]
    for tile in range(program, tiles, PROGRAMS):
        row = (tile % row_tiles) * BM
        column = (tile // row_tiles) * BN
        t = _product(teacher, teacher_weight, row, column, T, BM, BN, BK)
        first, second = tl.split(tl.permute(tl.reshape(t, (BM, 2, BLOCK)), (0, 2, 1)))
        tl.debug_barrier()  # the last tile's has been read
        tl.store(own, first)
        tl.store(own + BLOCK, second)
        s = _product(student, student_weight, row, column, S, BM, BN, BK)
        tl.debug_barrier()
        first, second = tl.split(tl.permute(tl.reshape(s, (BM, 2, BLOCK)), (0, 2, 1)))
        _block(first, tl.load(own), row, column, prob, diff, stats, C, V, B, SIZE, BM, BLOCK)
        _block(second, tl.load(own + BLOCK), row, column + BLOCK, prob, diff, stats, C, V, B, SIZE, BM, BLOCK)


@triton.jit
def _combine_kernel(stats, out, C, B, SIZE, BLOCKS: tl.constexpr):
    """The chain rule of one row: ``out`` gets both normalisers, mean difference, entropy, agreement and KL; the first two statistics
    become P_b and k_b."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    there = at < B
    place = stats + row.to(tl.int64) * B + at
    s_block = tl.load(place, mask=there, other=-float("inf"))
    t_block = tl.load(place + SIZE, mask=there, other=-float("inf"))
    s_top = tl.max(s_block, 0)
    t_top = tl.max(t_block, 0)
    s_log = s_top + tl.log(tl.sum(tl.exp(s_block - s_top), 0))
    t_log = t_top + tl.log(tl.sum(tl.exp(t_block - t_top), 0))
    mass = tl.exp(s_block - s_log)
    offset = tl.where(there, s_block - t_block, 0.0)
    between = _kl_terms(mass, tl.exp(t_block - t_log), offset - (s_log - t_log))
    within = mass * tl.load(place + 2 * SIZE, mask=there, other=0.0)
    mean = tl.sum(mass * tl.load(place + 3 * SIZE, mask=there, other=0.0), 0)
    entropy = tl.load(place + 4 * SIZE, mask=there, other=0.0) - tl.where(there, s_block - s_log, 0.0)
    s_max = tl.load(place + 5 * SIZE, mask=there, other=-float("inf"))
    t_max = tl.load(place + 6 * SIZE, mask=there, other=-float("inf"))
    both = tl.load(place + 7 * SIZE, mask=there, other=0.0)
    best = (s_max == tl.max(s_max, 0)) & (t_max == tl.max(t_max, 0))
    tl.store(out + row, s_log)
    tl.store(out + C + row, t_log)
    tl.store(out + 2 * C + row, mean - (s_log - t_log))
    tl.store(out + 3 * C + row, tl.sum(mass * entropy, 0))
    tl.store(out + 4 * C + row, tl.max(tl.where(best, both, 0.0), 0))
    tl.store(out + 5 * C + row, tl.sum(tl.where(there, between + within, 0.0), 0))
    tl.store(place, mass, mask=there)
    tl.store(place + SIZE, offset - mean, mask=there)


@triton.jit
def _grad_kernel(prob, diff, stats, coef, grad, V, B, SIZE, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < V
    place = stats + row * B + at // BLOCK
    c = tl.load(coef + row)
    p = tl.load(prob + row * V + at, mask=inside, other=0.0).to(tl.float32) * tl.load(place, mask=inside, other=0.0)
    d = tl.load(diff + row * V + at, mask=inside, other=0.0).to(tl.float32)
    d += tl.load(place + SIZE, mask=inside, other=0.0)
    g = tl.where(c == 0.0, 0.0, c * p * d)
    tl.store(grad + row * V + at, g.to(grad.dtype.element_ty), mask=inside)


def takes(hidden_CS: Tensor, weight_VS: Tensor, hidden_CT: Tensor, weight_VT: Tensor) -> bool:
    """Whether the kernels take these: bf16 on a GPU with bulk tensor copies (Hopper or newer), rows of 16-byte multiples."""
    given = (hidden_CS, weight_VS, hidden_CT, weight_VT)
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0
        for x in given
    ) and torch.cuda.get_device_capability(weight_VS.device) >= (9, 0)


class Tiles:
    """KL(student || teacher) of a chunk, and its gradient by the student's logits.

    Attributes:
        norms: as of ``dense.norms``; kl_C: nats. float32.
    """

    def __init__(
        self,
        hidden_CS: Tensor,
        weight_VS: Tensor,
        hidden_CT: Tensor,
        weight_VT: Tensor,
        keep: torch.dtype = torch.float16,
        tile: dict[str, Any] | None = None,
    ):
        """Contiguous, of one dtype. ``keep``: of the two numbers a token that the gradient needs."""
        tile = TILE if tile is None else tile
        rows, vocab = hidden_CS.shape[0], weight_VS.shape[0]
        device, blocks = weight_VS.device, triton.cdiv(vocab, BLOCK)
        bm, bn, bk = tile["BM"], tile["BN"], tile["BK"]
        tiles = triton.cdiv(rows, bm) * triton.cdiv(vocab, bn)
        programs = min(tiles, torch.cuda.get_device_properties(device).multi_processor_count if weight_VS.is_cuda else 3)
        self.prob_CV, self.diff_CV = torch.empty(2, rows, vocab, dtype=keep, device=device)
        self.stats = torch.empty(STATS, rows, blocks, dtype=torch.float32, device=device)
        scratch = torch.empty(programs, bm, bn, dtype=torch.float32, device=device)
        student, teacher = (TensorDescriptor.from_tensor(x, [bm, bk]) for x in (hidden_CS, hidden_CT))
        student_weight, teacher_weight = (TensorDescriptor.from_tensor(x, [bn, bk]) for x in (weight_VS, weight_VT))
        _tiles_kernel[(programs,)](
            student,
            student_weight,
            teacher,
            teacher_weight,
            scratch,
            self.prob_CV,
            self.diff_CV,
            self.stats,
            rows,
            vocab,
            hidden_CS.shape[1],
            hidden_CT.shape[1],
            blocks,
            rows * blocks,
            PROGRAMS=programs,
            BLOCK=BLOCK,
            **tile,
        )
        out = torch.empty(6, rows, dtype=torch.float32, device=device)
        _combine_kernel[(rows,)](
            self.stats, out, rows, blocks, rows * blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=8
        )
        self.norms, self.kl_C = Norms(*out[:5]), out[5]

    def grad(self, coef_C: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of ``sum_c coef_c KL_c``, [C, V]; once: a 16-bit one takes the place of what was kept. A row of coefficient 0 has
        gradient exactly 0, whatever its logits hold."""
        rows, vocab = self.prob_CV.shape
        same = self.prob_CV.element_size() == dtype.itemsize
        grad_CV = self.prob_CV.view(dtype) if same else torch.empty(rows, vocab, dtype=dtype, device=self.prob_CV.device)
        span = 4096
        _grad_kernel[(rows, triton.cdiv(vocab, span))](
            self.prob_CV,
            self.diff_CV,
            self.stats,
            coef_C,
            grad_CV,
            vocab,
            self.stats.shape[2],
            self.stats[0].numel(),
            SPAN=span,
            BLOCK=BLOCK,
            num_warps=8,
        )
        return grad_CV
