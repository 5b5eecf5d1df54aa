"""Bytes of a distillation step and of a scoring pass, by part, from the models' shapes.

The formulas count what this project's code holds at its peak; benchmarks/pair.py prints them beside what it measures. Bytes, one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from verl_opsd.distill.chunk import ONE_PASS_ROWS, ROWS
from verl_opsd.errors import OpsdError
from verl_opsd.models.checkpointing import Plan, plan
from verl_opsd.planning.shape import BF16, Kind, ModelShape

#: Part of a device's memory that the allocator can't use for one more tensor, and bytes of the CUDA context and libraries.
SPREAD, CONTEXT = 0.03, 1.5e9
#: Tokens of a slice of the vocabulary in a whole chunk of the head's one pass (``distill.blocks_triton.SLICE``; its module needs Triton).
HEAD_SLICE = 11264
#: Most tokens of one part of a scoring pass: activations of a part are what a forward needs beside weights and carried keys and values.
PART = 18432
#: Sizes of parts are multiples of this: tiles of matrix products are.
TILE = 256
#: Bytes of a trained parameter: float32 master, gradient and two moments.
TRAINED = 16
#: Bytes that a rollout server's process of its own keeps on a device while it sleeps: its CUDA context and graphs.
ASLEEP = 3e9


def in_gb(parts: Mapping[str, float]) -> str:
    """Parts of a device's memory, for messages; those of no bytes are left out."""
    return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts.items() if value)


def usable(device_bytes: float) -> float:
    """Bytes of a device that tensors can take."""
    return device_bytes * (1 - SPREAD) - CONTEXT


def head_bytes(shape: ModelShape) -> float:
    """Of the vocabulary head at work (benchmarks/head.py): two numbers of 16 bits a logit and a slice of float32 logits of both sides in
    one pass, or float32 logits of both sides and their gradient in two."""
    one_pass = ONE_PASS_ROWS * (4 * shape.vocab + 8 * HEAD_SLICE)
    return max(one_pass, ROWS * shape.vocab * (4 + 4 + BF16 + 2))


def backward_bytes(shape: ModelShape, kind: Kind) -> float:
    """Of one token in one layer's backward, above what it reads: the gated MLP at work, or attention or the delta rule at work once the
    MLP's own activations are gone.

    A fused gate writes the gradients of its inputs over the inputs.
    """
    mlp = BF16 * (2 * shape.hidden + (1 if shape.fused else 3) * shape.intermediate)
    mixer: float = BF16 * (2 * shape.hidden + 6 * shape.query) + 4 * shape.query
    if kind == "linear_attention":
        states = 2 * shape.linear_value_heads * shape.linear_key_dim * shape.linear_value_dim / 64
        mixer = BF16 * (2 * shape.hidden + states + 9 * shape.linear_values)
    return max(mlp, mixer - shape.saved_mlp_bytes())


def forward_bytes(shape: ModelShape) -> float:
    """Of one token in a forward without gradient: the largest layer at work, with the two hidden states that it got, its sum and its norm."""
    states = shape.linear_value_heads * shape.linear_key_dim * shape.linear_value_dim / 64
    mixed = 2 * shape.linear_keys + shape.linear_values
    mlp = 4 * shape.hidden + 3 * shape.intermediate
    linear = 4 * shape.hidden + 2 * mixed + 5 * shape.linear_values + states
    return BF16 * max(mlp, linear, 4 * shape.hidden + 5 * shape.query)


def step_bytes(shape: ModelShape, tokens: int, chosen: Plan) -> float:
    """Of a student's step on ``tokens`` tokens, beside weights and optimizer state.

    Backward goes from the last layer to the first: at each one the layers before it still keep theirs, and this one has all that it
    reads, kept or made again, and works.
    """
    before, peak = 0.0, head_bytes(shape)
    for kind, keep in zip(shape.kinds, chosen.keep, strict=True):
        stays = shape.kept_bytes(kind) if keep else (0 if chosen.offload else shape.boundary_bytes())
        again = shape.remade_bytes(kind) if keep else shape.saved_bytes(kind)
        peak = max(peak, tokens * (before + stays + again + backward_bytes(shape, kind)) + head_bytes(shape))
        before += stays
    return peak


def student_bytes(shape: ModelShape, rank: int) -> float:
    """Weights in bf16, adapters of this rank in float32 with their gradients and moments; rank 0: all parameters are trained."""
    return BF16 * shape.parameters + TRAINED * shape.lora_parameters(rank) if rank else float(TRAINED * shape.parameters)


