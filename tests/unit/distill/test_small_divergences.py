"""Digits of the default loss where student and teacher nearly agree: float32 logits against float64 on the same logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import reference

from verl_opsd.distill import dense


def both(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(KL, gradient by the student's logits) of the float32 path, and the same from the definition in float64."""
    one = torch.ones(len(student))
    scored = dense.score(student, teacher)
    kl, grad = scored.value_C, scored.grad(one, torch.float32)
    leaf = student.double().requires_grad_()
    want = reference.kl(reference.softmax(leaf), reference.softmax(teacher.double()))
    (want_grad,) = torch.autograd.grad(want.sum(), leaf)
    return kl.double(), grad.double(), want.detach(), want_grad


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([7, 300, 5000]),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    apart=st.sampled_from([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_keep_their_digits(seed: int, vocab: int, scale: float, apart: float) -> None:
    g = torch.Generator().manual_seed(seed)
    student = scale * torch.randn(4, vocab, generator=g)
    teacher = student + apart * torch.randn(4, vocab, generator=g)
    kl, grad, want, want_grad = both(student, teacher)
    assert (kl >= 0).all()
    # The normalisers are rounded at about 10 nats: half the square of 1e-6 is the floor of a divergence.
    assert ((kl - want).abs() <= 1e-5 * want + 5e-11).all()
    # Where one token has nearly all of the mass, d - mean d cancels.
    assert (grad - want_grad).norm() <= (1e-5 if scale <= 1 else 1e-4) * want_grad.norm()


@pytest.mark.parametrize("apart", [1e-4, 1e-3])
def test_near_logits_lose_nothing_that_log_probabilities_lose(apart: float) -> None:
    """Differences of rounded log-probabilities carry an error of 5e-7 each, those of logits far less."""
    g = torch.Generator().manual_seed(0)
    student = torch.randn(16, 5000, generator=g)
    teacher = student + apart * torch.randn(16, 5000, generator=g)
    kl, _, want, _ = both(student, teacher)
    error = ((kl - want) / want).abs().max()
    logp, logq = student.log_softmax(-1), teacher.log_softmax(-1)
    through_logprobs = (dense.kl_terms(logp.exp(), logq.exp(), logp - logq).sum(-1).double() - want) / want
    assert error < 1e-8 / apart < through_logprobs.abs().max() < 1e-3


def test_an_offset_of_all_logits_is_no_divergence() -> None:
    student = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    kl, grad, _, _ = both(student, student + 2.0)
    assert kl.max() < 1e-11 and grad.abs().max() < 1e-7
