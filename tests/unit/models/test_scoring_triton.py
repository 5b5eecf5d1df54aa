"""The scoring kernels, interpreted on the CPU, against the definitions that run where there is no accelerator."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from verl_opsd.models import attention, scoring
from verl_opsd.models.gated_delta import TorchKernels
from verl_opsd.teachers import fp8

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip(
        "kernels are interpreted with TRITON_INTERPRET=1 and triton installed (3.6 with numpy below 2.4)",
        allow_module_level=True,
    )

from verl_opsd.models import scoring_triton
from verl_opsd.teachers import fp8_triton

#: Of 16 bits float16: the interpreter cuts bfloat16 off where a device rounds it.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_triton, "SPAN", 64)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for the last digit, which a sum in another order may change."""
    assert a.dtype == b.dtype and a.shape == b.shape
    limit = 2**-10 if a.dtype == torch.float16 else 1e-6
    torch.testing.assert_close(a, b, rtol=limit, atol=limit)
    if a.dtype == torch.float16:
        assert (a != b).float().mean() < 0.01


@DTYPES
@pytest.mark.parametrize("width", [64, 20, 5])
def test_a_sum_and_its_norm(dtype: torch.dtype, width: int) -> None:
    x, branch, weight = (
        random(2, 7, width, dtype=dtype),
        random(2, 7, width, dtype=dtype, seed=1),
        random(width, dtype=dtype, seed=2),
    )
    for added in (branch, None):
        total, normed = scoring_triton.add_norm(x, added, weight, 1e-6)
        want, want_normed = scoring.add_norm(x, added, weight, 1e-6)
        assert torch.equal(total, want)
        near(normed, want_normed)


@DTYPES
@pytest.mark.parametrize("rows, width", [(7, 16), (1, 16), (33, 12)])
def test_a_gated_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, gate, weight = (
        random(rows, width, dtype=dtype),
        random(rows, width, dtype=dtype, seed=1),
        random(width, dtype=dtype, seed=2),
    )
    near(scoring_triton.gated_norm(x, gate, weight, 1e-6), TorchKernels.gated_norm(x, gate, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("batch, tokens, heads", [(1, 5, 3), (2, 3, 4), (1, 1, 1)])
def test_heads_normed_turned_and_gated_out_of_one_product(dtype: torch.dtype, batch: int, tokens: int, heads: int) -> None:
    both = random(batch, tokens, heads, 32, dtype=dtype)
    query, gate = both.chunk(2, dim=-1)
    weight = random(16, dtype=dtype, seed=1)
    angle = random(batch, tokens, 4, dtype=torch.float32, seed=2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turned = scoring_triton.rope_norm(query, weight, cos, sin, 1e-6)
    near(turned, scoring.rope_norm(query, weight, cos, sin, 1e-6))
    for x in (turned, turned.transpose(1, 2).contiguous().transpose(1, 2)):
        near(scoring_triton.gate_heads(x, gate), scoring.gate_heads(x, gate))


@DTYPES
def test_two_attentions_joined(dtype: torch.dtype) -> None:
    early, late = (random(2, 3, 5, 16, dtype=dtype, seed=s) for s in (0, 1))
    sums = [20 * random(2, 3, 5, dtype=torch.float32, seed=s) for s in (2, 3)]
    for x in (early, early.transpose(1, 2).contiguous().transpose(1, 2)):
        near(scoring_triton.join(x, sums[0], late, sums[1]), attention.join(early, sums[0], late, sums[1]))


@DTYPES
@pytest.mark.parametrize("width", [64, 20, 33, 1])
def test_rows_and_their_scales_before_they_are_cast_to_e4m3(dtype: torch.dtype, width: int) -> None:
    """The interpreter's own cast to e4m3 is not the device's, so the numbers are looked at before it."""
    gate, up = (random(9, width, dtype=dtype, seed=s) * torch.logspace(-2, 1, 9)[:, None].to(dtype) for s in (0, 1))
    gate[3] = 0.0
    head, tail = fp8_triton.blocks(width)
    assert head <= width <= head + tail
    for gated, want in ((False, gate), (True, F.silu(gate) * up)):
        out, scale = torch.empty(9, width), torch.empty(9, 1)
        fp8_triton._quantize_silu_kernel[(9,)](gate, up, out, scale, width, GATED=gated, HEAD=head, TAIL=tail)
        torch.testing.assert_close(scale, fp8.quantize(want)[1], rtol=2**-10 if dtype == torch.float16 else 1e-6, atol=0.0)
        near((out * scale).to(dtype), want)
        value, scale = fp8_triton.quantize(gate, up if gated else None)
        assert value.dtype == torch.float8_e4m3fn and value.shape == (9, width) and scale.shape == (9, 1)
