"""One chunk of loss positions: logits, divergences, weights, and the gradient with respect to the student's logits.

Shape suffixes: N loss positions, C those of this chunk, H hidden size (the teacher's may differ), V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_opsd.distill import dense
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal

if TYPE_CHECKING:
    from verl_opsd.distill.head import HeadTask


@dataclass(frozen=True)
class ChunkInput:
    """The rows of a task that form one chunk."""

    hidden_CH: Tensor
    weight_VH: Tensor
    labels_C: Tensor | None
    teacher: Signal | None
    teacher_weight_VH: Tensor | None
    coef_C: Tensor | None
    anchor: Signal | None
    anchor_coef_C: Tensor | None
    behaviour_logprob_C: Tensor | None
    dtype: torch.dtype
    need_grad: bool
    compile: bool

    @classmethod
    def cut(
        cls, task: HeadTask, rows: slice, hidden_NH: Tensor, weight_VH: Tensor, dtype: torch.dtype, need_grad: bool
    ) -> ChunkInput:
        """Rows of a task, on the device of the weight; signals may live on the host until here."""
        device = weight_VH.device

        def row(value: Tensor | None, to: torch.dtype) -> Tensor | None:
            return None if value is None else value[rows].to(device=device, dtype=to, non_blocking=True)

        def part(signal: Signal | None) -> Signal | None:
            if signal is None:
                return None
            cut = {k: v[rows] if isinstance(v, Tensor) else v for k, v in signal.__dict__.items()}
            return Signal(**cut).to(device)

        return cls(
            hidden_CH=hidden_NH[rows],
            weight_VH=weight_VH,
            labels_C=row(task.labels_N, torch.int64),
            teacher=part(task.teacher),
            teacher_weight_VH=weight_VH if task.teacher_weight_VH is None else task.teacher_weight_VH.detach(),
            coef_C=row(task.coef_N, dtype),
            anchor=part(task.anchor),
            anchor_coef_C=row(task.anchor_coef_N, dtype),
            behaviour_logprob_C=row(task.behaviour_logprob_N, dtype),
            dtype=dtype,
            need_grad=need_grad,
            compile=task.compile,
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


def logits(hidden_CH: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, V] in ``dtype`` from a product in the weight's dtype, accumulated and kept in float32 on a GPU."""
    hidden_CH = hidden_CH.to(weight_VH.dtype)
    if weight_VH.dtype != dtype and weight_VH.is_cuda:
        return torch.mm(hidden_CH, weight_VH.T, out_dtype=dtype)
    return torch.mm(hidden_CH, weight_VH.T).to(dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def weighted_sum(coef_C: Tensor, value_C: Tensor) -> Tensor:
    """``sum coef * value``, in which a position of coefficient 0 adds exactly 0 whatever its value is."""
    return torch.where(coef_C == 0, 0.0, coef_C * value_C).sum()


def chunk_loss(chunk: ChunkInput, spec: LossSpec) -> ChunkOutput:
    """``sum coef * weight * divergence + sum anchor_coef * anchor divergence`` of one chunk, with gradient."""
    student_CV = logits(chunk.hidden_CH, chunk.weight_VH, chunk.dtype)
    return _dense_reverse_kl(chunk, student_CV)


def _dense_reverse_kl(chunk: ChunkInput, student_CV: Tensor) -> ChunkOutput:
    """The default loss, by the hand-derived gradient of :mod:`verl_opsd.distill.dense`."""
    stats_of = _compiled(dense.reverse_kl_stats) if chunk.compile else dense.reverse_kl_stats
    grad_of = _compiled(dense.reverse_kl_grad) if chunk.compile else dense.reverse_kl_grad
    out = ChunkOutput(loss=student_CV.new_zeros(()))

    def term(signal: Signal, weight_VH: Tensor, coef_C: Tensor) -> tuple[dense.DenseStats, Tensor]:
        assert signal.hidden_NH is not None
        other_CV = logits(signal.hidden_NH, weight_VH, chunk.dtype)
        stats = stats_of(student_CV, other_CV)
        out.loss = out.loss + weighted_sum(coef_C, stats.kl_C)
        out.entropy_C = stats.entropy_C
        if chunk.labels_C is not None:
            out.student_logprob_C = _pick(student_CV, chunk.labels_C) - stats.student_norm_C
        if chunk.need_grad:
            grad_CV = grad_of(student_CV, other_CV, stats, coef_C, chunk.weight_VH.dtype)
            out.grad_CV = grad_CV if out.grad_CV is None else out.grad_CV.add_(grad_CV)
        return stats, other_CV

    if chunk.teacher is not None:
        assert chunk.coef_C is not None and chunk.teacher_weight_VH is not None
        stats, teacher_CV = term(chunk.teacher, chunk.teacher_weight_VH, chunk.coef_C)
        out.divergence_C, out.agree_C = stats.kl_C, stats.agree_C
        out.weight_C = out.coverage_student_C = out.coverage_teacher_C = torch.ones_like(stats.kl_C)
        if chunk.labels_C is not None:
            out.teacher_logprob_C = _pick(teacher_CV, chunk.labels_C) - stats.teacher_norm_C
        del teacher_CV
    if chunk.anchor is not None:
        assert chunk.anchor_coef_C is not None
        out.anchor_C = term(chunk.anchor, chunk.weight_VH, chunk.anchor_coef_C)[0].kl_C
    return out


def _pick(value_CV: Tensor, labels_C: Tensor) -> Tensor:
    return value_CV.gather(-1, labels_C[:, None])[:, 0]
