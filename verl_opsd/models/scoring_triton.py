"""What a layer of Qwen3.5 does beside products, attention and the delta rule, one kernel each, forward only; the definitions are those of
``models.scoring`` and ``models.attention``, and every rounding to the tensors' dtype is theirs.

Suffixes: B batch, T tokens, A heads, D head dimension, R its rotated part, H hidden size, M rows, V their width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers of one program where rows are short.
SPAN = 4096


@triton.jit
def _add_rms_norm_kernel(x, branch, total, out, weight, eps, H, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr):
    """One row of a sum and its norm."""
    row = tl.program_id(0).to(tl.int64) * H
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if HAS_BRANCH:
        more = tl.load(branch + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + at, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    gain = 1.0 + tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, branch: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`verl_opsd.models.scoring.add_norm`."""
    x, size = x.contiguous(), x.shape[-1]
    out, total = torch.empty_like(x), x if branch is None else torch.empty_like(x)
    other = x if branch is None else branch.contiguous()
    block = triton.next_power_of_2(size)
    warps = min(max(block // 1024, 1), 16)
    _add_rms_norm_kernel[(x.numel() // size,)](
        x, other, total, out, weight_H, eps, size, HAS_BRANCH=branch is not None, BLOCK=block, num_warps=warps
    )
    return total, out


@triton.jit
def _gated_rms_norm_kernel(x, gate, out, weight, eps, M, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows of a norm times SiLU of a gate."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None] * V + col[None, :]
    inside = (row < M)[:, None] & (col < V)[None, :]
    dtype = out.dtype.element_ty
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / V + eps)
    gain = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
    normed = ((value * scale[:, None]).to(dtype).to(tl.float32) * gain[None, :]).to(dtype).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * (g * tl.sigmoid(g))).to(dtype), mask=inside)


def gated_norm(x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """See :meth:`verl_opsd.models.gated_delta.Kernels.gated_norm`."""
    x_MV, gate_MV = x_MV.contiguous(), gate_MV.contiguous()
    out_MV = torch.empty_like(x_MV)
    rows, width = x_MV.shape
    block = triton.next_power_of_2(width)
    each = max(SPAN // block, 1)
    _gated_rms_norm_kernel[(triton.cdiv(rows, each),)](
        x_MV, gate_MV, out_MV, weight_V, eps, rows, V=width, ROWS=each, BLOCK=block, num_warps=4
    )
    return out_MV


@triton.jit
def _rope_rms_norm_kernel(
    x,
    out,
    weight,
    cos,
    sin,
    eps,
    stride_t,
    stride_a,
    T,
    A,
    M,
    D: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of some tokens: their norm, and the rotation of its first R numbers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // A).to(tl.int64)
    head = (row % A).to(tl.int64)
    b = (row // A // T).to(tl.int64)
    t = (row // A % T).to(tl.int64)
    col = tl.arange(0, BLOCK)
    some = (row < M)[:, None]
    inside = some & (col < D)[None, :]
    turned = col < R
    partner = tl.where(col < R // 2, col + R // 2, col - R // 2)
    base = x + (token * stride_t + head * stride_a)[:, None]
    dtype = out.dtype.element_ty
    value = tl.load(base + col[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    gain = 1.0 + tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    normed = (value * scale * gain[None, :]).to(dtype)
    other = tl.load(base + partner[None, :], mask=some & turned[None, :], other=0.0).to(tl.float32)
    other_gain = 1.0 + tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32)
    other = (other * scale * other_gain[None, :]).to(dtype).to(tl.float32)
    other = tl.where((col < R // 2)[None, :], -other, other)
    angle = token[:, None] * R + col[None, :]
    c = tl.load(cos + angle, mask=some & turned[None, :], other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=some & turned[None, :], other=0.0).to(tl.float32)
    along = (normed.to(tl.float32) * c).to(dtype).to(tl.float32)
    across = (other * s).to(dtype).to(tl.float32)
    result = tl.where(turned[None, :], (along + across).to(dtype), normed)
    place = (b * A + head) * T + t
    tl.store(out + place[:, None] * D + col[None, :], result, mask=inside)


def rope_norm(x_BTAD: Tensor, weight_D: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, eps: float) -> Tensor:
    """See :func:`verl_opsd.models.scoring.rope_norm`; tokens of ``x`` lie one after another at one stride, a head's numbers side by side."""
    batch, tokens, heads, size = x_BTAD.shape
    assert x_BTAD.stride(3) == 1 and (batch == 1 or x_BTAD.stride(0) == tokens * x_BTAD.stride(1))
    out_BATD = x_BTAD.new_empty(batch, heads, tokens, size)
    cos_BTR, sin_BTR = (t.expand(batch, -1, -1).contiguous() for t in (cos_BTR, sin_BTR))
    rows, block = batch * tokens * heads, triton.next_power_of_2(size)
    each = max(SPAN // (2 * block), 1)  # a program holds two numbers for each
    _rope_rms_norm_kernel[(triton.cdiv(rows, each),)](
        x_BTAD,
        out_BATD,
        weight_D,
        cos_BTR,
        sin_BTR,
        eps,
        x_BTAD.stride(1),
        x_BTAD.stride(2),
        tokens,
        heads,
        rows,
        D=size,
        R=cos_BTR.shape[-1],
        ROWS=each,
        BLOCK=block,
        num_warps=4,
    )
    return out_BATD


@triton.jit
def _sigmoid_gate_kernel(
    x,
    gate,
    out,
    x_b,
    x_a,
    x_t,
    gate_t,
    gate_a,
    T,
    A,
    M,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of some tokens, times the sigmoid of their gates."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // A).to(tl.int64)
    head = (row % A).to(tl.int64)
    b = (row // A // T).to(tl.int64)
    t = (row // A % T).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (col < D)[None, :]
    dtype = out.dtype.element_ty
    here = b * x_b + head * x_a + t * x_t
    value = tl.load(x + here[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + (token * gate_t + head * gate_a)[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(g).to(dtype).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * D + col[None, :], (value * opened).to(dtype), mask=inside)


def gate_heads(x_BATD: Tensor, gate_BTAD: Tensor) -> Tensor:
    """See :func:`verl_opsd.models.scoring.gate_heads`; tokens of ``gate`` lie one after another at one stride, a head's numbers of both side by
    side."""
    batch, heads, tokens, size = x_BATD.shape
    assert x_BATD.stride(3) == gate_BTAD.stride(3) == 1 and (batch == 1 or gate_BTAD.stride(0) == tokens * gate_BTAD.stride(1))
    out = x_BATD.new_empty(batch, tokens, heads * size)
    rows, block = batch * tokens * heads, triton.next_power_of_2(size)
    each = max(SPAN // block, 1)
    _sigmoid_gate_kernel[(triton.cdiv(rows, each),)](
        x_BATD,
        gate_BTAD,
        out,
        *x_BATD.stride()[:3],
        gate_BTAD.stride(1),
        gate_BTAD.stride(2),
        tokens,
        heads,
        rows,
        D=size,
        ROWS=each,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _join_kernel(
    early,
    early_sum,
    late,
    late_sum,
    out,
    early_b,
    early_a,
    early_t,
    late_b,
    late_a,
    late_t,
    T,
    A,
    M,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows of two outputs, weighed by the sums of their exponentials."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = (row % T).to(tl.int64)
    head = (row // T % A).to(tl.int64)
    b = (row // T // A).to(tl.int64)
    col = tl.arange(0, BLOCK)
    some = row < M
    inside = some[:, None] & (col < D)[None, :]
    difference = tl.load(early_sum + row, mask=some, other=0.0) - tl.load(late_sum + row, mask=some, other=0.0)
    share = tl.sigmoid(difference.to(tl.float32))[:, None]
    first = tl.load(early + (b * early_b + head * early_a + t * early_t)[:, None] + col[None, :], mask=inside, other=0.0)
    last = tl.load(late + (b * late_b + head * late_a + t * late_t)[:, None] + col[None, :], mask=inside, other=0.0)
    change = first.to(tl.float32) - last.to(tl.float32)
    joined = tl.where(share < 0.5, last.to(tl.float32) + share * change, first.to(tl.float32) - (1.0 - share) * change)
    tl.store(out + row.to(tl.int64)[:, None] * D + col[None, :], joined.to(out.dtype.element_ty), mask=inside)


def join(early_BATD: Tensor, early_sum_BAT: Tensor, late_BATD: Tensor, late_sum_BAT: Tensor) -> Tensor:
    """See :func:`verl_opsd.models.attention.join`; a head's numbers lie side by side."""
    batch, heads, tokens, size = late_BATD.shape
    assert early_BATD.stride(3) == late_BATD.stride(3) == 1
    out_BATD = late_BATD.new_empty(batch, heads, tokens, size)
    rows, block = batch * heads * tokens, triton.next_power_of_2(size)
    each = max(SPAN // block, 1)
    _join_kernel[(triton.cdiv(rows, each),)](
        early_BATD,
        early_sum_BAT.contiguous(),
        late_BATD,
        late_sum_BAT.contiguous(),
        out_BATD,
        *early_BATD.stride()[:3],
        *late_BATD.stride()[:3],
        tokens,
        heads,
        rows,
        D=size,
        ROWS=each,
        BLOCK=block,
        num_warps=4,
    )
    return out_BATD
