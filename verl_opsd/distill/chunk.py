"""One chunk of loss positions: logits, divergences, weights, and the gradient with respect to the student's logits.

Shape suffixes: N loss positions, C those of this chunk, H hidden size (the teacher's may differ), V vocabulary, K
slots of a support, J = K + 1 outcomes (the last one is the tail). Signals keep their suffix N when cut to a chunk.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_opsd.distill import dense, divergence, support
from verl_opsd.distill.loss import ANALYTIC, Analytic, LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import TokenValues, Weight, product

if TYPE_CHECKING:
    from verl_opsd.distill.head import HeadTask


#: Loss positions a chunk: in one pass, which keeps 4 bytes a logit, and of everything else, which keeps 10 over the full vocabulary.
ONE_PASS_ROWS, ROWS = 768, 256


@dataclass(frozen=True)
class ChunkInput:
    """The rows of a task that form one chunk."""

    hidden_CH: Tensor
    weight_VH: Tensor
    labels_C: Tensor | None
    teacher: Signal | None
    teacher_weight_VH: Tensor
    coef_C: Tensor | None
    anchor: Signal | None
    anchor_weight_VH: Tensor
    anchor_coef_C: Tensor | None
    behaviour_logprob_C: Tensor | None
    dtype: torch.dtype
    need_grad: bool

    @classmethod
    def cut(
        cls, task: HeadTask, rows: slice, hidden_CH: Tensor, weight_VH: Tensor, dtype: torch.dtype, need_grad: bool
    ) -> ChunkInput:
        """Rows of a task, on the device of the weight; signals may live on the host until here."""
        device = weight_VH.device

        def row(value: Tensor | None, to: torch.dtype) -> Tensor | None:
            return None if value is None else value[rows].to(device=device, dtype=to, non_blocking=True)

        def part(signal: Signal | None) -> Signal | None:
            return None if signal is None else signal.rows(rows).to(device)

        return cls(
            hidden_CH=hidden_CH,
            weight_VH=weight_VH,
            labels_C=row(task.labels_N, torch.int64),
            teacher=part(task.teacher),
            teacher_weight_VH=weight_VH if task.teacher_weight_VH is None else task.teacher_weight_VH.detach(),
            coef_C=row(task.coef_N, dtype),
            anchor=part(task.anchor),
            anchor_weight_VH=weight_VH if task.anchor_weight_VH is None else task.anchor_weight_VH.detach(),
            anchor_coef_C=row(task.anchor_coef_N, dtype),
            behaviour_logprob_C=row(task.behaviour_logprob_N, dtype),
            dtype=dtype,
            need_grad=need_grad,
        )


@dataclass
class ChunkOutput:
    """Loss of the chunk (0-d), its gradient with respect to the student's logits, and the values of ``HeadResult``."""

    loss: Tensor
    grad_CV: Tensor | None = None
    divergence_C: Tensor | None = None
    anchor_C: Tensor | None = None
    student_logprob_C: Tensor | None = None
    teacher_logprob_C: Tensor | None = None
    entropy_C: Tensor | None = None
    agree_C: Tensor | None = None
    weight_C: Tensor | None = None
    coverage_student_C: Tensor | None = None
    coverage_teacher_C: Tensor | None = None


def matmul(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``left @ right`` in ``dtype`` from factors of any dtype, accumulated and kept in it: nothing is rounded to the factors' dtype."""
    if left.dtype == right.dtype == dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=dtype, out=out)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


