"""verl's ``forward_kl_topk`` on the same inputs: equal over the whole vocabulary, and where and why it differs below."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from verl_opsd.distill import divergence, support


@pytest.fixture(scope="module")
def verl_topk():
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")

    def run(student_NV: torch.Tensor, logq_NV: torch.Tensor, k: int) -> torch.Tensor:
        top = logq_NV.topk(k, dim=-1)
        config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False))
        nested = [torch.nested.as_nested_tensor([t], layout=torch.jagged) for t in (top.values, top.indices)]
        out = losses.compute_forward_kl_topk(student_NV[None], *nested, config, "thd")
        return out["distillation_losses"][0]

    return run


def test_equal_over_the_whole_vocabulary(verl_topk) -> None:
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(6, 40, generator=g), torch.randn(6, 40, generator=g)
    logq = teacher.log_softmax(-1)
    got = divergence.forward_kl(student.log_softmax(-1), logq)
    torch.testing.assert_close(got, verl_topk(student, logq, 40), rtol=1e-5, atol=1e-6)


def test_a_support_without_a_tail_is_no_divergence(verl_topk) -> None:
    """p = (.8, .1, .1), q = (.6, .3, .1), k = 1: verl sums q_0 log(q_0 / p_0) alone, which is below 0."""
    student, logq = torch.tensor([[0.8, 0.1, 0.1]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log()
    assert verl_topk(student, logq, 1).item() == pytest.approx(0.6 * math.log(0.6 / 0.8), rel=1e-5)
    ids = support.support_ids("teacher_topk", student, logq, torch.tensor([0]), 1)
    ours = divergence.forward_kl(support.with_tail(student, ids), support.with_tail(logq, ids))
    assert ours.item() == pytest.approx(0.6 * math.log(0.6 / 0.8) + 0.4 * math.log(0.4 / 0.2), rel=1e-5) and ours > 0
