"""Layouts of a student and a teacher over devices: what fits, how long a step takes, and which one to take.

A layout gives the teacher devices of its own, each with the whole model or with a part of it, or none: then both share the student's only
device. The student is sharded over its devices (FSDP2). Every device works on trajectories of its own. Beside the student a rollout server
sleeps. Exchanges between devices take no time here. Units: tokens, bytes, seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from verl_opsd.errors import OpsdError
from verl_opsd.models.checkpointing import Plan
from verl_opsd.planning import memory
from verl_opsd.planning.shape import BF16, Kind, ModelShape

#: Contexts are multiples of this.
STEP = 1024
#: Longest context that is tried of models that do not say how long theirs may be.
LONGEST = 262144
#: Share of a corpus' states up to a context, where no corpus is named: the measured prefixes of CooperBench agents of a 9B (seeds).
STATES = ((0, 0.0), (8192, 0.13), (16384, 0.48), (24576, 0.82), (65536, 1.0))


@dataclass(frozen=True)
class Device:
    """What times and sizes depend on.

    Attributes:
        bytes_: of memory.
        matmul: FLOP a second of bf16 products of layers.
        attention: the same of causal attention over heads of 256, forward.
        delta: seconds of the delta rule, convolution, gates and norms, forward, of one token and value head of a linear layer.
    """

    name: str
    bytes_: float
    matmul: float = 7.4e14
    attention: float = 6.4e14
    delta: float = 1.2e-8


#: Both have the same Hopper processor.
DEVICES = {d.name: d for d in (Device("H200", 150e9), Device("H100", 85e9))}
#: Seconds of the backward of these parts over the forward's.
DELTA_BACKWARD, ATTENTION_BACKWARD = 2.5, 4.2


def forward_seconds(shape: ModelShape, device: Device, tokens: int, kinds: Sequence[Kind]) -> float:
    """Of the layers ``kinds`` over one sequence."""
    linear, full = kinds.count("linear_attention"), kinds.count("full_attention")
    parameters = sum(shape.layer_parameters(k) for k in kinds)
    products = 2.0 * parameters / device.matmul
    attention = full * shape.attention_flop(tokens) / device.attention
    return tokens * (products + attention + linear * shape.linear_value_heads * device.delta)


def step_seconds(shape: ModelShape, device: Device, tokens: int, chosen: Plan, all_weights: bool = False) -> float:
    """Of a student's step on one sequence: forward, backward to activations (``all_weights``: and to these), and the second forward of
    checkpointed layers."""
    full, linear = shape.kinds.count("full_attention"), shape.kinds.count("linear_attention")
    again = [k for k, keep in zip(shape.kinds, chosen.keep, strict=True) if not keep]
    # A second forward leaves out each layer's last product.
    skipped = len(again) * 2.0 * shape.hidden * shape.intermediate / device.matmul
    backward = (4.0 if all_weights else 2.0) * shape.body / device.matmul
    backward += full * ATTENTION_BACKWARD * shape.attention_flop(tokens) / device.attention
    backward += linear * DELTA_BACKWARD * shape.linear_value_heads * device.delta
    return (
        forward_seconds(shape, device, tokens, shape.kinds)
        + forward_seconds(shape, device, tokens, again)
        + tokens * (backward - skipped)
    )


@dataclass(frozen=True)
class Layout:
    """``teacher`` devices beside ``student`` ones, ``ranks`` of which hold one copy of the teacher together (FSDP2, ``opsd.teacher.ranks``);
    0: the teacher shares the student's only device, or is the student itself."""

    student: int
    teacher: int
    ranks: int = 1

    def __str__(self) -> str:
        if self.teacher == 0:
            return "both on one device" if self.student == 1 else f"student over {self.student}, its own teacher"
        return f"student over {self.student}, teacher on {self.teacher}" + (f" (ranks={self.ranks})" if self.ranks > 1 else "")

    def copies(self) -> list[Layout]:
        """The same devices with the teacher's copies over one device each, then over as few more as there can be."""
        return [replace(self, ranks=n) for n in range(1, max(self.teacher, 1) + 1) if self.teacher % n == 0]


@dataclass(frozen=True)
class Estimate:
    """One layout at one context. Bytes are of the fullest device of each side, by part; seconds of one trajectory a student device."""

    layout: Layout
    context: int
    plan: Plan
    student_bytes: dict[str, float]
    teacher_bytes: dict[str, float]
    student_seconds: float
    teacher_seconds: float

    @property
    def tokens_a_second(self) -> float:
        """Of the whole layout: trajectories that are both scored and trained on."""
        rounds = self.layout.student * self.context
        if self.layout.teacher == 0:
            return rounds / (self.student_seconds + self.teacher_seconds)
        return rounds / max(self.student_seconds, self.teacher_seconds * self.layout.student / self.layout.teacher)


def layouts(gpus: int, own: bool = False) -> list[Layout]:
    """Every split of ``gpus`` devices. ``own``: the student is its own teacher, so all are the student's.

    Raises:
        OpsdError: no device.
    """
    if gpus < 1:
        raise OpsdError(f"{gpus} devices", "a pair needs at least one", "name the number of devices")
    return [Layout(gpus, 0)] if own or gpus == 1 else [Layout(gpus - t, t) for t in range(1, gpus)]


