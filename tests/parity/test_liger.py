"""Liger's chunked JSD, the part of it that is plain torch, on the same inputs; its kernels are in ``tests/gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity import inputs
from verl_opsd.distill.loss import LossSpec


@pytest.fixture(scope="module")
def liger() -> Any:
    """``LigerFusedLinearJSDLoss``."""
    return pytest.importorskip("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDLoss


def run(liger: Any, given: inputs.Inputs, **options: Any) -> tuple[float, torch.Tensor, torch.Tensor]:
    x, w = given.x.clone().requires_grad_(), given.weight.clone().requires_grad_()
    loss = liger(compiled=False, chunk_size=5, **options)(x, w, given.teacher, given.teacher_weight, given.labels)
    gx, gw = torch.autograd.grad(loss, [x, w])
    return loss.item(), gx, gw


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_ligers_in_value_and_gradient(liger, beta: float) -> None:
    given = inputs.make()
    want, want_gx, want_gw = run(liger, given, weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
    loss, gx, gw = inputs.ours(given, LossSpec(divergence="jsd", beta=beta))
    assert loss == pytest.approx(want, rel=1e-5)
    assert inputs.relative(gx, want_gx) < 1e-5 and inputs.relative(gw, want_gw) < 1e-5


def test_ligers_default_is_not_zero_for_an_identical_teacher(liger) -> None:
    """Half of its default loss is cross-entropy with the labels; ours is 0 however it is configured."""
    given = inputs.make()
    same = given._replace(teacher=given.x, teacher_weight=given.weight)
    default, *_ = run(liger, same)
    assert default > 1.0
    loss, gx, _ = inputs.ours(same, LossSpec(divergence="jsd", beta=0.5))
    assert abs(loss) < 1e-7 and gx.abs().max() < 1e-6


def test_recorded_example_in_bf16(liger) -> None:
    """Liger's plain-torch loss takes softmax and logarithm of bf16 logits in bf16; here logits become fp32 first."""
    given = inputs.make(n=32, hidden=64, vocab=2003, scale=0.3)
    want, want_gx, _ = inputs.ours(given, LossSpec(divergence="jsd", beta=0.5))
    rounded = inputs.Inputs(*(t.bfloat16() if t.is_floating_point() else t for t in given))
    loss, gx, _ = inputs.ours(rounded, LossSpec(divergence="jsd", beta=0.5))
    theirs, their_gx, _ = run(liger, rounded, weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5)
    assert abs(loss - want) < 0.02 * want and abs(theirs - want) > 2 * abs(loss - want)
    assert inputs.relative(gx, want_gx) < inputs.relative(their_gx, want_gx)
