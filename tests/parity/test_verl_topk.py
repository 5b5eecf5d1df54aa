"""verl's ``forward_kl_topk`` on the same inputs: equal over the whole vocabulary, and where it differs below."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from parity import inputs
from verl_opsd.distill import divergence, support


@pytest.fixture(scope="module")
def verl_topk():
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")

    def run(student_NV: torch.Tensor, logq_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, gradient of their sum by the student's logits)."""
        top = logq_NV.topk(k, dim=-1)
        config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False))
        nested = [torch.nested.as_nested_tensor([t], layout=torch.jagged) for t in (top.values, top.indices)]
        leaf = student_NV.clone().requires_grad_()
        values = losses.compute_forward_kl_topk(leaf[None], *nested, config, "thd")["distillation_losses"][0]
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    return run


def ours(student_NV: torch.Tensor, logq_NV: torch.Tensor, k: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = student_NV.clone().requires_grad_()
    logp = leaf.log_softmax(-1)
    if k is None:
        values = divergence.forward_kl(logp, logq_NV)
    else:
        ids = support.support_ids("teacher_topk", logp, logq_NV, logq_NV.argmax(-1), k)
        values = divergence.forward_kl(support.with_tail(logp, ids), support.with_tail(logq_NV, ids))
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def test_equal_over_the_whole_vocabulary_in_value_and_gradient(verl_topk) -> None:
    g = torch.Generator().manual_seed(0)
    student, logq = torch.randn(6, 40, generator=g), torch.randn(6, 40, generator=g).log_softmax(-1)
    (want, want_grad), (got, grad) = verl_topk(student, logq, 40), ours(student, logq, None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert inputs.relative(grad, want_grad) < 1e-5
    # The gradient of KL(q || p) by the logits of p is p - q.
    assert inputs.relative(want_grad, student.softmax(-1) - logq.exp()) < 1e-5


def test_a_support_without_a_tail_is_no_divergence(verl_topk) -> None:
    """p = (.8, .1, .1), q = (.6, .3, .1), k = 1: verl sums q_0 log(q_0 / p_0) alone, which is below 0. Its gradient, q_0 (p - e_0),
    pushes token 0 up, which has too much mass already; with the bucket for the rest it is p - q there, and pulls it down."""
    student, logq = torch.tensor([[0.8, 0.1, 0.1]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log()
    (want, want_grad), (got, grad) = verl_topk(student, logq, 1), ours(student, logq, 1)
    assert want.item() == pytest.approx(0.6 * math.log(0.6 / 0.8), rel=1e-5)
    assert want_grad[0].tolist() == pytest.approx([0.6 * (0.8 - 1), 0.6 * 0.1, 0.6 * 0.1], rel=1e-4)
    assert got.item() == pytest.approx(0.6 * math.log(0.6 / 0.8) + 0.4 * math.log(0.4 / 0.2), rel=1e-5) and got > 0
    assert grad[0].tolist() == pytest.approx([0.8 - 0.6, -0.1, -0.1], rel=1e-4)
