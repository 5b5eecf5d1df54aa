"""One micro-batch of a distillation step: from rows to the head's task, and from its result to verl's record. Needs no verl.

Suffixes: N loss positions of the micro-batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_opsd.distill.head import HeadResult, HeadTask
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip, ppo_loss
from verl_opsd.distill.weights import threshold_mask
from verl_opsd.errors import OpsdError
from verl_opsd.teachers.base import Voice
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import flat, jagged, layout_index, signal_of, signal_rows, teacher_of_rows

#: Values of ``HeadResult`` that a step reports for each loss position, as metrics ``opsd/<name>``.
TOKEN_VALUES = tuple(name.removesuffix("_N") for name in HeadResult.__dataclass_fields__)
#: Row fields that a step reports beside them, so that the values can be grouped.
ROW_VALUES = ("coef", "class", "turn", "position")


#: Name (``Signal.head_id``) and weight [V, H] of a vocabulary head; None: the student's own.
Head = tuple[str, Tensor | None]


@dataclass(frozen=True)
class OutsideTeacher:
    """A teacher that scored elsewhere: the form of its rows, and the vocabulary weight [V, H] of an exact one."""

    voice: Voice
    weight_VH: Tensor | None


def loss_task(
    batch: Mapping[str, Tensor],
    loss: OpsdLoss,
    teacher: Head | Sequence[OutsideTeacher],
    reference: Head,
    ranks: int,
    packed: bool,
) -> HeadTask:
    """The head's task for a micro-batch.

    Args:
        batch: rows (``tokens.rows``) with ``opsd_signal`` (and ``opsd_base``), on the device.
        teacher, reference: vocabulary heads under which ``opsd_signal`` and ``opsd_base`` are read; of teachers that scored elsewhere all,
            of which each row names one.
        ranks: data-parallel ranks; FSDP averages over them, so coefficients are multiplied by their number.
        packed: rows one after another in one sequence; otherwise right-padded (``passes.layout_index``).

    Raises:
        OpsdError: a signal is missing or of another length, or coefficients would not be used.
    """
    ids, positions = batch["input_ids"].unbind(), batch["opsd_position"].unbind()
    counts = [len(p) for p in positions]
    anchor_N = flat(batch, "opsd_anchor")
    for name, used in (("anchor", loss.anchor), ("reward", loss.task_reward is not None)):
        value_N = flat(batch, f"opsd_{name}")
        if not used and bool((value_N != 0).any()):
            raise OpsdError(
                f"rows with opsd_{name} of {value_N.unique().tolist()[:5]} under a loss without that term",
                "a coefficient that is not used would vanish silently",
                f"set the term in OpsdLoss, or build the rows with opsd_{name} = 0",
            )
        if loss.divide_by_kept and bool((value_N != 0).any()):
            raise OpsdError(
                f"rows with opsd_{name} under a loss that is divided by the kept positions",
                "one number divides the step's whole gradient, and this term has its own denominator",
                f"take the threshold at collection, or build the rows with opsd_{name} = 0",
            )
    spec = loss.spec
    signal, weight_VH = None, None
    if spec.divergence == "nll":  # of the sampled tokens: there is no teacher
        pass
    elif isinstance(teacher, tuple):
        signal, weight_VH = signal_of(batch, "opsd_signal", counts, teacher[0]), teacher[1]
    else:
        outside = teacher[teacher_of_rows(batch, counts, len(teacher))]
        signal = outside.voice.unpack(torch.cat(signal_rows(batch, "opsd_signal", counts)))
        weight_VH = outside.weight_VH
        if outside.voice.form == "support" and not spec.sampled:
            spec = _of_given_support(spec, outside.voice)
    return HeadTask(
        kind="loss",
        index_N=layout_index([len(x) for x in ids], positions, packed),
        labels_N=torch.cat([x[p + 1] for x, p in zip(ids, positions, strict=True)]),
        teacher=signal,
        teacher_weight_VH=weight_VH,
        coef_N=flat(batch, "opsd_coef") * ranks,
        anchor=signal_of(batch, "opsd_base", counts, reference[0]) if loss.anchor else None,
        anchor_weight_VH=reference[1] if loss.anchor else None,
        anchor_coef_N=anchor_N * ranks if loss.anchor else None,
        loss=spec,
        chunk=loss.chunk,
        policy=loss.task_reward is not None,
        behaviour_logprob_N=flat(batch, "opsd_behaviour") if loss.spec.divergence == "policy_gradient" else None,
    )


def _of_given_support(spec: LossSpec, voice: Voice) -> LossSpec:
    """The loss on the support that a teacher's rows bring: the top k that an exact teacher is cut to.

    Raises:
        OpsdError: the loss asks for another support.
    """
    given = voice.width // 2 - 1
    if spec.support != "signal" and (spec.support, spec.top_k) != ("teacher_topk", given):
        raise OpsdError(
            f"support={spec.support} top_k={spec.top_k} with teacher {voice.name}, which gives its {given} most probable tokens",
            "a given support is the teacher's; no other can be made of it",
            "set support=teacher_topk and the teacher's top_k, or use a teacher of hidden states",
        )
    return dataclasses.replace(spec, support="signal", top_k=None)


def task_reward_loss(batch: Mapping[str, Tensor], task: HeadTask, clip: PpoClip, ranks: int, mine_N: Tensor | None) -> Tensor:
    """PPO's term of a micro-batch, 0-d.

    Args:
        ranks: as in :func:`loss_task`.
        mine_N: positions that ``task.log_probs_N`` covers; None: all.
    """
    assert task.log_probs_N is not None
    behaviour_N, reward_N = flat(batch, "opsd_behaviour"), flat(batch, "opsd_reward") * ranks
    if mine_N is not None:
        behaviour_N, reward_N = behaviour_N[mine_N], reward_N[mine_N]
    return ppo_loss(task.log_probs_N, behaviour_N, reward_N, clip)


def kept_coefficient(batch: Mapping[str, Tensor], result: HeadResult, above: float) -> Tensor:
    """Sum of the coefficients of the positions whose divergence is above ``above`` nats; float64, 0-d."""
    return (flat(batch, "opsd_coef") * threshold_mask(result.divergence_N, above)).to(torch.float64).sum()


def metrics_of(batch: Mapping[str, Tensor], result: HeadResult, step: int) -> dict[str, list[float]]:
    """A flat list for each of ``TOKEN_VALUES`` and ``ROW_VALUES``, ``opsd/turn_position``, ``opsd/step``, the optimizer step, and where rows
    have them ``opsd/teacher``, the number of its teacher, and ``opsd/row``, its own."""
    metrics = {f"opsd/{k}": getattr(result, f"{k}_N").tolist() for k in TOKEN_VALUES}
    metrics |= {f"opsd/{k}": flat(batch, f"opsd_{k}").tolist() for k in ROW_VALUES}
    metrics["opsd/turn_position"] = torch.cat([turn_position(t) for t in batch["opsd_turn"].unbind()]).tolist()
    for name in ("teacher", "row"):
        if f"opsd_{name}" in batch:
            pairs = zip(batch[f"opsd_{name}"].unbind(), batch["opsd_position"].unbind(), strict=True)
            metrics[f"opsd/{name}"] = [int(number[0]) for number, position in pairs for _ in range(len(position))]
    metrics["opsd/step"] = [step] * len(metrics["opsd/coef"])
    return metrics


def turn_position(turn_N: Tensor) -> Tensor:
    """Loss positions of the same turn before each one, of one row, int64[N]; a turn's positions are beside each other."""
    place_N = torch.arange(len(turn_N), device=turn_N.device)
    first_N = torch.ones_like(turn_N, dtype=torch.bool)
    first_N[1:] = turn_N[1:] != turn_N[:-1]
    return place_N - torch.where(first_N, place_N, 0).cummax(0).values


def values_by_row(batch: Mapping[str, Tensor], result: HeadResult) -> dict[str, Tensor]:
    """Fields ``value_<name>`` for each of ``TOKEN_VALUES``, jagged by row."""
    counts: Sequence[Any] = [len(p) for p in batch["opsd_position"].unbind()]
    return {f"value_{k}": jagged(getattr(result, f"{k}_N").split(counts)) for k in TOKEN_VALUES}
