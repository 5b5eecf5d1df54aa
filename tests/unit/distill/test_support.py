"""Supports: exact in the limit, never above the exact value, no mass leaks into the tail."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import reference

from verl_opsd.distill import divergence, support
from verl_opsd.errors import OpsdError

V = 29
SIDES = ("student_topk", "teacher_topk", "union_topk")
sides = pytest.mark.parametrize("side", SIDES)
ANALYTIC = {
    "reverse_kl": divergence.reverse_kl,
    "forward_kl": divergence.forward_kl,
    "jsd": lambda p, q: divergence.jsd(p, q, 0.3),
    "skewed_reverse_kl": lambda p, q: divergence.skewed_reverse_kl(p, q, 0.2),
    "skewed_forward_kl": lambda p, q: divergence.skewed_forward_kl(p, q, 0.2),
}


def case(seed: int, scale: float = 1.5, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    student = (scale * torch.randn(4, V, generator=g, dtype=torch.float64)).to(dtype)
    teacher = (scale * torch.randn(4, V, generator=g, dtype=torch.float64)).to(dtype)
    return student.requires_grad_(), teacher, torch.randint(V, (4,), generator=g)


@sides
@pytest.mark.parametrize("k", [1, 3, V - 1, V, V + 5])
def test_ids_and_outcomes_are_the_definition(side: str, k: int) -> None:
    student, teacher, labels = case(0)
    logp, logq = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    ids = support.support_ids(side, logp, logq, labels, k)
    p_out, q_out = support.with_tail(logp, ids), support.with_tail(logq, ids)
    for row in range(4):
        p_V, q_V = reference.softmax(student.detach())[row], reference.softmax(teacher)[row]
        want = reference.support_of(side, p_V, q_V, int(labels[row]), min(k, V))
        slots = [i for i in ids[row].tolist() if i >= 0]
        assert slots == want and int(labels[row]) in slots
        used = torch.cat([ids[row] >= 0, torch.tensor([True])])
        for got, prob_V in ((p_out, p_V), (q_out, q_V)):
            torch.testing.assert_close(got[row].exp()[used], reference.outcomes(prob_V, want), rtol=1e-12, atol=1e-15)
            assert (got[row][~used] == -torch.inf).all()
        covered = float(p_V[want].sum())
        assert support.coverage(p_out)[row].item() == pytest.approx(covered, rel=1e-12)


@sides
@pytest.mark.parametrize("name", sorted(ANALYTIC))
def test_value_and_gradient_go_to_the_exact_ones(side: str, name: str) -> None:
    student, teacher, labels = case(1)
    logp, logq = student.log_softmax(-1), teacher.log_softmax(-1)
    exact = ANALYTIC[name](logp, logq)
    (exact_grad,) = torch.autograd.grad(exact.sum(), student, retain_graph=True)
    errors = []
    for k in (2, 8, 20, V):
        ids = support.support_ids(side, logp, logq, labels, k)
        value = ANALYTIC[name](support.with_tail(logp, ids), support.with_tail(logq, ids))
        (grad,) = torch.autograd.grad(value.sum(), student, retain_graph=True)
        errors.append(((value - exact).abs().max().item(), (grad - exact_grad).abs().max().item()))
    assert errors[-1][0] < 1e-13 and errors[-1][1] < 1e-13
    assert errors[0][0] > errors[2][0] > errors[-1][0]


@given(seed=st.integers(0, 2**31), k=st.integers(1, V), scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
@settings(max_examples=20, deadline=None)
def test_a_truncated_value_never_exceeds_the_exact_one(seed: int, k: int, scale: float) -> None:
    student, teacher, labels = case(seed, scale)
    logp, logq = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    for side in SIDES:
        ids = support.support_ids(side, logp, logq, labels, k)
        p_out, q_out = support.with_tail(logp, ids), support.with_tail(logq, ids)
        for name, f in ANALYTIC.items():
            exact, value = f(logp, logq), f(p_out, q_out)
            assert (value <= exact * (1 + 1e-9) + 1e-12).all() and (value >= -1e-12).all(), name


def test_a_small_tail_keeps_its_digits() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 0] = 30.0
    out = support.with_tail(logits.log_softmax(-1), torch.tensor([[0]]))
    want = torch.tensor(49.0, dtype=torch.float64).log() - 30.0  # 49 tokens of mass e^-30 against 1
    assert out[0, -1].item() == pytest.approx(want.item(), rel=1e-6)  # 1 - sum is 0 in float32


@pytest.mark.parametrize("broken, match", [([[0, 0]], "repeats"), ([[0, 99]], "vocabulary"), ([[0, 1]], "lacks")])
def test_given_supports_are_checked(broken: list[list[int]], match: str) -> None:
    with pytest.raises(OpsdError, match=match):
        support.check_ids(torch.tensor(broken), torch.tensor([2 if match == "lacks" else 0]), V)


@pytest.mark.parametrize(
    "change", ["tail too large", "tail too small", "a token too likely", "another temperature", "no number"]
)
def test_a_given_support_that_is_no_distribution_is_refused(change: str) -> None:
    logprobs, tail = torch.tensor([[0.5, 0.3, 0.0], [0.2, 0.2, 0.1]]).log(), torch.tensor([0.2, 0.5]).log()
    support.check_mass(logprobs, tail, torch.tensor([True, True]))
    support.check_mass(logprobs + 1e-4, tail, torch.tensor([True, True]))  # rounded on its way
    if change == "another temperature":
        logprobs = logprobs / 0.7
    elif change.startswith("tail"):
        tail[1] = math.log(0.6 if "large" in change else 0.4)
    else:
        logprobs[1, 0] = math.nan if change == "no number" else math.log(0.3)
    with pytest.raises(OpsdError, match=r"support [01] has the mass"):
        support.check_mass(logprobs, tail, torch.tensor([True, True]))
    if change != "another temperature":
        support.check_mass(logprobs, tail, torch.tensor([True, False]))  # a masked position may hold anything
