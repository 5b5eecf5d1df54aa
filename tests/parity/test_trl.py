"""TRL's generalised JSD on the same inputs: equal where both mean the same, and where they differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parity import inputs, reference
from verl_opsd.distill import divergence
from verl_opsd.distill.loss import LossSpec
from verl_opsd.errors import OpsdError


@pytest.fixture(scope="module")
def trl_jsd() -> Callable[..., Tensor]:
    """``(student logits [B, T, V], teacher logits, labels=None, beta=0.5, reduction="batchmean") -> loss``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    return gkd.GKDTrainer.generalized_jsd_loss


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_trls_in_value_and_gradient(trl_jsd, beta: float) -> None:
    given = inputs.make()
    x, w = given.x.clone().requires_grad_(), given.weight.clone().requires_grad_()
    theirs = trl_jsd((x @ w.T)[None], (given.teacher @ given.teacher_weight.T)[None], given.labels[None], beta=beta)
    want_gx, want_gw = torch.autograd.grad(theirs, [x, w])
    loss, gx, gw = inputs.ours(given, LossSpec(divergence="jsd", beta=beta))
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    assert inputs.relative(gx, want_gx) < 1e-5 and inputs.relative(gw, want_gw) < 1e-5


@pytest.mark.parametrize(("beta", "name"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_trl_gives_the_ends_of_beta_another_meaning_which_is_refused_here(trl_jsd, beta: float, name: str) -> None:
    """At 0 and 1 TRL's loss is forward and reverse KL; its own formula, and the definition, tend to 0 there."""
    given = inputs.make(scale=0.3)
    student, teacher = given.x @ given.weight.T, given.teacher @ given.teacher_weight.T
    theirs = trl_jsd(student[None], teacher[None], given.labels[None], beta=beta)
    loss, _, _ = inputs.ours(given, LossSpec(divergence=name))
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    near = trl_jsd(student.double()[None], teacher.double()[None], given.labels[None], beta=abs(beta - 1e-6)).item()
    assert near == pytest.approx(1e-6 * loss, rel=1e-2)  # a million times less, one millionth away
    with pytest.raises(OpsdError, match="beta"):
        LossSpec(divergence="jsd", beta=beta)


def test_without_labels_trl_divides_by_sequences_and_not_by_tokens(trl_jsd) -> None:
    given = inputs.make()
    student, teacher = given.x @ given.weight.T, given.teacher @ given.teacher_weight.T
    every = given._replace(labels=torch.zeros_like(given.labels))
    loss, _, _ = inputs.ours(every, LossSpec(divergence="jsd", beta=0.5))
    theirs = trl_jsd(student.view(3, 4, -1), teacher.view(3, 4, -1))
    assert theirs.item() == pytest.approx(4 * loss, rel=1e-5)  # 3 sequences of 4 tokens


@pytest.mark.parametrize(("beta", "name"), [(1.0, "reverse_kl"), (0.5, "jsd")])
def test_recorded_example_of_a_small_divergence_in_fp32(trl_jsd, beta: float, name: str) -> None:
    """Logits that differ by 1e-3 (a student that has nearly learnt): the true value is a few 1e-7 nats. TRL sums p (log p - log q),
    whose terms are 1e-6 and of both signs, so most digits cancel; here every term is at least 0."""
    g = torch.Generator().manual_seed(0)
    student = 2 * torch.randn(8, 1000, generator=g)
    teacher = student + 1e-3 * torch.randn(8, 1000, generator=g)
    p, q = reference.softmax(student), reference.softmax(teacher)
    want = reference.kl(p, q) if name == "reverse_kl" else reference.jsd(p, q, beta)
    theirs = trl_jsd(student[None], teacher[None], beta=beta, reduction="none").sum(-1)[0]
    logp, logq = student.log_softmax(-1), teacher.log_softmax(-1)
    ours = divergence.reverse_kl(logp, logq) if name == "reverse_kl" else divergence.jsd(logp, logq, beta)
    assert 5e-8 < want.min() < want.max() < 1e-6
    assert ((theirs - want) / want).abs().max() > 0.1
    assert ((ours - want) / want).abs().max() < 1e-3
