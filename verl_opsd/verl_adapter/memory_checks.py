"""Whether a run fits its accelerators, by the planner's formulas (``verl_opsd.planning``), before one is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.models.checkpointing import Plan
from verl_opsd.models.kernels import Choice, Facts, choose
from verl_opsd.planning import memory, planner
from verl_opsd.planning.shape import BF16, BRIEF, ModelShape
from verl_opsd.verl_adapter.loss import ON_STUDENT
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS
from verl_opsd.verl_adapter.routes import models_of

#: Bytes of a parameter, by the name of a dtype.
BYTES = {"bf16": 2, "bfloat16": 2, "float16": 2, "fp32": 4, "float32": 4}


@dataclass(frozen=True)
class Need:
    """Bytes of one device, by part, against what tensors can take there.

    Attributes:
        side: who needs it, for messages; way_out: what makes it smaller.
    """

    side: str
    parts: Mapping[str, float]
    room: float
    way_out: str

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        return f"{self.side}: {self.total / 1e9:.1f} of {self.room / 1e9:.1f} GB ({memory.in_gb(self.parts)})"


def forward_tokens(config: DictConfig, opsd: OpsdConfig) -> int:
    """Tokens of a rank's longest forward with gradients: rows of the contract's whole context, as many as share one."""
    actor = config.actor_rollout_ref.actor
    row: int = -(-opsd.contract.context_length // actor.ulysses_sequence_parallel_size)
    if actor.use_dynamic_bsz:
        return max(row, actor.ppo_max_token_len_per_gpu)
    return row * (actor.ppo_micro_batch_size_per_gpu or 1)


def held_bytes(
    config: DictConfig, opsd: OpsdConfig, student: ModelShape, teachers: Mapping[str, ModelShape], device: float
) -> dict[str, float]:
    """What a student's rank holds beside a step, by part; arguments as of :func:`needs`."""
    actor, model, rollout = (config.actor_rollout_ref[k] for k in ("actor", "model", "rollout"))
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    whole = BYTES.get(str(actor.fsdp_config.get("model_dtype")), 4) * student.parameters
    trained = memory.TRAINED * (student.lora_parameters(model.lora_rank) if model.lora_rank else student.parameters)
    served = 0.0 if rollout.name in OWN_BACKENDS else rollout.gpu_memory_utilization * device
    return {
        "weights": ((whole if model.lora_rank else 0) + trained) / ranks,
        "gathered": planner.gathered_bytes(student, ranks),
        "teachers' vocabulary": sum(float(BF16 * student.vocab * t.hidden) for t in teachers.values()),
        "rollout server": min(served, memory.ASLEEP) if rollout.free_cache_engine else served,
    }


def shared_layer_bytes(config: DictConfig, opsd: OpsdConfig, student: ModelShape) -> float:
    """With sequence parallelism: of a linear layer, which runs over the whole sequence on every rank, beside this rank's slice."""
    sequence = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    if sequence == 1 or "linear_attention" not in student.kinds:
        return 0.0
    layer = student.saved_bytes("linear_attention") + memory.backward_bytes(student, "linear_attention")
    return forward_tokens(config, opsd) * (sequence - 1) * layer


def activation_plan(
    config: DictConfig, opsd: OpsdConfig, student: ModelShape, teachers: Mapping[str, ModelShape], device: float | None
) -> Plan:
    """Which layers of the student keep their activations, as ``opsd.activations`` says.

    Args:
        device: bytes of the smallest device of a student's rank; None where there is none. Others as of :func:`needs`.

    Raises:
        OpsdError: the model has no layer of the kind that is named, ``auto`` without a device's size, or nothing fits.
    """
    asked, model = opsd.activations, config.actor_rollout_ref.model
    if asked.keep == "verl":
        keeps, layers = not model.enable_gradient_checkpointing, len(student.kinds)
        return Plan((keeps,) * layers, bool(model.get("enable_activation_offload", False)))
    if asked.device_gb is not None:
        device = asked.device_gb * 1e9
    if asked.keep == "auto" and device is None:
        raise OpsdError(
            "opsd.activations.keep=auto and no accelerator",
            "as many layers keep their activations as a device's memory holds",
            "name its size with opsd.activations.device_gb, or set opsd.activations.keep",
        )
    room = 0.0
    if device is not None:
        held = held_bytes(config, opsd, student, teachers, device)
        room = memory.usable(device) - sum(held.values()) - shared_layer_bytes(config, opsd, student)
    return memory.activations(student, forward_tokens(config, opsd), asked.keep, asked.offload, room)


