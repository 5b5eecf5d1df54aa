"""The gates of layers that train, interpreted on the CPU, against their definitions in float64."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip(
        "kernels are interpreted with TRITON_INTERPRET=1 and triton installed (3.6 with numpy below 2.4)",
        allow_module_level=True,
    )

from verl_opsd.models import gates_triton

#: Of 16 bits float16: the interpreter cuts bfloat16 off where a device rounds it. A number that is rounded once is off by 2^-11 of itself
#: at most, and by less than 3e-4 of a norm.
DTYPES = pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-6), (torch.float16, 3e-4)])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates_triton, "SPAN", 64)


def near(found: Tensor | None, want: Tensor | None, dtype: torch.dtype, apart: float) -> None:
    assert found is not None and want is not None and found.dtype == dtype
    assert float((found.double() - want).norm() / want.norm()) < apart


@DTYPES
def test_silu_product_is_rounded_once_each_way(dtype: torch.dtype, apart: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = ((2 * torch.randn(2, 5, 31, generator=generator)).to(dtype) for _ in range(3))
    exact = [t.double().requires_grad_() for t in (gate, up)]
    want = F.silu(exact[0]) * exact[1]
    want.backward(grad.double())
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    made = [t * 1 for t in leaves]  # backward writes over them
    out = gates_triton.SiluProduct.apply(*made)
    near(out.detach(), want.detach(), dtype, apart)
    out.backward(grad)
    for leaf, t in zip(leaves, exact, strict=True):
        near(leaf.grad, t.grad, dtype, apart)


def test_gradients_over_the_inputs_are_never_read_as_inputs() -> None:
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    made = [t * 1 for t in (gate, up)]
    out = gates_triton.SiluProduct.apply(*made)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 16), (5, 24), (3, 128)])
def test_gated_norm_is_rounded_once_each_way(rows: int, width: int, dtype: torch.dtype, apart: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate, grad = (torch.randn(rows, width, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(width, generator=generator).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, gate, weight)]
    want = F.rms_norm(exact[0], (width,), exact[2], 1e-6) * F.silu(exact[1])
    want.backward(grad.double())
    leaves = [t.clone().requires_grad_() for t in (x, gate, weight)]
    out = gates_triton.GatedNorm.apply(*leaves, 1e-6)
    near(out.detach(), want.detach(), dtype, apart)
    out.backward(grad)
    for leaf, t in zip(leaves, exact, strict=True):
        near(leaf.grad, t.grad, dtype, apart)
    frozen = [t.clone().requires_grad_() for t in (x, gate)]
    gates_triton.GatedNorm.apply(*frozen, weight, 1e-6).backward(grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(frozen, leaves[:2], strict=True))  # type: ignore[arg-type]
