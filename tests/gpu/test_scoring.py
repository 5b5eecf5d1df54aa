"""On an accelerator: the kernels of scoring layers and of FP8 at the 27B's shapes, against the definitions the CPU runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from verl_opsd.models import attention, scoring
from verl_opsd.models.gated_delta import TorchKernels
from verl_opsd.teachers import fp8

pytestmark = pytest.mark.gpu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def near(got: torch.Tensor, want: torch.Tensor, operand: float = 0.5) -> None:
    """bf16 on the host and on the device differ in the last digit, and seldom; where two products of size ``operand`` nearly cancel, in
    the last digit of those."""
    assert got.is_cuda and got.dtype == torch.bfloat16 and got.shape == want.shape
    torch.testing.assert_close(got.cpu(), want, rtol=2**-6, atol=operand * 2**-7)
    assert (got.cpu() != want).float().mean() < max(0.02, operand / 160)


@pytest.mark.parametrize("tokens", [1, 300])
def test_kernels_are_the_definitions(tokens: int) -> None:
    from verl_opsd.models import scoring_triton

    x, branch, weight = random(1, tokens, 5120), random(1, tokens, 5120, seed=1), random(5120, seed=2)
    total, normed = scoring.add_norm(x, branch, weight, 1e-6)
    want, want_normed = scoring.add_norm(x.cpu(), branch.cpu(), weight.cpu(), 1e-6)
    assert torch.equal(total.cpu(), want)
    near(normed, want_normed)
    near(scoring.add_norm(x, None, weight, 1e-6)[1], scoring.add_norm(x.cpu(), None, weight.cpu(), 1e-6)[1])

    x, gate, weight = random(tokens * 48, 128), random(tokens * 48, 128, seed=1), random(128, seed=2)
    near(scoring_triton.gated_norm(x, gate, weight, 1e-6), TorchKernels.gated_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-6))

    both, weight = random(1, tokens, 24, 512), random(256, seed=1)
    query, gate = both.chunk(2, dim=-1)
    query_there, gate_there = both.cpu().chunk(2, dim=-1)
    angle = torch.arange(tokens)[None, :, None] * torch.logspace(0, -6, 32).repeat(2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    turned = scoring.rope_norm(query, weight, cos.cuda(), sin.cuda(), 1e-6)
    near(turned, scoring.rope_norm(query_there, weight.cpu(), cos, sin, 1e-6), operand=8.0)
    near(scoring.gate_heads(turned, gate), scoring.gate_heads(turned.cpu(), gate_there))

    late, sums = random(1, 24, tokens, 256, seed=3), [8 * random(1, 24, tokens, seed=s).float() for s in (4, 5)]
    want = attention.join(turned.cpu(), sums[0].cpu(), late.cpu(), sums[1].cpu())
    near(attention.join(turned, sums[0], late, sums[1]), want)


@pytest.mark.parametrize("width", [5120, 6144, 17408])
def test_rows_are_rounded_to_e4m3_as_defined(width: int) -> None:
    gate, up = (random(40, width, seed=s) * torch.logspace(-3, 3, 40, device="cuda")[:, None].bfloat16() for s in (0, 1))
    for got, want in (
        (fp8.rounded(gate), fp8.quantize(gate.cpu())),
        (fp8.rounded(gate, up), fp8.quantize(F.silu(gate.cpu()) * up.cpu())),
    ):
        assert got[0].is_cuda and got[0].dtype == torch.float8_e4m3fn
        torch.testing.assert_close(got[1].cpu(), want[1], rtol=2**-7, atol=0.0)
        difference = (got[0].float() * got[1]).cpu() - want[0].float() * want[1]
        # Between two steps of e4m3 a number may go either way: a step is at most 1/8 of it.
        assert bool((difference.abs() <= (want[0].float() * want[1]).abs() / 7 + want[1] * 2**-8).all())
        assert (difference.abs() > 2**-6 * (want[0].float() * want[1]).abs()).float().mean() < 0.02
