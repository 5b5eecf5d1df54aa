"""Liger's fused JSD kernels against the head on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import inputs

from verl_opsd.distill.loss import LossSpec

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def liger() -> Any:
    """``LigerFusedLinearJSD``; needs Triton, so it is imported where there is an accelerator only."""
    return pytest.importorskip("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD


def run(liger: Any, given: inputs.Inputs, beta: float) -> tuple[float, torch.Tensor]:
    x = given.x.clone().requires_grad_()
    loss = liger(jsd_beta=beta)(x, given.weight, given.teacher, given.teacher_weight, given.labels)
    (gx,) = torch.autograd.grad(loss, x)
    return loss.item(), gx


@pytest.mark.parametrize(
    "spec",
    [LossSpec(divergence="jsd", beta=0.5), LossSpec(divergence="jsd", beta=0.1), LossSpec(), LossSpec("forward_kl")],
    ids=str,
)
def test_head_is_liger_in_fp32(liger: Any, spec: LossSpec) -> None:
    given = inputs.make(n=64, hidden=128, vocab=5003, device="cuda", scale=0.3)
    beta = {"reverse_kl": 1.0, "forward_kl": 0.0}.get(spec.divergence, spec.beta)
    want, want_gx = run(liger, given, beta)
    loss, gx, _ = inputs.ours(given, spec, chunk=16)
    assert loss == pytest.approx(want, rel=1e-5)
    assert inputs.relative(gx, want_gx) < 1e-5


def test_head_in_bf16_is_as_near_to_fp32_as_liger_is(liger: Any) -> None:
    given = inputs.make(n=64, hidden=128, vocab=5003, device="cuda", scale=0.3)
    rounded = inputs.Inputs(*(t.bfloat16() if t.is_floating_point() else t for t in given))
    exact = inputs.Inputs(*(t.float() if t.is_floating_point() else t for t in rounded))
    spec = LossSpec(divergence="jsd", beta=0.5)
    want, want_gx, _ = inputs.ours(exact, spec)
    (loss, gx, _), (theirs, their_gx) = inputs.ours(rounded, spec, chunk=16), run(liger, rounded, 0.5)
    assert loss == pytest.approx(want, rel=1e-4) and theirs == pytest.approx(want, rel=1e-3)
    assert inputs.relative(gx, want_gx) < 1.2 * inputs.relative(their_gx, want_gx) + 1e-3
