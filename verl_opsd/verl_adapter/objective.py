"""What a configuration trains towards: the engine's loss, and whether anything but the student's own base teaches."""

from __future__ import annotations

from verl_opsd.config import OpsdConfig
from verl_opsd.distill.policy import PpoClip
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.routes import models_of


def loss_of(opsd: OpsdConfig, lora: bool, clip: PpoClip) -> OpsdLoss:
    """The engine's loss for a configuration; the reference is the adapter switched off, or the initial weights without one."""
    return OpsdLoss(
        spec=opsd.loss.spec(),
        chunk=opsd.loss.chunk,
        reference="adapter_off" if lora else "initial",
        teacher="device" if models_of(opsd) else opsd.teacher.kind,  # type: ignore[arg-type]
        decay=opsd.teacher.decay,
        lag=opsd.teacher.lag,
        task_reward=clip if opsd.loss.task_reward_coef > 0 else None,
        divide_by_kept=opsd.loss.threshold is not None
        and (opsd.loss.threshold.taken, opsd.loss.threshold.denominator) == ("current", "kept"),
        anchor=opsd.loss.anchor > 0 or opsd.loss.drift,
    )


def is_identity(opsd: OpsdConfig) -> bool:
    """Whether nothing but the student's own base, without a brief, says where the student goes."""
    alone = opsd.loss.task_reward_coef == 0 and opsd.loss.divergence != "nll"
    return alone and (opsd.brief.name, opsd.teacher.kind) == ("none", "self")