def needs(
    config: DictConfig, opsd: OpsdConfig, student: ModelShape, teachers: Mapping[str, ModelShape], device: float
) -> list[Need]:
    """What the devices of each side need at the contract's whole context.

    Args:
        teachers: shapes of the device teachers, by their name. device: bytes of the smallest device.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    sequence, tokens, room = actor.ulysses_sequence_parallel_size, opsd.contract.context_length, memory.usable(device)
    try:
        chosen = activation_plan(config, opsd, student, teachers, device)
    except OpsdError:
        if opsd.activations.keep != "auto":
            raise
        chosen = Plan(
            (False,) * len(student.kinds), opsd.activations.offload is not False
        )  # the least there is; it does not fit
    step = memory.step_bytes(student, forward_tokens(config, opsd), chosen) + shared_layer_bytes(config, opsd, student)
    view = (tokens + BRIEF) // sequence
    score = memory.score_bytes(student, view, view) if opsd.teacher.kind in ON_STUDENT else 0.0
    held = held_bytes(config, opsd, student, teachers, device)
    served = {"rollout server": rollout.gpu_memory_utilization * device} if rollout.name not in OWN_BACKENDS else {}
    shorter = "a shorter opsd.contract.context_length, more student devices, actor.ulysses_sequence_parallel_size, "
    out = [
        Need(
            f"a student rank at {tokens} tokens",
            held | {"a step or pass": 0.0 if opsd.mode == "evaluate" else max(step, score)},
            room,
            shorter + "opsd.activations.keep=none, opsd.activations.offload=true, or rollout.free_cache_engine=true",
        )
    ]
    if served:
        split = rollout.tensor_model_parallel_size
        state = 4.0 * student.kinds.count("linear_attention") * student.linear_value_heads
        state *= student.linear_key_dim * student.linear_value_dim
        out += [
            Need(
                "a student rank while its rollout server is awake",
                {k: held[k] for k in ("weights", "teachers' vocabulary")} | served,
                room,
                "a lower rollout.gpu_memory_utilization",
            ),
            Need(
                f"a rollout server with one conversation of {tokens} tokens",
                {
                    "weights": BF16 * student.parameters / split,
                    "keys and values": tokens * student.carried_bytes() / split,
                    "recurrent states": rollout.max_num_seqs * state / split,
                },
                served["rollout server"],
                "a higher rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size, or a lower rollout.max_num_seqs",
            ),
        ]
    for name, its in models_of(opsd).items():
        if its.kind == "device":
            shape = teachers[name]
            whole = memory.teacher_bytes(shape, fp8=True) if its.fp8 else BYTES[its.dtype] * shape.parameters
            whole_view = tokens + BRIEF
            part = memory.at_once(shape, whole_view, its.ranks)
            out.append(
                Need(
                    f"a worker of teacher {name} at {whole_view} tokens",
                    {
                        "weights": whole / its.ranks,
                        "gathered": planner.gathered_bytes(shape, its.ranks),
                        "at work": memory.score_bytes(shape, whole_view, part, forked=memory.carries(shape, its.ranks)),
                    },
                    room,
                    "a shorter context, more opsd.teacher.ranks to a copy, or a smaller teacher",
                )
            )
    return out


def shapes_of(config: DictConfig, opsd: OpsdConfig, choice: Choice) -> tuple[ModelShape, dict[str, ModelShape]]:
    """The student's shape, and those of the device teachers by name."""
    from transformers import AutoConfig

    teachers = {
        name: ModelShape.of(AutoConfig.from_pretrained(str(m.path)))
        for name, m in models_of(opsd).items()
        if m.kind == "device"
    }
    student = AutoConfig.from_pretrained(str(OmegaConf.select(config, "actor_rollout_ref.model.path")))
    return ModelShape.of(student, fused=choice.fuses(student)), teachers


def check_memory(config: DictConfig, opsd: OpsdConfig) -> list[Need]:
    """Refuses a run that the planner says does not fit this host's accelerators.

    Returns:
        What was planned; nothing on a scale without accelerators.

    Raises:
        OpsdError: naming the side, its parts in GB, and what makes it smaller; or activations that can't be kept as they were asked for.
    """
    import torch

    asked = opsd.mode != "evaluate" and opsd.activations.keep != "verl"
    here = opsd.scale.startswith("gpu") and torch.cuda.is_available()
    if asked and not opsd.scale.startswith("gpu"):
        activation_plan(config, opsd, *shapes_of(config, opsd, choose(Facts.of_this_process())), None)
    if not here:
        return []
    device = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    try:
        student, teachers = shapes_of(config, opsd, choose(Facts.of_this_process()))
    except OpsdError:
        if opsd.mode != "evaluate":
            raise
        return []  # a mixture of experts, say, that is played and not trained: its server says what it does not hold
    planned = needs(config, opsd, student, teachers, device)
    for need in planned:
        if need.total > need.room:
            raise OpsdError(
                f"scale={opsd.scale} on devices of {device / 1e9:.0f} GB: {need}",
                "a run fits its devices by the formulas of `opsd plan`",
                need.way_out,
            )
    return planned