def teacher_bytes(shape: ModelShape, fp8: bool = False) -> float:
    """Weights in bf16; of an FP8 teacher those of the layers in one byte each."""
    return float(BF16 * shape.parameters - (shape.body if fp8 else 0))


def part_tokens(tokens: int, most: int = PART) -> int:
    """Tokens of each part but the last of a scoring pass: as few parts of at most ``most`` as there can be, and all of about one size.

    A short part takes as many launches as a long one, and its products don't fill a device.
    """
    even = math.ceil(tokens / math.ceil(tokens / most))
    return min(math.ceil(even / TILE) * TILE, most)


def carries(shape: ModelShape, ranks: int) -> bool:
    """Whether a device teacher (``teachers.device``) hands its state on: from part to part, and from a shared prefix to its branches. A model
    without linear attention, and one that is sharded over ``ranks``, scores every sequence whole."""
    return "linear_attention" in shape.kinds and ranks == 1


def at_once(shape: ModelShape, tokens: int, ranks: int, part: int = PART) -> int:
    """Most tokens of one forward of a device teacher."""
    return part if carries(shape, ranks) else tokens


def score_bytes(shape: ModelShape, tokens: int, part: int, forked: bool = False) -> float:
    """Of scoring passes of up to ``tokens`` tokens, beside weights: a part at work (never more than ``part`` tokens, :func:`part_tokens`), and
    keys and values that are carried, once more while one layer's grow.

    Args:
        forked: passes of a row may share a prefix, whose keys and values stay while each of them has its own.
    """
    whole = tokens * shape.carried_bytes()
    layers = max(shape.kinds.count("full_attention"), 1)
    carried = whole * (1 + 1 / layers) if tokens > part or forked else 0
    return min(tokens, part) * forward_bytes(shape) + carried + (whole if forked else 0)


def choose_plan(shape: ModelShape, tokens: int, budget_bytes: float, offload: bool | None = None) -> Plan:
    """The most layers that keep their activations in a step that may take ``budget_bytes`` beside weights and optimizer state.

    Args:
        offload: whether inputs of checkpointed layers wait on the host; None: only where nothing fits without.

    Raises:
        OpsdError: the step does not fit even with every layer checkpointed.
    """
    tried = (False, True) if offload is None else (offload,)
    for away in tried:
        for kept in range(len(shape.kinds), -1, -1):
            chosen = plan(shape, tokens, kept, away)
            if step_bytes(shape, tokens, chosen) <= budget_bytes:
                return chosen
    least = step_bytes(shape, tokens, plan(shape, tokens, 0, offload=tried[-1]))
    if budget_bytes < 0:
        raise OpsdError(
            f"no memory for a step on {tokens} tokens: what stays beside it takes {-budget_bytes / 1e9:.1f} GB more than there is",
            f"with all weights elsewhere, a step takes {least / 1e9:.1f} GB at least",
            "give the student more devices or larger ones",
        )
    inputs = "on the host" if tried[-1] else "kept on the device"
    raise OpsdError(
        f"a step on {tokens} tokens in {budget_bytes / 1e9:.1f} GB",
        f"with every layer's input {inputs}, one layer at work and the vocabulary head take {least / 1e9:.1f} GB",
        "shorten the context, or give the student more devices" + ("" if tried[-1] else ", or let inputs wait on the host"),
    )


def activations(shape: ModelShape, tokens: int, keep: str, offload: bool | None, budget_bytes: float) -> Plan:
    """Which layers keep their activations, by the words of ``opsd.activations``.

    Args:
        keep: ``none``, a kind of layers, or ``auto`` (:func:`choose_plan`).
        budget_bytes: that a step may take; read by ``auto`` alone.

    Raises:
        OpsdError: the model has no layer of that kind, or nothing fits.
    """
    if keep == "auto":
        return choose_plan(shape, tokens, budget_bytes, offload)
    if keep != "none" and keep not in shape.kinds:
        raise OpsdError(
            f"opsd.activations.keep={keep} for a model of {', '.join(sorted(set(shape.kinds)))} layers",
            "it names a kind of layers that the model has",
            "set opsd.activations.keep to none, auto or a kind that is there",
        )
    return Plan(tuple(kind == keep for kind in shape.kinds), bool(offload))
