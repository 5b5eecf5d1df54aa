"""The anchor: value and gradient by every divergence on every support, with positions, weights and a denominator of its own."""

from __future__ import annotations

import pytest
import torch
from parity import reference
from torch import Tensor

from distill.test_head import SPECS, H, V, label, make, relative_error, run
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import Clip, SurprisalGate
from verl_opsd.errors import OpsdError

N = 7
#: Positions of the divergence and of the anchor: both, either, none.
COEF = torch.tensor([0.5, 0.0, 0.25, 0.1, 0.0, 0.15, 0.0])
ANCHOR = torch.tensor([0.02, 0.03, 0.0, 0.04, 0.01, 0.0, 0.0])


def by_definition(head, x: Tensor, task, teacher_logits: Tensor) -> tuple[float, Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient of x, of the weight, divergences, drift) in float64; the support is the teacher's and the student's."""
    x64, w64 = x.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    p = reference.softmax(x64.reshape(-1, H)[task.index_N] @ w64.T)
    q = reference.softmax(teacher_logits)
    b = reference.softmax(task.anchor.hidden_NH.double() @ w64.detach().T)
    function, spec = reference.DIVERGENCES[task.loss.divergence], task.loss
    div, drift = [], []
    for i in range(N):
        if spec.support == "full":
            ids = list(range(V))
        elif spec.support == "signal":
            ids = [t for t in task.teacher.ids_NK[i].tolist() if t >= 0]
        else:
            ids = reference.support_of(spec.support, p[i].detach(), q[i], int(task.labels_N[i]), spec.top_k)
        mine = reference.outcomes(p[i], ids)
        div.append(function(mine, reference.outcomes(q[i], ids)))
        drift.append(function(mine, reference.outcomes(b[i], ids)))
    div, drift = torch.stack(div), torch.stack(drift)
    loss = (COEF.double() * div).sum() + (ANCHOR.double() * drift).sum()
    gx, gw = torch.autograd.grad(loss, [x64, w64])
    return loss.item(), gx, gw, div.detach(), drift.detach()


def check(spec: LossSpec, chunk: int) -> None:
    head, x, task = make(seed=11, loss=spec, chunk=chunk, coef_N=COEF.clone(), anchor_coef_N=ANCHOR.clone())
    teacher = task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T
    if spec.support == "signal":
        logq = reference.log_softmax(teacher)
        ids = torch.full((N, 5), -1)
        logprobs, tail = torch.full((N, 5), -torch.inf), torch.zeros(N)
        for i in range(N):
            chosen = reference.support_of("teacher_topk", logq[i].exp(), logq[i].exp(), int(task.labels_N[i]), 4)
            ids[i, : len(chosen)], logprobs[i, : len(chosen)] = torch.tensor(chosen), logq[i, chosen].float()
            tail[i] = reference.outcomes(logq[i].exp(), chosen)[-1].log().float()
        task.teacher, task.teacher_weight_VH = Signal(ids_NK=ids, logprobs_NK=logprobs, tail_N=tail), None
    want, want_gx, want_gw, div, drift = by_definition(head, x, task, teacher)
    loss, gx, gw = run(head, x, task)
    assert loss == pytest.approx(want, rel=1e-5)
    assert relative_error(gw, want_gw) < 1e-5
    rows, want_rows = gx.reshape(-1, H)[task.index_N], want_gx.reshape(-1, H)[task.index_N]
    assert ((rows - want_rows).norm(dim=-1) <= 1e-5 * want_rows.norm(dim=-1) + 1e-8).all()
    assert (rows != 0).any(-1).tolist() == ((COEF != 0) | (ANCHOR != 0)).tolist()
    torch.testing.assert_close(task.result.divergence_N.double(), div, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(task.result.anchor_N.double(), drift, rtol=1e-5, atol=1e-7)


ALL = [*SPECS, *(LossSpec(name, support="signal", **reference.PARAMETERS.get(name, {})) for name in reference.DIVERGENCES)]


@pytest.mark.parametrize("spec", ALL, ids=label)
@pytest.mark.parametrize("chunk", [3, 100])
def test_value_and_gradient_are_the_definition(spec: LossSpec, chunk: int) -> None:
    check(spec, chunk)


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3], SPECS[9]], ids=label)
def test_data_dependent_weights_are_not_the_anchors(spec: LossSpec) -> None:
    """Under weights that take everything from the divergence, loss and gradient are the anchor's alone."""
    nothing = (SurprisalGate(50.0, 50.0), Clip(1e-9))
    head, x, task = make(seed=12, loss=LossSpec(**{**spec.__dict__, "weights": nothing}), coef_N=COEF, anchor_coef_N=ANCHOR)
    loss, gx, _ = run(head, x, task)
    head, x, task = make(seed=12, loss=spec, coef_N=torch.zeros(N), anchor_coef_N=ANCHOR)
    want, want_gx, _ = run(head, x, task)
    assert want > 0 and loss == pytest.approx(want, rel=1e-6)
    assert relative_error(gx, want_gx.double()) < 1e-5


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3], SPECS[7]], ids=label)
def test_the_anchor_pulls_towards_the_base(spec: LossSpec) -> None:
    """A step against the gradient of the anchor alone brings the student nearer to its base."""
    head, x, task = make(seed=13, loss=spec, coef_N=torch.zeros(N), anchor_coef_N=torch.full((N,), 1 / N))
    _, gx, _ = run(head, x, task)
    before = task.result.anchor_N.mean()
    with torch.no_grad():
        x -= 0.05 * gx / gx.norm()
    run(head, x, task)
    assert task.result.anchor_N.mean() < before


def test_anchor_under_a_weight_of_its_own() -> None:
    """The base of full-parameter training: neither the head's gradient nor its movement reaches it."""
    g = torch.Generator().manual_seed(9)
    base = {"anchor": Signal(hidden_NH=torch.randn(7, 4, generator=g), head_id="initial")}
    for spec in (LossSpec(), LossSpec(divergence="forward_kl")):
        head, x, task = make(seed=6, chunk=3, loss=spec, **base, anchor_weight_VH=torch.randn(V, 4, generator=g))
        loss, gx, gw = run(head, x, task)
        x64, w64 = x.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
        p = reference.softmax(x64.reshape(-1, H)[task.index_N] @ w64.T)
        q = reference.softmax(task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T)
        b = reference.softmax(task.anchor.hidden_NH.double() @ task.anchor_weight_VH.double().T)
        function = reference.DIVERGENCES[spec.divergence]
        want = (task.coef_N * function(p, q) + task.anchor_coef_N * function(p, b)).sum()
        want_gx, want_gw = torch.autograd.grad(want, [x64, w64])
        assert loss == pytest.approx(want.item(), rel=1e-5)
        assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5
        torch.testing.assert_close(task.result.anchor_N.double(), function(p, b).detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "parts",
    [
        {"anchor_weight_VH": torch.zeros(V, H)},
        {"anchor": Signal(hidden_NH=torch.zeros(7, 4), head_id="initial"), "anchor_weight_VH": torch.zeros(V + 1, 4)},
        {"anchor": None, "anchor_coef_N": None, "anchor_weight_VH": torch.zeros(V, H)},
    ],
    ids=["own head and a weight", "another vocabulary", "no anchor"],
)
def test_contradicting_anchors_are_refused(parts: dict) -> None:
    head, x, task = make(**parts)
    head.task = task
    with pytest.raises(OpsdError, match="anchor"):
        head(x)
