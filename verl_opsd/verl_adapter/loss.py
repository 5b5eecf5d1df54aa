"""`OpsdLoss`: the loss function that selects distillation. Plain values; importing it loads neither verl nor a device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip
from verl_opsd.distill.weights import Threshold
from verl_opsd.errors import OpsdError

#: Teachers that are a copy of the student's own trainable weights (``copies``).
COPIES = ("frozen", "ema", "lagged")
#: Teachers that the student's engine scores, under the student's own vocabulary head.
ON_STUDENT = ("self", *COPIES)


@dataclass(frozen=True)
class OpsdLoss:
    """The loss function that selects distillation; give it to verl's ``set_loss_fn``.

    Attributes:
        spec: divergence, support and data-dependent weights.
        chunk: loss positions per chunk of the vocabulary head; None: ``distill.chunk.default_rows``.
        teacher: whose signal ``opsd_signal`` is. ``self``: the reference weights, scored by the engine, under the student's own
            vocabulary head. ``frozen``, ``ema`` (``decay`` a step), ``lagged`` (``lag`` rounds): a copy of the trainable weights, scored by
            the engine. ``device``: other models, which score elsewhere before the update and are made known by ``add_teacher``.
        reference: weights of the self teacher, of the controls and of the anchor. ``adapter_off``: the student's base, with its adapters
            switched off. ``initial``: a frozen copy of the trainable weights as they were when this loss was set.
        task_reward: bounds of PPO's term of the task reward; its coefficients times advantages are the rows' ``opsd_reward``. None: there
            is no such term.
        divide_by_kept: the step's loss and gradient are divided, once after its last micro-batch, by the coefficients of the
            positions that the spec's :class:`Threshold` kept, over all ranks. The rows' coefficients of a step sum to 1 (token mean).
        anchor: whether the divergence from the reference on the student's own ids (drift) is measured; its coefficients in the loss are
            the rows' ``opsd_anchor``, which may be 0.
    """

    spec: LossSpec = field(default_factory=LossSpec)
    chunk: int | None = None
    teacher: Literal["self", "frozen", "ema", "lagged", "device"] = "self"
    decay: float | None = None
    lag: int | None = None
    reference: Literal["adapter_off", "initial"] = "adapter_off"
    task_reward: PpoClip | None = None
    divide_by_kept: bool = False
    anchor: bool = False

    def __post_init__(self) -> None:
        if (self.decay is not None, self.lag is not None) != (self.teacher == "ema", self.teacher == "lagged"):
            raise OpsdError(
                f"teacher={self.teacher} with decay={self.decay} lag={self.lag}",
                "decay belongs to the ema teacher and lag to the lagged one",
                "give the one that the teacher needs",
            )
        if self.spec.divergence == "nll" and (self.teacher != "self" or self.anchor):
            raise OpsdError(
                f"divergence nll with teacher={self.teacher} anchor={self.anchor}",
                "the likelihood of the student's own tokens has no teacher",
                "use teacher=self without an anchor and without drift",
            )
        if self.divide_by_kept and self.kept_above is None:
            raise OpsdError(
                f"divide_by_kept with weights {self.spec.weights}",
                "what divides the step is the weight that a Threshold kept",
                "put a Threshold into spec.weights, or leave divide_by_kept out",
            )

    @property
    def of_reference(self) -> OpsdLoss:
        """The same loss with the reference weights as the teacher: the anchor, and the controls of a loss whose teacher is another model or
        that has none."""
        spec = LossSpec() if self.spec.divergence == "nll" else self.spec
        return dataclasses.replace(self, spec=spec, teacher="self", decay=None, lag=None)

    @property
    def kept_above(self) -> float | None:
        """Nats above which the spec's threshold keeps a position; None without one."""
        found = [w.above for w in self.spec.weights if isinstance(w, Threshold)]
        return max(found, default=None)