def logits(hidden_CH: Tensor, weight_VH: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """[C, V] in ``dtype``, from hidden states rounded to the weight's dtype."""
    return matmul(hidden_CH.to(weight_VH.dtype), weight_VH.T, dtype, out)


def weighted_sum(coef_C: Tensor, value_C: Tensor) -> Tensor:
    """``sum coef * value``, in which a position of coefficient 0 adds exactly 0 whatever its value is."""
    return torch.where(coef_C == 0, 0.0, coef_C * value_C).sum()


def chunk_loss(chunk: ChunkInput, spec: LossSpec) -> ChunkOutput:
    """``sum coef * weight * divergence + sum anchor_coef * anchor divergence`` of one chunk, with gradient."""
    if spec.mixture is not None:
        return _dense(chunk, spec, spec.mixture)
    return _by_autograd(chunk, spec, logits(chunk.hidden_CH, chunk.weight_VH, chunk.dtype))


class _Logits:
    """Logits of both sides, kept in float32, and what is made of them (:mod:`verl_opsd.distill.dense`)."""

    def __init__(self, student_CV: Tensor, other_CV: Tensor, labels_C: Tensor | None, mixture: dense.Mixture):
        self.labels = None if labels_C is None else (_pick(student_CV, labels_C), _pick(other_CV, labels_C))
        passes = dense.score(student_CV, other_CV, mixture)
        self.norms, self.value_C, self.grad = passes.norms, passes.value_C, passes.grad


class _OnePass:
    """Reverse KL in one pass over logits that are made slice by slice (:mod:`verl_opsd.distill.blocks_triton`)."""

    def __init__(self, chunk: ChunkInput, other_CT: Tensor, other_VT: Tensor):
        from verl_opsd.distill import blocks_triton

        sides = (chunk.hidden_CH, chunk.weight_VH), (other_CT, other_VT)
        self.labels = None if chunk.labels_C is None else tuple(_label_logits(h, w, chunk.labels_C) for h, w in sides)
        rows, vocab = len(chunk.hidden_CH), len(chunk.weight_VH)
        blocks = blocks_triton.Blocks(rows, vocab, chunk.weight_VH.device)
        width = min(
            blocks_triton.SLICE * max(ONE_PASS_ROWS // rows, 1), vocab
        )  # few rows, wide slices: products are small otherwise
        room = chunk.hidden_CH.new_empty(2, rows, width, dtype=torch.float32)
        for start in range(0, vocab, width):
            pair = room[..., : vocab - start]
            for (h, w), out in zip(sides, pair, strict=True):
                logits(h, w[start : start + width], torch.float32, out)
            blocks.add(start, *pair)
        self.norms, self.value_C = blocks.combine()
        self.grad = blocks.grad


def one_pass(mixture: dense.Mixture, weight_VS: Tensor, weight_VT: Tensor) -> bool:
    """Whether one pass is taken: reverse KL, of which alone the parts of the vocabulary add up, and ``blocks_triton.takes``."""
    if mixture != dense.REVERSE_KL or not weight_VS.is_cuda or importlib.util.find_spec("triton") is None:
        return False
    from verl_opsd.distill import blocks_triton

    return blocks_triton.takes(weight_VS, weight_VT)


def _label_logits(hidden_CH: Tensor, weight_VH: Tensor, labels_C: Tensor) -> Tensor:
    """Logits of the sampled tokens alone, float32 [C]."""
    return torch.linalg.vecdot(hidden_CH.float(), weight_VH[labels_C].float())


def default_rows(task: HeadTask, weight_VH: Tensor) -> int:
    """Loss positions a chunk where a task names none: below 1 GB at a vocabulary of 250,000 over the full vocabulary."""
    mixture = task.loss.mixture
    weights = [weight_VH if w is None else w for w in (task.teacher_weight_VH, task.anchor_weight_VH)]
    both = task.teacher is not None and task.anchor is not None  # their gradients are added up
    if mixture is None or not all(one_pass(mixture, weight_VH, w) for w in weights):
        return ROWS
    return ONE_PASS_ROWS // (1 + both)


def _dense(chunk: ChunkInput, spec: LossSpec, mixture: dense.Mixture) -> ChunkOutput:
    """A divergence over the full vocabulary, by a gradient that is derived by hand."""
    out = ChunkOutput(loss=chunk.hidden_CH.new_zeros((), dtype=chunk.dtype))
    student_CV: Tensor | None = None

    def term(signal: Signal, weight_VH: Tensor, coef_C: Tensor, weights: tuple[Weight, ...]) -> None:
        nonlocal student_CV
        assert signal.hidden_NH is not None
        other_CH = signal.hidden_NH.to(weight_VH.dtype)
        scored: _OnePass | _Logits
        if one_pass(mixture, chunk.weight_VH, weight_VH):
            scored = _OnePass(chunk, other_CH, weight_VH)
        else:
            student_CV = logits(chunk.hidden_CH, chunk.weight_VH, chunk.dtype) if student_CV is None else student_CV
            scored = _Logits(student_CV, logits(other_CH, weight_VH, chunk.dtype), chunk.labels_C, mixture)
        norms, value_C = scored.norms, scored.value_C
        out.entropy_C = norms.entropy_C
        if scored.labels is not None:
            out.student_logprob_C = (scored.labels[0] - norms.student_top_C) - norms.student_log_C
        coef_C = _effective(out, value_C, coef_C, weights)
        out.loss = out.loss + weighted_sum(coef_C, value_C)
        if chunk.need_grad:
            grad_CV = scored.grad(coef_C, chunk.weight_VH.dtype)
            out.grad_CV = grad_CV if out.grad_CV is None else out.grad_CV.add_(grad_CV)
        if signal is not chunk.teacher:
            out.anchor_C = value_C
            return
        out.divergence_C, out.agree_C = value_C, norms.agree_C
        out.coverage_student_C = out.coverage_teacher_C = torch.ones_like(value_C)
        if scored.labels is not None:
            out.teacher_logprob_C = (scored.labels[1] - norms.teacher_top_C) - norms.teacher_log_C

    if chunk.teacher is not None:
        assert chunk.coef_C is not None
        term(chunk.teacher, chunk.teacher_weight_VH, chunk.coef_C, spec.weights)
    if chunk.anchor is not None:
        assert chunk.anchor_coef_C is not None
        term(chunk.anchor, chunk.anchor_weight_VH, chunk.anchor_coef_C, ())
    return out


@functools.cache
def _fused(function: Analytic, cuda: bool) -> Analytic:
    """On a GPU the elementwise terms and their gradient as a few kernels instead of a hundred passes over memory."""
    return torch.compile(function) if cuda else function


def _by_autograd(chunk: ChunkInput, spec: LossSpec, student_CV: Tensor) -> ChunkOutput:
    """Sampled tokens, supports, own divergences: autograd from the divergence to the log-probabilities of its outcomes, by hand from there."""
    logp_CV = torch.log_softmax(student_CV, dim=-1)
    out = ChunkOutput(loss=student_CV.new_zeros(()), entropy_C=-(logp_CV.exp() * logp_CV).sum(-1))
    if chunk.labels_C is not None:
        out.student_logprob_C = _pick(logp_CV, chunk.labels_C)
    ids_CK: Tensor | None = None
    grad_CV = torch.zeros_like(logp_CV) if chunk.need_grad else None

    def term(signal: Signal | None, weight_VH: Tensor, coef_C: Tensor, weights: tuple[Weight, ...]) -> Tensor:
        nonlocal ids_CK, grad_CV
        logq_CV = None
        if signal is not None and signal.hidden_NH is not None:
            logq_CV = torch.log_softmax(logits(signal.hidden_NH, weight_VH, chunk.dtype), dim=-1)
        if signal is not None and signal is chunk.teacher:
            _describe_teacher(out, chunk, signal, logp_CV, logq_CV)
        q_CJ: Tensor | None = None
        if not spec.sampled:
            assert signal is not None
            if ids_CK is None:  # the anchor is measured on the teacher's support
                ids_CK = _support(chunk, spec, signal, logp_CV, logq_CV)
            q_CJ = _outcomes(chunk, signal, logq_CV, ids_CK)
        p_CJ = logp_CV if ids_CK is None else support.with_tail(logp_CV, ids_CK)
        with torch.enable_grad():
            leaf_CJ = p_CJ.detach().requires_grad_(chunk.need_grad)
            if q_CJ is None:
                value_C = _sampled(chunk, spec, signal, leaf_CJ, logq_CV, coef_C)
            else:
                value_C = _fused(ANALYTIC[spec.divergence], leaf_CJ.is_cuda)(leaf_CJ, q_CJ, spec)
            coef_C = _effective(out, value_C.detach(), coef_C, weights)
            loss = weighted_sum(coef_C, value_C)
        if q_CJ is not None and signal is chunk.teacher:
            one_C = torch.ones_like(value_C)
            out.coverage_student_C = one_C if ids_CK is None else support.coverage(p_CJ)
            out.coverage_teacher_C = one_C if ids_CK is None else support.coverage(q_CJ)
        out.loss = out.loss + loss.detach()
        if grad_CV is not None and loss.requires_grad:
            (grad_CJ,) = torch.autograd.grad(loss, leaf_CJ)
            # 0 * NaN is NaN: a masked position keeps an exact 0 whatever its values are.
            grad_CJ = through_softmax(torch.where(coef_C[:, None] == 0, 0.0, grad_CJ), p_CJ)
            grad_CV += grad_CJ if ids_CK is None else support.to_logits(grad_CJ, p_CJ, logp_CV, ids_CK)
        return value_C.detach()

    if chunk.coef_C is not None:
        out.divergence_C = term(chunk.teacher, chunk.teacher_weight_VH, chunk.coef_C, spec.weights)
    if chunk.anchor is not None:
        assert chunk.anchor_coef_C is not None
        out.anchor_C = term(chunk.anchor, chunk.anchor_weight_VH, chunk.anchor_coef_C, ())
    if grad_CV is not None:
        out.grad_CV = grad_CV.to(chunk.weight_VH.dtype)
    return out


def _effective(out: ChunkOutput, value_C: Tensor, coef_C: Tensor, weights: tuple[Weight, ...]) -> Tensor:
    """Coefficients times the data-dependent weights; a coefficient of 0 stays 0 whatever the weight is."""
    if not weights:
        return coef_C
    assert out.student_logprob_C is not None and out.entropy_C is not None
    out.weight_C = product(weights, TokenValues(value_C, out.student_logprob_C, out.entropy_C))
    return torch.where(coef_C == 0, 0.0, coef_C * out.weight_C)


def _support(chunk: ChunkInput, spec: LossSpec, signal: Signal, logp_CV: Tensor, logq_CV: Tensor | None) -> Tensor | None:
    """Ids of the support, or None for the full vocabulary."""
    if spec.support == "full":
        return None
    if spec.support == "signal":
        return signal.ids_NK
    assert logq_CV is not None and chunk.labels_C is not None and spec.top_k is not None
    return support.support_ids(spec.support, logp_CV, logq_CV, chunk.labels_C, spec.top_k)


def _outcomes(chunk: ChunkInput, signal: Signal, logq_CV: Tensor | None, ids_CK: Tensor | None) -> Tensor:
    """The teacher's log-probabilities on the student's outcomes."""
    if logq_CV is None:
        assert signal.logprobs_NK is not None and signal.tail_N is not None
        return torch.cat([signal.logprobs_NK, signal.tail_N[:, None]], dim=-1).to(chunk.dtype)
    return logq_CV if ids_CK is None else support.with_tail(logq_CV, ids_CK)


def _sampled(
    chunk: ChunkInput, spec: LossSpec, signal: Signal | None, leaf_CV: Tensor, logq_CV: Tensor | None, coef_C: Tensor
) -> Tensor:
    """A sampled-token estimator. Where there is no coefficient it is measured all the same (drift, controls), and can't refuse: it is
    NaN where it would."""
    assert chunk.labels_C is not None
    logp_C = _pick(leaf_CV, chunk.labels_C)
    if spec.divergence == "nll":
        return -logp_C
    assert signal is not None
    logq_C = _label_logprob(chunk.labels_C, signal, logq_CV).to(chunk.dtype)
    if spec.divergence == "k1":
        return divergence.k1(logp_C, logq_C)
    if spec.divergence == "k2":
        return divergence.k2(logp_C, logq_C)
    if spec.divergence == "k3":
        unknown_C = (coef_C == 0) & divergence.leaves_float32(logq_C - logp_C) & (spec.max_log_ratio is None)
        value_C = divergence.k3(logp_C, torch.where(unknown_C, logp_C.detach(), logq_C), spec.max_log_ratio)
        return value_C.masked_fill(unknown_C, torch.nan)
    assert chunk.behaviour_logprob_C is not None and spec.trust is not None
    return divergence.policy_gradient(logp_C, logq_C, chunk.behaviour_logprob_C, spec.trust)


def _describe_teacher(out: ChunkOutput, chunk: ChunkInput, signal: Signal, logp_CV: Tensor, logq_CV: Tensor | None) -> None:
    """Fills agreement and the teacher's log-probability of the sampled token, where the signal tells them."""
    if logq_CV is not None:
        out.agree_C = (logp_CV.argmax(-1) == logq_CV.argmax(-1)).to(chunk.dtype)
    elif signal.ids_NK is not None and signal.logprobs_NK is not None:
        top_C = _pick(signal.ids_NK, signal.logprobs_NK.argmax(-1))
        out.agree_C = (logp_CV.argmax(-1) == top_C).to(chunk.dtype)
    if chunk.labels_C is not None:
        out.teacher_logprob_C = _label_logprob(chunk.labels_C, signal, logq_CV)


def _label_logprob(labels_C: Tensor, signal: Signal, logq_CV: Tensor | None) -> Tensor:
    """The signal's log-probability of the sampled token, [C]."""
    if logq_CV is not None:
        return _pick(logq_CV, labels_C)
    if signal.logprob_N is not None:
        return signal.logprob_N
    assert signal.ids_NK is not None and signal.logprobs_NK is not None
    slot_C = (signal.ids_NK == labels_C[:, None]).to(torch.int8).argmax(-1)
    return _pick(signal.logprobs_NK, slot_C)


def through_softmax(grad_CV: Tensor, logp_CV: Tensor) -> Tensor:
    """From a gradient by log-probabilities to that by their logits. A row of zeros stays exactly 0, whatever its log-probabilities hold.

    It sums to zero. The most probable token's is made as minus the sum of the others': where that token is sure, it would lose its digits
    by itself.
    """
    used_C1 = (grad_CV != 0).any(-1, keepdim=True)
    top_C1 = logp_CV.argmax(-1, keepdim=True)
    others_CV = (grad_CV - logp_CV.exp() * grad_CV.sum(-1, keepdim=True)).scatter_(1, top_C1, 0.0)
    return torch.where(used_C1, others_CV.scatter_(1, top_C1, -others_CV.sum(-1, keepdim=True)), 0.0)


def _pick(value_CV: Tensor, labels_C: Tensor) -> Tensor:
    return value_CV.gather(-1, labels_C[:, None])[:, 0]
