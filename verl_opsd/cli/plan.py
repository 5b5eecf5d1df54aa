"""``opsd plan``: memory and time of a student and a teacher over devices, before one is touched."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError
from verl_opsd.planning.shape import BRIEF, ModelShape

#: Sizes that need no file.
KNOWN = {
    "qwen3.5-9b": {"max_position_embeddings": 262144},
    "qwen3.5-27b": {
        "max_position_embeddings": 262144,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``plan``."""
    text = "memory by part, step time, largest context and share of states for each layout of a pair over devices"
    command = subparsers.add_parser("plan", help="which layout of devices fits a pair", description=text)
    names = f"{', '.join(KNOWN)}, or a folder or hub name in Hugging Face layout"
    command.add_argument("--student", default="qwen3.5-9b", help=names)
    command.add_argument("--teacher", default="qwen3.5-27b", help="the same, or self: the student is its own teacher")
    command.add_argument("--gpus", type=int, required=True, help="devices in all")
    command.add_argument("--context", type=int, required=True, help="tokens of the longest trajectory")
    command.add_argument("--device", default="H200", help="H200 or H100; default: H200")
    command.add_argument(
        "--device-gb", type=float, help="memory of a device in GB (1e9 bytes), in place of that device's; times stay its"
    )
    command.add_argument("--brief", type=int, default=BRIEF, help=f"tokens that the teacher's view adds; default: {BRIEF}")
    command.add_argument("--lora-rank", type=int, default=32, help="of the student's adapters; 0: all parameters; default: 32")
    command.add_argument("--lengths", type=Path, help="file with the tokens of each state of a corpus, one a line")
    command.set_defaults(func=plan)


def shape_of(name: str, where: str = "the model") -> ModelShape:
    """The shape of a known size or of a model's configuration, on the kernels of an accelerator; no weights are read.

    Args:
        where: what named it, for the refusal.

    Raises:
        OpsdError: neither a known size nor a model's folder or hub name.
    """
    if name.lower() in KNOWN:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        return ModelShape.of(Qwen3_5TextConfig(**KNOWN[name.lower()]))
    from transformers import AutoConfig

    from verl_opsd.models.kernels import FASTEST
    from verl_opsd.verl_adapter.requirements import check_model_path

    check_model_path(name, where)
    config = AutoConfig.from_pretrained(name)
    return ModelShape.of(config, fused=FASTEST.fuses(config))


def plan(args: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the table. Exit code 1 where no layout holds the context.

    Raises:
        OpsdError: a number out of its range, a context that a model is not made for, lengths that are no numbers, or a device that
            nothing is known of.
    """
    check_numbers(args)
    # Imports transformers' layers: seconds that no other command should wait for.
    from verl_opsd.planning import memory, planner

    if args.device not in planner.DEVICES:
        raise OpsdError(
            f"--device {args.device}", "times and sizes are known of some devices", f"use {', '.join(planner.DEVICES)}"
        )
    student = shape_of(args.student, "--student")
    teacher = None if args.teacher == "self" else shape_of(args.teacher, "--teacher")
    device = planner.DEVICES[args.device]
    if args.device_gb is not None:
        device = dataclasses.replace(device, name=f"a device of {args.device_gb:g} GB", bytes_=args.device_gb * 1e9)
    lengths = None if args.lengths is None else read_lengths(args.lengths)
    out = console or Console()
    table = Table(
        "layout", "largest context", "states", f"at {args.context}: student GB", "teacher GB", "layers kept", "tokens/s"
    )
    planner.check_positions(student, teacher, args.context, args.brief)
    fitting, why, most = [], [], planner.most_tokens(student, teacher, args.brief)
    for layout in planner.layouts(args.gpus, own=teacher is None):

        def at(context: int, layout: planner.Layout = layout) -> planner.Estimate:
            def of(one: planner.Layout) -> planner.Estimate:
                return planner.estimate(student, teacher, one, device, context, args.lora_rank, args.brief, memory.PART)

            return planner.fewest_ranks(layout, of)

        def fits(context: int, at: Callable[[int], planner.Estimate] = at) -> bool:
            try:
                at(context)
            except OpsdError:
                return False
            return True

        longest = planner.largest(fits, most)
        states = f"{planner.share_of_states(longest, lengths):.0%}"
        try:
            found = at(args.context)
        except OpsdError as error:
            why.append(f"{layout}: {error}")
            table.add_row(str(layout), f"{longest}", states, "does not fit", "", "", "")
            continue
        fitting.append(found)
        kept = f"{sum(found.plan.keep)} of {len(found.plan.keep)}{', inputs on the host' * found.plan.offload}"
        table.add_row(
            str(found.layout),
            f"{longest}",
            states,
            total(found.student_bytes),
            total(found.teacher_bytes),
            kept,
            f"{found.tokens_a_second:.0f}",
        )
    out.print(table)
    if not fitting:
        out.print("\n".join(why), soft_wrap=True)
        return 1
    chosen = planner.best(fitting)
    for side, bytes_ in (("student", chosen.student_bytes), ("teacher", chosen.teacher_bytes)):
        if bytes_:
            out.print(f"{side}: " + ", ".join(f"{k} {v / 1e9:.1f} GB" for k, v in bytes_.items() if v), soft_wrap=True)
    out.print(
        f"take: {chosen.layout}; a trajectory of {args.context} tokens: teacher {chosen.teacher_seconds:.1f} s, "
        f"student {chosen.student_seconds:.1f} s",
        soft_wrap=True,
    )
    if teacher is not None and chosen.layout.teacher == 0:
        out.print("benchmarks/pair.py runs this; the recipe gives a device teacher devices of its own", soft_wrap=True)
    return 0


def check_numbers(args: argparse.Namespace) -> None:
    """
    Raises:
        OpsdError: a number that no run can have.
    """
    least = {"gpus": 1, "context": 1, "brief": 0, "lora_rank": 0, "device_gb": 1}
    for name, lowest in least.items():
        value = getattr(args, name)
        if value is not None and not value >= lowest:
            raise OpsdError(f"--{name.replace('_', '-')} {value}", f"it is {lowest} or more", "correct the number")


def total(bytes_: dict[str, float]) -> str:
    """In GB; nothing where the other side's holds it."""
    return f"{sum(bytes_.values()) / 1e9:.1f}" if bytes_ else ""


def read_lengths(path: Path) -> list[int]:
    """Tokens of each state, one a line.

    Raises:
        OpsdError: no file, no number, or none at all.
    """
    try:
        found = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise OpsdError(f"{path}: {error}", "a file of whole numbers, one a line", "write the tokens of each state") from error
    if any(n < 1 for n in found):
        raise OpsdError(f"{path}: {min(found)}", "a state has at least one token", "write the tokens of each state")
    if not found:
        raise OpsdError(f"{path} is empty", "a corpus has at least one state", "write the tokens of each state")
    return found
