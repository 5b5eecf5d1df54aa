"""Divergences against their definitions in float64, by gradcheck, and by their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import reference

from verl_opsd.distill import divergence
from verl_opsd.errors import OpsdError

ANALYTIC = {
    "reverse_kl": divergence.reverse_kl,
    "forward_kl": divergence.forward_kl,
    "jsd": lambda p, q: divergence.jsd(p, q, 0.3),
    "skewed_reverse_kl": lambda p, q: divergence.skewed_reverse_kl(p, q, 0.2),
    "skewed_forward_kl": lambda p, q: divergence.skewed_forward_kl(p, q, 0.2),
}
names = pytest.mark.parametrize("name", sorted(ANALYTIC))
seeds = st.integers(0, 2**31)
scales = st.sampled_from([1e-4, 1e-2, 1.0, 5.0, 50.0])


def logits(seed: int, scale: float, vocab: int = 23, rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@names
@pytest.mark.parametrize("apart", [1e-3, 0.1, 1.0, 4.0])
def test_value_and_gradient_are_the_definition(name: str, apart: float) -> None:
    student = logits(1, 2.0).requires_grad_()
    teacher = student.detach() + logits(2, apart)
    value = ANALYTIC[name](student.log_softmax(-1), teacher.log_softmax(-1))
    student64 = student.detach().double().requires_grad_()
    want = reference.DIVERGENCES[name](reference.softmax(student64), reference.softmax(teacher))
    assert ((value - want).abs() <= torch.clamp(1e-5 * want, min=1e-7)).all()
    (got_grad,) = torch.autograd.grad(value.sum(), student)
    (want_grad,) = torch.autograd.grad(want.sum(), student64)
    # Logits are rounded to float32 (6e-8 of about 5): a difference of 1e-3 has up to 3e-4 relative error.
    tolerance = 1e-5 if apart >= 0.1 else 5e-4
    assert (got_grad - want_grad).norm() <= tolerance * want_grad.norm()


@names
def test_gradcheck_in_float64(name: str) -> None:
    student = logits(3, 1.0, 6, dtype=torch.float64).requires_grad_()
    logq = logits(4, 1.0, 6, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda z: ANALYTIC[name](z.log_softmax(-1), logq), student)


@names
@given(seed=seeds, scale=scales, apart=scales)
@settings(max_examples=25, deadline=None)
def test_never_negative_and_zero_on_itself(name: str, seed: int, scale: float, apart: float) -> None:
    p = logits(seed, scale).log_softmax(-1)
    q = (logits(seed, scale) + logits(seed + 1, apart)).log_softmax(-1)
    # A mixture is rounded once more than its parts: its "never negative" holds up to the rounding of the normalisers.
    floor = 0.0 if name in ("reverse_kl", "forward_kl") else -1e-7
    assert (ANALYTIC[name](p, q) >= floor).all()
    assert ANALYTIC[name](p, p).abs().max() <= (0.0 if floor == 0.0 else 1e-7)


@names
@given(seed=seeds, size=st.floats(1.0, 1e4))
@settings(max_examples=25, deadline=None)
def test_finite_for_log_ratios_up_to_1e4(name: str, seed: int, size: float) -> None:
    student = (logits(seed, 1.0).sign() * size / 2).requires_grad_()
    teacher = logits(seed + 1, 1.0).sign() * size / 2
    value = ANALYTIC[name](student.log_softmax(-1), teacher.log_softmax(-1))
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert torch.isfinite(value).all() and torch.isfinite(grad).all()


@given(seed=seeds, scale=scales)
@settings(max_examples=20, deadline=None)
def test_jsd_is_symmetric_at_one_half_and_bounded(seed: int, scale: float) -> None:
    p, q = (logits(seed + i, scale, dtype=torch.float64).log_softmax(-1) for i in (0, 1))
    torch.testing.assert_close(divergence.jsd(p, q, 0.5), divergence.jsd(q, p, 0.5), rtol=1e-9, atol=1e-15)
    assert (divergence.jsd(p, q, 0.5) <= math.log(2) + 1e-12).all()


def test_jsd_tends_to_forward_kl_at_0_and_to_reverse_kl_at_1() -> None:
    student, teacher = (logits(s, 1.0, dtype=torch.float64) for s in (5, 6))
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = reference.kl(reference.softmax(teacher), reference.softmax(student))
    reverse = reference.kl(reference.softmax(student), reference.softmax(teacher))
    torch.testing.assert_close(divergence.jsd(p, q, 1e-6) / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(divergence.jsd(p, q, 1 - 1e-6) / 1e-6, reverse, rtol=1e-4, atol=0)
    for beta in (0.0, 1.0, -0.1):
        with pytest.raises(OpsdError, match="beta"):
            divergence.jsd(p, q, beta)


@names
def test_outcomes_that_both_sides_exclude_add_nothing(name: str) -> None:
    p, q = (logits(s, 1.0).log_softmax(-1) for s in (7, 8))
    dead = torch.full((3, 2), -torch.inf)
    leaf = torch.cat([p, dead], -1).requires_grad_()
    value = ANALYTIC[name](leaf, torch.cat([q, dead], -1))
    torch.testing.assert_close(value, ANALYTIC[name](p, q), rtol=5e-7, atol=1e-7)  # summed in another order
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    assert torch.isfinite(grad).all() and (grad[:, -2:] == 0).all()


def test_infinite_where_the_second_distribution_lacks_what_the_first_has() -> None:
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    assert divergence.reverse_kl(p, q) == torch.inf
    assert divergence.forward_kl(p, q).item() == pytest.approx(math.log(2))
    assert divergence.jsd(p, q, 0.5).item() == pytest.approx(0.2157615543)  # by hand: (log(4/3) + log(2)/2 + ...)/2
    assert math.isfinite(divergence.skewed_reverse_kl(p, q, 0.1).item())


# Sampled-token estimators: their expectation over the student's own distribution, summed over the vocabulary.


def expected_over_student(estimator, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(expected value, expected gradient) of an estimator whose token is drawn from the student; drawing detached."""
    leaf = student.detach().requires_grad_()
    logp, logq = leaf.log_softmax(-1), teacher.log_softmax(-1)
    value = (logp.detach().exp() * estimator(logp, logq)).sum(-1)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def kl_gradient(student: torch.Tensor, teacher: torch.Tensor, reverse: bool) -> torch.Tensor:
    leaf = student.detach().requires_grad_()
    p, q = reference.softmax(leaf), reference.softmax(teacher)
    return torch.autograd.grad((reference.kl(p, q) if reverse else reference.kl(q, p)).sum(), leaf)[0]


