"""Gates of layers that train, one kernel each way: made in float32 from what products left, and rounded once.

Suffixes: M rows, V their width, P programs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

#: Numbers of one program.
SPAN = 2048


@triton.jit
def _silu_product_kernel(gate, up, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_product_backward_kernel(grad, gate, up, N, BLOCK: tl.constexpr):
    """Writes the gradients over the inputs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(gate + at, (d * u * (s + g * s * (1.0 - s))).to(gate.dtype.element_ty), mask=inside)
    tl.store(up + at, (d * g * s).to(up.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_kernel(x, gate, weight, out, eps, M, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None] * V + col[None, :]
    inside = (row < M)[:, None] & (col < V)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / V + eps)
    result = value * rstd[:, None] * w[None, :] * (g * tl.sigmoid(g))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_backward_kernel(
    grad,
    x,
    gate,
    weight,
    grad_x,
    grad_gate,
    grad_weight,
    eps,
    M,
    WEIGHT: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of the weight is a sum of each program's rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None] * V + col[None, :]
    inside = (row < M)[:, None] & (col < V)[None, :]
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / V + eps)[:, None]
    normed = value * rstd
    s = tl.sigmoid(g)
    scaled = d * w[None, :]
    tl.store(grad_gate + at, (scaled * normed * (s + g * s * (1.0 - s))).to(grad_gate.dtype.element_ty), mask=inside)
    by_normed = scaled * g * s
    if WEIGHT:
        by_weight = tl.sum(d * normed * g * s, 0)
        tl.store(grad_weight + tl.program_id(0).to(tl.int64) * V + col, by_weight, mask=col < V)
    mean = tl.sum(by_normed * normed, 1)[:, None] / V
    tl.store(grad_x + at, (rstd * (by_normed - normed * mean)).to(grad_x.dtype.element_ty), mask=inside)


class SiluProduct(torch.autograd.Function):
    """SiLU(gate) * up; backward writes its gradients over gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(up)
        with _device_of(out):
            _silu_product_kernel[(triton.cdiv(out.numel(), SPAN),)](gate, up, out, out.numel(), BLOCK=SPAN, num_warps=4)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        n = grad.numel()
        with _device_of(grad):
            _silu_product_backward_kernel[(triton.cdiv(n, SPAN),)](grad.contiguous(), gate, up, n, BLOCK=SPAN, num_warps=4)
        increment_version((gate, up))  # whoever reads them as gate and up again, as a second backward does, is refused
        return gate, up


class GatedNorm(torch.autograd.Function):
    """[M, V] RMS norm of each row times a weight times SiLU of the gate."""

    @staticmethod
    def forward(ctx: Any, x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        x_MV, gate_MV = x_MV.contiguous(), gate_MV.contiguous()
        out_MV = torch.empty_like(x_MV)
        grid, sizes = _rows(x_MV)
        with _device_of(x_MV):
            _gated_norm_kernel[grid](x_MV, gate_MV, weight_V, out_MV, eps, len(x_MV), **sizes, num_warps=4)
        ctx.save_for_backward(x_MV, gate_MV, weight_V)
        ctx.eps = eps
        return out_MV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MV: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_MV, gate_MV, weight_V = ctx.saved_tensors
        to_x_MV, to_gate_MV = torch.empty_like(x_MV), torch.empty_like(gate_MV)
        grid, sizes = _rows(x_MV)
        trained = ctx.needs_input_grad[2]
        parts_PV = x_MV.new_empty(grid[0] if trained else 1, x_MV.shape[1], dtype=torch.float32)
        with _device_of(x_MV):
            _gated_norm_backward_kernel[grid](
                grad_MV.contiguous(),
                x_MV,
                gate_MV,
                weight_V,
                to_x_MV,
                to_gate_MV,
                parts_PV,
                ctx.eps,
                len(x_MV),
                WEIGHT=trained,
                **sizes,
                num_warps=4,
            )
        return to_x_MV, to_gate_MV, parts_PV.sum(0).to(weight_V.dtype) if trained else None, None


def _rows(x_MV: Tensor) -> tuple[tuple[int], dict[str, int]]:
    rows, width = x_MV.shape
    block = triton.next_power_of_2(width)
    each = max(SPAN // block, 1)
    return (triton.cdiv(rows, each),), {"V": width, "ROWS": each, "BLOCK": block}


def _device_of(tensor: Tensor) -> Any:
    """Triton launches on the current device, whatever its tensors lie on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
