"""What the tests of known faults share: a spec for every code path, and a head without a model."""

from __future__ import annotations

import torch

from verl_opsd.distill.head import HeadTask, LossPositionHead, install_head
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import SurprisalGate

ALL_PATHS = [
    LossSpec(),
    LossSpec(weights=(SurprisalGate(1.0, -2.0),)),
    LossSpec(divergence="forward_kl"),
    LossSpec(divergence="jsd", beta=0.5),
    LossSpec(divergence="skewed_reverse_kl", skew=0.1),
    LossSpec(divergence="skewed_forward_kl", skew=0.1),
    LossSpec(support="student_topk", top_k=3),
    LossSpec(support="teacher_topk", top_k=3),
    LossSpec(divergence="forward_kl", support="union_topk", top_k=3),
    LossSpec(divergence="k1"),
    LossSpec(divergence="k2"),
    LossSpec(divergence="k3"),
]


def cut(task: HeadTask, rows: torch.Tensor) -> HeadTask:
    """The task at some of its positions."""

    def signal(s: Signal) -> Signal:
        return Signal(hidden_NH=s.hidden_NH[rows], head_id=s.head_id)

    return HeadTask(
        kind="loss",
        index_N=task.index_N[rows],
        labels_N=task.labels_N[rows],
        teacher=signal(task.teacher),
        teacher_weight_VH=task.teacher_weight_VH,
        coef_N=task.coef_N[rows],
        anchor=signal(task.anchor),
        anchor_coef_N=task.anchor_coef_N[rows],
        loss=task.loss,
        chunk=task.chunk,
    )


def bare_head(hidden: int, vocab: int) -> LossPositionHead:
    model, linear = torch.nn.Module(), torch.nn.Linear(hidden, vocab, bias=False)
    model.get_output_embeddings = lambda: linear
    return install_head(model)
