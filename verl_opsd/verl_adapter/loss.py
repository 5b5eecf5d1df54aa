"""`OpsdLoss`: the loss function that selects distillation. Plain values; importing it loads neither verl nor a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from verl_opsd.distill.loss import LossSpec


@dataclass(frozen=True)
class OpsdLoss:
    """The loss function that selects distillation; give it to verl's ``set_loss_fn``.

    Attributes:
        spec: divergence, support and data-dependent weights.
        chunk: loss positions per chunk of the vocabulary head.
        teacher: whose signal ``opsd_signal`` is. ``self``: the reference weights, scored by the engine, under the student's own
            vocabulary head. ``device``: another model, scored before the update, under the head given to ``set_teacher_head``.
        reference: weights of the self teacher, of the controls and of the anchor. ``adapter_off``: the student's base, with its adapters
            switched off. ``initial``: a frozen copy of the trainable weights as they were when this loss was set.
        anchor: whether the divergence from the reference on the student's own ids is part of the loss; its coefficients are
            the rows' ``opsd_anchor``.
    """

    spec: LossSpec = field(default_factory=LossSpec)
    chunk: int = 256
    teacher: Literal["self", "device"] = "self"
    reference: Literal["adapter_off", "initial"] = "adapter_off"
    anchor: bool = False
