"""Whether a run fits its accelerators, by the planner's formulas (``verl_opsd.planning``), before one is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.models.checkpointing import plan
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
        parts = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in self.parts.items() if value)
        return f"{self.side}: {self.total / 1e9:.1f} of {self.room / 1e9:.1f} GB ({parts})"


def needs(
    config: DictConfig, opsd: OpsdConfig, student: ModelShape, teachers: Mapping[str, ModelShape], device: float
) -> list[Need]:
    """What the devices of each side need at the contract's whole context.

    Args:
        teachers: shapes of the device teachers, by their name. device: bytes of the smallest device.
    """
    actor, model, rollout = (config.actor_rollout_ref[k] for k in ("actor", "model", "rollout"))
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    sequence, tokens, room = actor.ulysses_sequence_parallel_size, opsd.contract.context_length, memory.usable(device)
    layers = len(student.kinds)
    chosen = plan(
        student,
        tokens,
        0 if model.enable_gradient_checkpointing else layers,
        bool(model.get("enable_activation_offload", False)),
    )
    step = memory.step_bytes(student, tokens // sequence, chosen)
    if sequence > 1 and "linear_attention" in student.kinds:  # such a layer runs over the whole sequence on every rank
        layer = student.kept_bytes("linear_attention") + memory.backward_bytes(student, "linear_attention")
        step += tokens * (1 - 1 / sequence) * layer
    view = (tokens + BRIEF) // sequence
    score = memory.score_bytes(student, view, view) if opsd.teacher.kind in ON_STUDENT else 0.0
    whole = BYTES.get(str(actor.fsdp_config.get("model_dtype")), 4) * student.parameters
    trained = memory.TRAINED * (student.lora_parameters(model.lora_rank) if model.lora_rank else student.parameters)
    weights = ((whole if model.lora_rank else 0) + trained) / ranks
    heads = sum(float(BF16 * student.vocab * t.hidden) for t in teachers.values())
    held = {"weights": weights, "gathered": planner.gathered_bytes(student, ranks), "teachers' vocabulary": heads}
    served = {"rollout server": rollout.gpu_memory_utilization * device} if rollout.name not in OWN_BACKENDS else {}
    shorter = "a shorter opsd.contract.context_length, more student devices, actor.ulysses_sequence_parallel_size, "
    out = [
        Need(
            f"a student rank at {tokens} tokens",
            held
            | {"a step or pass": 0.0 if opsd.mode == "evaluate" else max(step, score)}
            | ({} if rollout.free_cache_engine else served),
            room,
            shorter + "model.enable_activation_offload=true, or rollout.free_cache_engine=true",
        )
    ]
    if served:
        split = rollout.tensor_model_parallel_size
        state = 4.0 * student.kinds.count("linear_attention") * student.linear_value_heads
        state *= student.linear_key_dim * student.linear_value_dim
        out += [
            Need(
                "a student rank while its rollout server is awake",
                {"weights": weights, "teachers' vocabulary": heads} | served,
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
            out.append(
                Need(
                    f"a worker of teacher {name} at {tokens + BRIEF} tokens",
                    {
                        "weights": BYTES[its.dtype] * shape.parameters / its.ranks,
                        "gathered": planner.gathered_bytes(shape, its.ranks),
                        "at work": memory.score_bytes(shape, tokens + BRIEF, planner.PART),
                    },
                    room,
                    "a shorter context, more opsd.teacher.ranks to a copy, or a smaller teacher",
                )
            )
    return out


def check_memory(config: DictConfig, opsd: OpsdConfig) -> list[Need]:
    """Refuses a run that the planner says does not fit this host's accelerators.

    Returns:
        What was planned; nothing on a scale without accelerators.

    Raises:
        OpsdError: naming the side, its parts in GB, and what makes it smaller.
    """
    import torch
    from transformers import AutoConfig

    if not opsd.scale.startswith("gpu") or not torch.cuda.is_available():
        return []
    device = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    student = ModelShape.of(AutoConfig.from_pretrained(str(OmegaConf.select(config, "actor_rollout_ref.model.path"))))
    teachers = {
        name: ModelShape.of(AutoConfig.from_pretrained(str(m.path)))
        for name, m in models_of(opsd).items()
        if m.kind == "device"
    }
    planned = needs(config, opsd, student, teachers, device)
    for need in planned:
        if need.total > need.room:
            raise OpsdError(
                f"scale={opsd.scale} on devices of {device / 1e9:.0f} GB: {need}",
                "a run fits its devices by the formulas of `opsd plan`",
                need.way_out,
            )
    return planned
