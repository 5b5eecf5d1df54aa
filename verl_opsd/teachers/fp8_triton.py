"""``fp8.quantize`` in one kernel, with the gated MLP's SiLU(gate) * up where that is what is rounded.

Suffixes: M rows, I their width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


@triton.jit
def _value(x, up, at, inside, GATED: tl.constexpr):
    """What is rounded: x, or SiLU(x) * up."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if GATED:
        gate = value.to(tl.float32)
        opened = (gate * tl.sigmoid(gate)).to(value.dtype).to(tl.float32)
        value = (opened * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _quantize_silu_kernel(x, up, out, scale, WIDTH, GATED: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """One row, in two blocks: its width is seldom near a power of two."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL)
    first = _value(x, up, row * WIDTH + head, head < WIDTH, GATED)
    last = _value(x, up, row * WIDTH + tail, tail < WIDTH, GATED)
    largest = tl.maximum(tl.max(tl.abs(first.to(tl.float32)), 0), tl.max(tl.abs(last.to(tl.float32)), 0))
    step = tl.maximum(largest, 1e-12) / LARGEST
    tl.store(scale + row, step)
    tl.store(out + row * WIDTH + head, (first.to(tl.float32) / step).to(out.dtype.element_ty), mask=head < WIDTH)
    tl.store(out + row * WIDTH + tail, (last.to(tl.float32) / step).to(out.dtype.element_ty), mask=tail < WIDTH)


def blocks(width: int) -> tuple[int, int]:
    """The largest power of two in ``width``, and the smallest that holds the rest."""
    head = 1 << (width.bit_length() - 1)
    return head, triton.next_power_of_2(max(width - head, 1))


def quantize(x_MI: Tensor, up_MI: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 [M, I] and float32 [M, 1]; with ``up`` of SiLU(x) * up, rounded to the dtype of ``x`` where torch rounds."""
    x_MI = x_MI.contiguous()
    other = x_MI if up_MI is None else up_MI.contiguous()
    rows, width = x_MI.shape
    out_MI = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_MI.device)
    scale_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x_MI.device)
    head, tail = blocks(width)
    warps = min(max(head // 1024, 1), 16)
    _quantize_silu_kernel[(rows,)](
        x_MI, other, out_MI, scale_M1, width, GATED=up_MI is not None, HEAD=head, TAIL=tail, num_warps=warps
    )
    return out_MI, scale_M1
