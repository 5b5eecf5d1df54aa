"""Float32 keeps its digits under offsets, large log-ratios and sure sides: every divergence and support, position by position."""

from __future__ import annotations

import pytest
import torch
from parity import reference

from distill import logit_rows
from verl_opsd.distill import chunk, dense
from verl_opsd.distill.chunk import ChunkInput, ChunkOutput, chunk_loss
from verl_opsd.distill.head import HeadTask
from verl_opsd.distill.loss import ANALYTIC, LossSpec
from verl_opsd.distill.signal import Signal

V, K = 300, 5
LABELS = torch.tensor([0, 5, 7, 1, 0, 299])
NAMES = sorted(reference.DIVERGENCES)
cases = pytest.mark.parametrize("case", logit_rows.CASES)
names = pytest.mark.parametrize("name", NAMES)


def spec_of(name: str, side: str) -> LossSpec:
    return LossSpec(name, support=side, top_k=None if side == "full" else K, **reference.PARAMETERS.get(name, {}))


def scored(spec: LossSpec, student: torch.Tensor, teacher: torch.Tensor) -> ChunkOutput:
    """Hidden states under an identity weight are logits."""
    task = HeadTask(
        kind="loss",
        index_N=torch.arange(len(student)),
        labels_N=LABELS,
        teacher=Signal(hidden_NH=teacher, head_id="other"),
        teacher_weight_VH=torch.eye(V),
        coef_N=torch.ones(len(student)),
        loss=spec,
    )
    return chunk_loss(ChunkInput.cut(task, slice(0, len(student)), student, torch.eye(V), torch.float32, True), spec)


def outcomes_of(side: str, student: torch.Tensor, teacher: torch.Tensor):
    """Log-probabilities of a support that is chosen in Python, in float64."""
    p, q = reference.softmax(student), reference.softmax(teacher)
    ids = [reference.support_of(side, p[i], q[i], int(LABELS[i]), K) for i in range(len(student))]
    width = max(len(i) for i in ids)

    def outcomes(logp: torch.Tensor) -> torch.Tensor:
        rows = []
        for logp_V, chosen in zip(logp, ids, strict=True):
            rest = torch.ones(V, dtype=torch.bool)
            rest[chosen] = False
            unused = torch.full((width - len(chosen),), -torch.inf, dtype=torch.float64)
            rows.append(torch.cat([logp_V[chosen], unused, logp_V[rest].logsumexp(0)[None]]))
        return torch.stack(rows)

    return outcomes


@names
@cases
def test_over_the_full_vocabulary(name: str, case: str) -> None:
    student, teacher = logit_rows.make(case)
    out = scored(spec_of(name, "full"), student, teacher)
    logit_rows.check(out.divergence_C, out.grad_CV, logit_rows.wanted(name, student, teacher))
    logp, logq = reference.log_softmax(student), reference.log_softmax(teacher)
    at = LABELS[:, None]
    torch.testing.assert_close(out.student_logprob_C.double(), logp.gather(1, at)[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.teacher_logprob_C.double(), logq.gather(1, at)[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy_C.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-6)


@names
@cases
@pytest.mark.parametrize("side", ["student_topk", "teacher_topk", "union_topk"])
def test_on_supports(name: str, case: str, side: str) -> None:
    student, teacher = logit_rows.make(case)
    out = scored(spec_of(name, side), student, teacher)
    want = logit_rows.wanted(name, student, teacher, outcomes_of(side, student, teacher))
    # Differences of log-probabilities, which are rounded. 50 nats apart all but a few outcomes have the same h, and what autograd leaves of
    # p h - p h is its last digit: 2^-23 of a number near 1.
    logit_rows.check(out.divergence_C, out.grad_CV, want, atol=2**-23 if case == "50 nats apart" else 1e-8)


@names
@pytest.mark.parametrize("side", ["student_topk", "union_topk"])
def test_by_autograd_is_by_hand(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A divergence of one's own goes through autograd over the full vocabulary; a support of all tokens as well."""
    monkeypatch.setitem(ANALYTIC, "own", ANALYTIC[name])
    monkeypatch.setattr(LossSpec, "mixture", None)
    student, teacher = logit_rows.make("student sure")
    want = logit_rows.wanted(name, student, teacher)
    for spec in (spec_of(name, "full"), LossSpec(name, support=side, top_k=V, **reference.PARAMETERS.get(name, {}))):
        out = scored(spec, student, teacher)
        logit_rows.check(out.divergence_C, out.grad_CV, want, atol=1e-8)


@pytest.mark.slow
def test_compiled_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator compiles, compiled for the CPU."""
    eager = chunk._fused
    monkeypatch.setattr(chunk, "_fused", lambda function, cuda: eager(function, True))
    for name in NAMES:
        for case in ("offsets 300 and 300", "log-ratios of 10000", "student sure", "sure of two"):
            student, teacher = logit_rows.make(case)
            out = scored(spec_of(name, "union_topk"), student, teacher)
            want = logit_rows.wanted(name, student, teacher, outcomes_of("union_topk", student, teacher))
            logit_rows.check(out.divergence_C, out.grad_CV, want, atol=1e-8)


@pytest.mark.parametrize("beta", [1e-3, 0.05, 0.95, 0.999])
def test_mixtures_near_their_ends(beta: float) -> None:
    """Values and gradients in float32 against the same formulas in float64, where one part of the mixture is nearly lost."""
    for mixture in (dense.Mixture(beta, beta, 1 - beta), dense.Mixture(beta, 0.0, 1.0), dense.Mixture(beta, 1.0, 0.0)):
        for case in logit_rows.CASES:
            student, teacher = logit_rows.make(case)
            got, want = dense.Passes(student, teacher, mixture), dense.Passes(student.double(), teacher.double(), mixture)
            one = torch.ones(6)
            grads = got.grad(one, torch.float32), want.grad(one.double(), torch.float64)
            logit_rows.check(got.value_C, grads[0], (want.value_C, grads[1]))