def gathered_bytes(shape: ModelShape, ranks: int) -> float:
    """What FSDP2 gathers of a model over several devices: two layers at a time, and the vocabulary's weights."""
    layers = 2 * max(shape.layer_parameters(k) for k in shape.kinds)
    return float(BF16 * (layers + shape.parameters - shape.body)) if ranks > 1 else 0.0


def estimate(
    student: ModelShape,
    teacher: ModelShape | None,
    layout: Layout,
    device: Device,
    context: int,
    rank: int,
    brief: int,
    part: int,
) -> Estimate:
    """What a layout takes at a context.

    Args:
        teacher: None: the student itself (its base, or a copy of the adapter), which scores every view whole.
        rank: of the student's adapters; 0: all its parameters are trained. brief: tokens that the teacher's view has beyond the context. part: most
            tokens of a part of a pass that runs in parts.

    Raises:
        OpsdError: it does not fit; the message names the side.
    """
    room, scorer, tokens = memory.usable(device.bytes_), teacher or student, context + brief
    held = {
        "weights": memory.student_bytes(student, rank) / layout.student,
        "gathered": gathered_bytes(student, layout.student),
        "teacher's vocabulary": BF16 * student.vocab * scorer.hidden if layout.teacher else 0.0,
        "rollout server asleep": memory.ASLEEP,
    }
    scoring = memory.score_bytes(scorer, tokens, memory.at_once(teacher, tokens, layout.ranks, part) if teacher else tokens)
    scores = {}
    if teacher is not None:
        scores["teacher's weights"] = memory.teacher_bytes(teacher) / layout.ranks
        scores["teacher's gathered"] = gathered_bytes(teacher, layout.ranks)
    if layout.teacher == 0:
        held |= scores
    needed = (held if layout.teacher == 0 else scores) | {"its pass at work": scoring}
    if sum(needed.values()) > room:
        raise OpsdError(
            f"teacher of {memory.teacher_bytes(scorer) / 1e9:.0f} GB scoring {tokens} tokens on {device.name}",
            f"its device holds {room / 1e9:.1f} GB and would take {sum(needed.values()) / 1e9:.1f} ({memory.in_gb(needed)})",
            "shorten the context, take a smaller teacher, or give its copies more devices each",
        )
    if sum(held.values()) > room:
        raise OpsdError(
            f"student of {student.parameters / 1e9:.1f} B parameters over {layout.student} of {device.name}",
            f"each holds {room / 1e9:.1f} GB, and before a step would take {sum(held.values()) / 1e9:.1f} ({memory.in_gb(held)})",
            "give the student more devices, or train adapters",
        )
    chosen = memory.choose_plan(student, context, room - sum(held.values()))
    step = memory.step_bytes(student, context, chosen)
    return Estimate(
        layout,
        context,
        chosen,
        held | {"a step or pass": max(step, scoring if layout.teacher == 0 else 0.0)},
        {} if layout.teacher == 0 else scores | {"at work": scoring},
        step_seconds(student, device, context, chosen, all_weights=rank == 0),
        forward_seconds(scorer, device, tokens, scorer.kinds),
    )


def fewest_ranks(layout: Layout, at: Callable[[Layout], Estimate]) -> Estimate:
    """``at`` of a layout with each copy of the teacher over as few devices as hold it.

    Raises:
        OpsdError: none fits; that of the copies over the most devices.
    """
    *fewer, most = layout.copies()
    for one in fewer:
        with suppress(OpsdError):
            return at(one)
    return at(most)


def check_positions(student: ModelShape, teacher: ModelShape | None, context: int, brief: int) -> None:
    """
    Raises:
        OpsdError: a model is not made for so many tokens.
    """
    for side, shape, tokens in (("student", student, context), ("teacher", teacher or student, context + brief)):
        if shape.positions is not None and tokens > shape.positions:
            raise OpsdError(
                f"{tokens} tokens for a {side} of {shape.positions} positions",
                "a model reads no more tokens than its max_position_embeddings; the teacher's view has the brief's beside the context",
                "shorten the context, or choose another model",
            )


def most_tokens(student: ModelShape, teacher: ModelShape | None, brief: int) -> int:
    """The longest context that both models are made for; :data:`LONGEST` where neither says."""
    view = (teacher or student).positions
    limits = (student.positions, None if view is None else view - brief)
    return max(min((n for n in limits if n is not None), default=LONGEST), 0)


def largest(fits: Callable[[int], bool], most: int = LONGEST) -> int:
    """The largest multiple of :data:`STEP` up to ``most`` that fits; 0 where none does. What fits is monotone."""
    low, high = 0, most // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle - 1)
    return low * STEP


def share_of_states(context: int, lengths: Sequence[int] | None) -> float:
    """Share of a corpus' states that a context holds: of ``lengths`` (tokens of each state), or of :data:`STATES`."""
    if lengths is not None:
        return sum(n <= context for n in lengths) / len(lengths)
    if context >= STATES[-1][0]:
        return 1.0
    (a, low), (b, high) = next((x, y) for x, y in itertools.pairwise(STATES) if context < y[0])
    return low + (high - low) * (context - a) / (b - a)


def best(found: Sequence[Estimate]) -> Estimate:
    """The layout of the most tokens a second."""
    return max(found, key=lambda e: e.tokens_a_second)
