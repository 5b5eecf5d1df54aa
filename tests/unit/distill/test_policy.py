"""Log-probabilities and entropy with gradient, PPO's term against verl's, and advantages by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parity import reference

from distill.test_head import H, make, relative_error, run
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip, leave_one_out, ppo_loss
from verl_opsd.errors import OpsdError


def forward(head, x, task):
    head.task = task
    task.policy = True
    loss = head(x).sum()
    head.task = None
    return loss, task.log_probs_N, task.entropy_N


@pytest.mark.parametrize("spec", [LossSpec(), LossSpec(divergence="jsd", beta=0.3)], ids=["dense", "autograd"])
@pytest.mark.parametrize("chunk", [2, 100])
def test_gradients_of_a_mixture_are_the_definition(spec: LossSpec, chunk: int) -> None:
    head, x, task = make(seed=1, loss=spec, chunk=chunk, anchor=None, anchor_coef_N=None)
    a, b = torch.linspace(-1, 1, 7), torch.linspace(0.5, -0.2, 7)
    a[3] = b[3] = 0.0
    loss, logp, entropy = forward(head, x, task)
    gx, gw = torch.autograd.grad(0.7 * loss + (a * logp).sum() + (b * entropy).sum(), [x, head.weight])
    x64, w64 = x.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    student = x64.reshape(-1, H)[task.index_N] @ w64.T
    teacher = task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T
    value = reference.DIVERGENCES[spec.divergence](reference.softmax(student), reference.softmax(teacher))
    full = reference.log_softmax(student)
    want_logp, want_entropy = full.gather(-1, task.labels_N[:, None])[:, 0], -(full.exp() * full).sum(-1)
    total = 0.7 * (task.coef_N.double() * value).sum() + (a * want_logp).sum() + (b * want_entropy).sum()
    want_gx, want_gw = torch.autograd.grad(total, [x64, w64])
    torch.testing.assert_close(logp.double(), want_logp, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-6)
    assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5


def test_gradcheck_in_float64() -> None:
    head, x, task = make(seed=2, dtype=torch.float64, n=3, anchor=None, anchor_coef_N=None)

    def outputs(x: torch.Tensor, w: torch.Tensor):
        head.weight = torch.nn.Parameter(w) if not isinstance(w, torch.nn.Parameter) else w
        return forward(head, x, task)

    assert torch.autograd.gradcheck(lambda x: outputs(x, head.weight), x, atol=1e-6)
    assert torch.autograd.gradcheck(lambda w: outputs(x.detach(), head.weight), head.weight, atol=1e-6, fast_mode=True)


def test_without_their_use_the_loss_alone_has_its_gradient() -> None:
    head, x, task = make(seed=3)
    _, want_gx, want_gw = run(head, x, task)
    loss, logp, _ = forward(head, x, task)
    gx, gw = torch.autograd.grad(loss, [x, head.weight], retain_graph=True)
    assert torch.equal(gx, want_gx) and torch.equal(gw, want_gw)
    assert not task.result.student_logprob_N.requires_grad
    only, _ = torch.autograd.grad(logp.sum(), [x, head.weight], retain_graph=True)  # without the loss
    assert only.abs().max() > 0 and not torch.equal(only, want_gx)
    with torch.no_grad():
        _, logp, _ = forward(head, x, task)
    assert not logp.requires_grad


def test_masked_positions_have_exactly_zero_gradient_whatever_they_hold() -> None:
    head, x, task = make(seed=4)
    at = int(task.index_N[2])
    with torch.no_grad():
        x.view(-1, H)[at] = torch.nan
    task.coef_N[2] = task.anchor_coef_N[2] = 0.0
    use = torch.ones(7)
    use[2] = 0.0
    _, logp, _ = forward(head, x, task)
    gx, gw = torch.autograd.grad(torch.where(use == 0, 0.0, use * logp).sum(), [x, head.weight])
    assert torch.isfinite(gx).all() and torch.isfinite(gw).all() and (gx.view(-1, H)[at] == 0).all()


def test_policy_needs_the_sampled_tokens() -> None:
    head, x, task = make(labels_N=None)
    with pytest.raises(OpsdError, match="sampled tokens"):
        forward(head, x, task)


def test_ppo_is_verls_in_value_and_gradient() -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    g = torch.Generator().manual_seed(0)
    behaviour = -3 * torch.rand(200, generator=g)
    logp = (behaviour + torch.randn(200, generator=g)).requires_grad_()
    logp.data[:2] = behaviour[:2] + torch.tensor([30.0, -30.0])
    advantage = torch.randn(200, generator=g)
    advantage[5] = 0.0
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=0.3, global_batch_info={})
    config.get = lambda name, default: 2.5 if name == "clip_ratio_c" else default
    vanilla = core.compute_policy_loss_vanilla
    want, _ = vanilla(behaviour[None], logp[None], advantage[None], torch.ones(1, 200), "token-mean", config)
    got = ppo_loss(logp, behaviour, advantage / 200, PpoClip(0.1, 0.3, 2.5))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(got, logp), torch.autograd.grad(want, logp), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_ppo_by_hand() -> None:
    """Ratios 2, 2, 1/2, 4 at advantages 1, -1, -1, -1, clip 0.2 and dual 3: 1.2 clipped; 2; 0.8 clipped; 3 clipped."""
    logp = torch.tensor([2.0, 2.0, 0.5, 4.0]).log().requires_grad_()
    loss = ppo_loss(logp, torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, -1.0]), PpoClip())
    (grad,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(-1.2 + 2 + 0.8 + 3)
    assert grad.tolist() == pytest.approx([0, 2, 0, 0])
    with pytest.raises(OpsdError, match="clip_ratio"):
        PpoClip(dual=1.0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_token_without_advantage_adds_nothing_whatever_it_holds(broken: float) -> None:
    logp = torch.tensor([broken, -1.0]).requires_grad_()
    loss = ppo_loss(logp, torch.tensor([-1.0, -1.0]), torch.tensor([0.0, 0.5]), PpoClip())
    (grad,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(-0.5) and grad.tolist() == pytest.approx([0.0, -0.5])


def test_advantages_by_hand() -> None:
    assert leave_one_out(torch.tensor([1.0, 0.0, 0.5])).tolist() == pytest.approx([0.75, -0.75, 0.0])
    with pytest.raises(OpsdError, match="two or more"):
        leave_one_out(torch.tensor([1.0]))