def test_what_each_sampled_estimator_estimates() -> None:
    student, teacher = (logits(s, 0.7, dtype=torch.float64) for s in (9, 10))
    reverse = reference.kl(reference.softmax(student), reference.softmax(teacher))
    close = {"rtol": 1e-9, "atol": 1e-12}
    value, grad = expected_over_student(divergence.k1, student, teacher)
    torch.testing.assert_close(value, reverse, **close)
    torch.testing.assert_close(grad, torch.zeros_like(grad), **close)
    _, grad = expected_over_student(divergence.k2, student, teacher)
    torch.testing.assert_close(grad, kl_gradient(student, teacher, reverse=True), **close)
    value, grad = expected_over_student(divergence.k3, student, teacher)
    torch.testing.assert_close(value, reverse, **close)
    torch.testing.assert_close(grad, kl_gradient(student, teacher, reverse=False), **close)
    behaviour = student.log_softmax(-1)
    _, grad = expected_over_student(lambda p, q: divergence.policy_gradient(p, q, behaviour, (0.0, 1e9)), student, teacher)
    torch.testing.assert_close(grad, kl_gradient(student, teacher, reverse=True), **close)


def test_policy_gradient_corrects_for_the_behaviour_policy() -> None:
    student, teacher, behaviour = (logits(s, 0.5, dtype=torch.float64) for s in (11, 12, 13))
    leaf = student.requires_grad_()
    mu = behaviour.log_softmax(-1)
    loss = divergence.policy_gradient(leaf.log_softmax(-1), teacher.log_softmax(-1), mu, (0.0, 1e9))
    (grad,) = torch.autograd.grad((mu.exp() * loss).sum(), leaf)
    torch.testing.assert_close(grad, kl_gradient(student, teacher, reverse=True), rtol=1e-9, atol=1e-12)


def test_trust_range_masks_value_and_gradient() -> None:
    logp = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    loss = divergence.policy_gradient(logp, torch.zeros(3) - 0.5, torch.zeros(3), (0.5, 2.0))
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.tolist() == [0.5, 0.0, 0.0] and grad.tolist() == [0.5, 0.0, 0.0]  # -1 * (-0.5 - 0) at ratio 1


@given(seed=seeds, scale=scales)
@settings(max_examples=20, deadline=None)
def test_k3_is_never_negative(seed: int, scale: float) -> None:
    p, q = (logits(seed + i, min(scale, 20.0)).log_softmax(-1) for i in (0, 1))
    assert (divergence.k3(p, q, max_log_ratio=80.0) >= 0).all() and (divergence.k3(p, p) == 0).all()


def test_k3_refuses_or_pulls_as_at_its_clip() -> None:
    """Beyond the clip L the value is the tangent there: k3(L) + (e^L - 1)(r - L), so its slope in log p stays -(e^L - 1)."""
    logp, zero = torch.tensor([-100.0, -5.0, -4.0], requires_grad=True), torch.zeros(3)
    with pytest.raises(OpsdError, match=r"100\.0 nats"):
        divergence.k3(logp, zero)
    value = divergence.k3(logp, zero, max_log_ratio=5.0)
    want = [math.exp(5) - 1 - 5 + (math.exp(5) - 1) * 95, math.exp(5) - 1 - 5, math.exp(4) - 1 - 4]
    assert value.tolist() == pytest.approx(want, rel=1e-6)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert grad.tolist() == pytest.approx([-(math.exp(5) - 1), -(math.exp(5) - 1), -(math.exp(4) - 1)], rel=1e-6)


def test_trust_looks_at_the_ratio_itself_and_nothing_overflows() -> None:
    """Log-ratios 100, -100, ln 2 and a NaN under trust [0, e^50]: only the first is outside, and its gradient is 0 and no NaN."""
    behaviour = torch.tensor([-100.0, 0.0, -math.log(2), math.nan])
    logp = torch.tensor([0.0, -100.0, 0.0, 0.0], requires_grad=True)
    value = divergence.policy_gradient(logp, torch.full((4,), -3.0), behaviour, (0.0, math.exp(50)))
    (grad,) = torch.autograd.grad(value[:3].sum(), logp)
    assert value[:3].tolist() == pytest.approx([0.0, 0.0, 2 * 3.0], abs=1e-30) and value[3].isnan()
    assert grad[:3].tolist() == pytest.approx([0.0, 0.0, 6.0], abs=1e-30)
    inside = divergence.policy_gradient(logp[:1], torch.full((1,), -3.0), torch.tensor([-40.0]), (0.0, math.exp(50)))
    assert inside.item() == pytest.approx(3 * math.exp(40), rel=1e-5)  # no clip but the range of trust
