"""The head: nn.Linear without a task, the float64 definition with one."""

from __future__ import annotations

import pytest
import torch
from parity import reference
from torch import nn

from verl_opsd.distill.head import HeadTask, LossPositionHead, install_head
from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError

H, V, B, T = 12, 57, 2, 9


class TinyLM(nn.Module):
    """Just an output embedding."""

    def __init__(self, bias: bool = False, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(V, H, dtype=dtype)
        self.lm_head = nn.Linear(H, V, bias=bias, dtype=dtype)
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def make(seed: int = 0, dtype: torch.dtype = torch.float32, n: int = 7, teacher_h: int = 5, **task):
    """A head, hidden states that require grad, and a loss task with an external teacher and an anchor."""
    g = torch.Generator().manual_seed(seed)
    model = TinyLM(dtype=dtype)
    head = install_head(model)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, H, generator=g, dtype=dtype))
    x = torch.randn(B, T, H, generator=g, dtype=dtype, requires_grad=True)
    index = torch.randperm(B * T, generator=g)[:n]
    task = {
        "kind": "loss",
        "index_N": index,
        "labels_N": torch.randint(V, (n,), generator=g),
        "teacher": Signal(hidden_NH=torch.randn(n, teacher_h, generator=g, dtype=dtype), head_id="big"),
        "teacher_weight_VH": torch.randn(V, teacher_h, generator=g, dtype=dtype),
        "coef_N": torch.rand(n, generator=g, dtype=dtype),
        "anchor": Signal(hidden_NH=torch.randn(n, H, generator=g, dtype=dtype), head_id="student"),
        "anchor_coef_N": 0.3 * torch.rand(n, generator=g, dtype=dtype),
        **task,
    }
    return head, x, HeadTask(**task)


def run(head: LossPositionHead, x: torch.Tensor, task: HeadTask):
    """(loss, grad of x, grad of weight)."""
    head.task = task
    out = head(x)
    head.task = None
    assert out.shape == (1, 1, 1)
    gx, gw = torch.autograd.grad(out.sum(), [x, head.weight])
    return out.item(), gx, gw


def expected(head: LossPositionHead, x: torch.Tensor, task: HeadTask):
    """The same from the float64 definition, by autograd on full logits."""
    x64 = x.detach().double().requires_grad_()
    w64 = head.weight.detach().double().requires_grad_()
    student = x64.reshape(-1, H)[task.index_N] @ w64.T
    w_teacher = w64.detach() if task.teacher_weight_VH is None else task.teacher_weight_VH.double()
    div = reference.reverse_kl(student, task.teacher.hidden_NH.double() @ w_teacher.T)
    loss = (task.coef_N.double() * div).sum()
    drift = None
    if task.anchor is not None:
        drift = reference.reverse_kl(student, task.anchor.hidden_NH.double() @ w64.detach().T)
        loss = loss + (task.anchor_coef_N.double() * drift).sum()
    gx, gw = torch.autograd.grad(loss, [x64, w64])
    return loss.item(), gx, gw, div, drift, reference.log_softmax(student)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_loss_and_gradients_are_the_definition(chunk: int) -> None:
    head, x, task = make(chunk=chunk)
    loss, gx, gw = run(head, x, task)
    want, want_gx, want_gw, div, drift, logp = expected(head, x, task)
    assert loss == pytest.approx(want, rel=1e-5)
    assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5
    torch.testing.assert_close(task.result.divergence_N.double(), div, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(task.result.anchor_N.double(), drift, rtol=1e-5, atol=1e-7)
    picked = logp.gather(-1, task.labels_N[:, None])[:, 0]
    torch.testing.assert_close(task.result.student_logprob_N.double(), picked, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.result.entropy_N.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-6)


def test_without_task_it_is_linear() -> None:
    head, x, _ = make()
    assert torch.equal(head(x), nn.functional.linear(x, head.weight))


def test_score_returns_hidden_states_at_the_positions() -> None:
    head, x, task = make()
    head.task = HeadTask(kind="score", index_N=task.index_N)
    assert torch.equal(head(x), x.reshape(-1, H)[task.index_N][None])


def test_no_position_keeps_the_graph_and_is_finite_when_hidden_states_are_not() -> None:
    empty = Signal(hidden_NH=torch.zeros(0, H), head_id="student")
    head, x, task = make(
        n=0, teacher=empty, teacher_weight_VH=None, anchor=empty, coef_N=torch.zeros(0), anchor_coef_N=torch.zeros(0)
    )
    x = torch.full_like(x, torch.inf).requires_grad_()
    loss, gx, gw = run(head, x, task)
    assert loss == 0.0 and torch.equal(gx, torch.zeros_like(gx)) and torch.equal(gw, torch.zeros_like(gw))


def test_install_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(OpsdError, match="bias"):
        install_head(TinyLM(bias=True))
    wrapped = TinyLM()
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    with pytest.raises(OpsdError, match="before PEFT"):
        install_head(wrapped)
