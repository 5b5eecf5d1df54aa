"""What a layer that trains rounds on a device: gates, and a frozen layer with its adapter, against float64 at the 9B's widths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from verl_opsd.models import kernels

pytestmark = pytest.mark.gpu

#: Of a norm, if every number is rounded to bf16 once: a step is 2^-7 of the power of two below a number, so errors are 2^-7 / sqrt(12) of it
#: on average of squares: 2.3e-3 where all numbers are powers of two, 1.7e-3 as they come.
ONCE = 2.3e-3
#: 1.7e-3 twice, as they come: cuBLAS may cut a product of so few rows into parts, whose sums it rounds before it adds them.
TWICE = 2.6e-3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def near(found: Tensor | None, want: Tensor | None, limit: float = ONCE) -> None:
    assert found is not None and want is not None and found.dtype == torch.bfloat16
    assert kernels.relative(found.detach().double(), want.detach()) < limit


@pytest.mark.parametrize("rows", [1, 1000])
def test_silu_product_is_rounded_once_each_way(rows: int) -> None:
    from verl_opsd.models.gates_triton import SiluProduct

    gate, up, grad = (random(rows, 12288, seed=k) for k in range(3))
    exact = [t.double().requires_grad_() for t in (gate, up)]
    want = F.silu(exact[0]) * exact[1]
    want.backward(grad.double())
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    out = SiluProduct.apply(*(t * 1 for t in leaves))  # backward writes over its inputs
    near(out, want)
    out.backward(grad)
    for leaf, t in zip(leaves, exact, strict=True):
        near(leaf.grad, t.grad)


@pytest.mark.parametrize("rows", [9, 1000, 32007])
def test_gated_norm_is_rounded_once_each_way(rows: int) -> None:
    from verl_opsd.models.gates_triton import GatedNorm

    x, gate, grad = (random(rows, 128, seed=k) for k in range(3))
    weight = random(128, seed=3)
    exact = [t.double().requires_grad_() for t in (x, gate, weight)]
    want = F.rms_norm(exact[0], (128,), exact[2], 1e-6) * F.silu(exact[1])
    want.backward(grad.double())
    leaves = [t.clone().requires_grad_() for t in (x, gate, weight)]
    out = GatedNorm.apply(*leaves, 1e-6)
    near(out, want)
    out.backward(grad)
    for leaf, t in zip(leaves[:2], exact, strict=False):
        near(leaf.grad, t.grad)
    assert leaves[2].grad is not None and exact[2].grad is not None
    assert kernels.relative(leaves[2].grad.double(), exact[2].grad) < 2 * ONCE  # 128 numbers


def test_an_adapted_product_is_rounded_as_one_product_and_gradients_of_masters_are_not() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(4096, 12288, bias=False, device="cuda")).bfloat16()
    model = get_peft_model(base, LoraConfig(r=32, lora_alpha=64, target_modules=["0"]))
    for k, p in model.named_parameters():
        if p.requires_grad:
            p.data = p.data.float()
        if "lora_B" in k:
            p.data.normal_(0.0, 0.005)
    kernels.fuse_adapters(model)
    layer = model.get_base_model()[0]
    weight, a, b = (t.weight.detach().double() for t in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]))
    x, grad = random(500, 4096, seed=0), random(500, 12288, seed=1)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(leaf)
    out.backward(grad)
    exact, by = x.double(), grad.double()
    near(out, exact @ weight.T + 2 * exact @ a.T @ b.T, TWICE)
    near(leaf.grad, by @ weight + 2 * by @ b @ a, TWICE)
    for master, want in ((layer.lora_A, 2 * (by @ b).T @ exact), (layer.lora_B, 2 * by.T @ (exact @ a.T))):
        found = master["default"].weight.grad
        assert found.dtype == torch.float32 and kernels.relative(found.double(), want) < 3e-3
        assert (found != found.bfloat16()).double().mean() > 0.9
