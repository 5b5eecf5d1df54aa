"""Numerical gradients in float64 of every divergence on every support under every weight, weights and supports held fixed."""

from __future__ import annotations

import itertools

import pytest
import torch
from parity import reference

from distill.test_head import V, make
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import Clip, SurprisalGate, Threshold, TokenValues, Weight, product

N, K = 3, 4
SUPPORTS = ("full", "student_topk", "teacher_topk", "union_topk", "signal")
WEIGHTS: dict[str, tuple[Weight, ...]] = {
    "none": (),
    "threshold": (Threshold(0.5),),
    "gate": (SurprisalGate(0.7, -3.0),),
    "clip": (Clip(0.3),),
    "all": (Threshold(0.2), SurprisalGate(0.7, -3.0), Clip(0.3)),
}
SAMPLED = {"k1": {}, "k2": {}, "k3": {}, "policy_gradient": {"trust": (0.5, 2.0)}, "nll": {}}


class HeldFixed:
    """The product of weights at the values of the first call; each chunk is one call, so one chunk holds everything."""

    def __init__(self, weights: tuple[Weight, ...]):
        self.weights = weights
        self.first: torch.Tensor | None = None

    def __call__(self, values: TokenValues) -> torch.Tensor:
        if self.first is None:
            self.first = product(self.weights, values)
        return self.first


def support_signal(logits: torch.Tensor, labels: torch.Tensor) -> Signal:
    """Top K of these logits and the label, float64."""
    logq = logits.log_softmax(-1)
    ids, logprobs, tail = torch.full((N, K + 1), -1), torch.full((N, K + 1), -torch.inf, dtype=torch.float64), torch.zeros(N)
    for i in range(N):
        chosen = reference.support_of("teacher_topk", logq[i].exp(), logq[i].exp(), int(labels[i]), K)
        ids[i, : len(chosen)] = torch.tensor(chosen)
        logprobs[i, : len(chosen)] = logq[i, chosen]
        tail[i] = reference.outcomes(logq[i].exp(), chosen)[-1].log()
    return Signal(ids_NK=ids, logprobs_NK=logprobs, tail_N=tail)


def check(spec: LossSpec, weights: str) -> None:
    held = HeldFixed(WEIGHTS[weights])
    spec = LossSpec(**{**spec.__dict__, "weights": (held,)})
    head, x, task = make(seed=5, dtype=torch.float64, n=N, loss=spec, anchor=None, anchor_coef_N=None)
    if spec.support == "signal":
        logits = task.teacher.hidden_NH @ task.teacher_weight_VH.T
        task.teacher, task.teacher_weight_VH = support_signal(logits, task.labels_N), None
    if spec.divergence == "nll":
        task.teacher = task.teacher_weight_VH = None
    if spec.divergence == "policy_gradient":
        logp = (x.detach().reshape(-1, x.shape[-1])[task.index_N] @ head.weight.detach().T).log_softmax(-1)
        task.behaviour_logprob_N = logp.gather(-1, task.labels_N[:, None])[:, 0] + 0.1
    head.task = task
    assert head(x).item() != 0 or weights in ("threshold", "all")
    if spec.divergence != "policy_gradient":  # its advantage is detached: the loss is not a function with this gradient
        assert torch.autograd.gradcheck(lambda x: head(x), x, atol=1e-6, fast_mode=True)
        assert torch.autograd.gradcheck(lambda w: head(x.detach()), head.weight, atol=1e-6, fast_mode=True)
        return
    # -ratio * advantage with the advantage held fixed
    logq = (task.teacher.hidden_NH @ task.teacher_weight_VH.T).log_softmax(-1).gather(-1, task.labels_N[:, None])[:, 0]
    leaf = x.detach().requires_grad_()
    now = (leaf.reshape(-1, x.shape[-1])[task.index_N] @ head.weight.detach().T).log_softmax(-1)
    now = now.gather(-1, task.labels_N[:, None])[:, 0]
    value = -(now - task.behaviour_logprob_N).exp() * (logq - now).detach()
    (want,) = torch.autograd.grad((task.coef_N * held.first * value).sum(), leaf)
    (got,) = torch.autograd.grad(head(x).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", sorted(reference.DIVERGENCES))
def test_analytic(name: str, weights: str) -> None:
    for side in SUPPORTS:
        top_k = None if side in ("full", "signal") else K
        check(LossSpec(divergence=name, support=side, top_k=top_k, **reference.PARAMETERS.get(name, {})), weights)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled(name: str, weights: str) -> None:
    check(LossSpec(divergence=name, **SAMPLED[name]), weights)


def test_weights_that_are_held_differ_between_positions() -> None:
    """Else the cases above would check less than they say."""
    assert V > 2 * K
    for name, side in itertools.product(sorted(reference.DIVERGENCES), ("full", "union_topk")):
        spec = LossSpec(
            divergence=name,
            support=side,
            top_k=None if side == "full" else K,
            weights=WEIGHTS["all"],
            **reference.PARAMETERS.get(name, {}),
        )
        head, x, task = make(seed=5, dtype=torch.float64, n=N, loss=spec, anchor=None, anchor_coef_N=None)
        head.task = task
        head(x)
        weight = task.result.weight_N
        assert weight.max() > 0 and weight.min() < weight.max()
