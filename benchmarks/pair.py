"""Throughput and memory of a distillation pair: LoRA steps of a 9B-shaped student, scoring by a 27B-shaped teacher.

    python benchmarks/pair.py [--contexts 16384 32768] [--parts plain turns student teacher pair] [--devices 1]

Random weights of the real shapes, made on the device; synthetic trajectories of 60 turns. What runs is this project's own step (rows,
head, kernels, checkpointing by budget) and its device teacher. Measured in the same run: the rate of a bf16 matrix product,
plain transformers (SDPA, every layer checkpointed, PEFT's LoRA), and the layout of one pass per turn with the teacher's top 20.
``share`` is the part of the matrix rate reached by 6 N FLOP a token of the student and 2 N of the teacher, attention left out.
Every row is run twice and the second run is given; a note says so where the first took much longer (compilation for a new length).
``--tiny`` runs the same code with small shapes anywhere; its numbers say nothing.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from profiling import where
from torch import Tensor
from workload import Student, Table, as_batch, build, configs, free, matmul_rate, passes_of, timed, trajectory

from verl_opsd.models import checkpointing, kernels
from verl_opsd.models.gated_delta import use_tuned
from verl_opsd.planning import memory
from verl_opsd.planning.shape import ModelShape
from verl_opsd.teachers import fp8
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter.passes import jagged

#: Tokens of the teacher that the per-turn layout keeps.
TOP_K = 20


@dataclass
class Seeds:
    """The layout of one pass per turn: both models read the turn's whole prefix, and the loss is over the teacher's top 20."""

    student: Student
    teacher: Any

    def turn(self, ids_T: Tensor, reply: int) -> None:
        """One turn: the last ``reply`` tokens of ``ids_T`` carry loss."""
        device = self.student.device
        ids = ids_T[None].to(device)
        keep = reply + 1
        with torch.no_grad():
            out = self.teacher(input_ids=ids.to(self.teacher.device), use_cache=False, logits_to_keep=keep).logits
            values, indices = out[0, :-1].float().log_softmax(-1).topk(TOP_K, dim=-1)
            logq, indices = values.log_softmax(-1).to(device), indices.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = self.student.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        logp = out[0, :-1].float().gather(-1, indices).log_softmax(-1)
        F.kl_div(logq, logp, reduction="batchmean", log_target=True).backward()
        self.student.update()


def serve(pipe: Any, tiny: bool, device: torch.device, cap_gb: float | None) -> None:
    """A process with a teacher on a device of its own: for each context it scores, and answers with seconds and peak bytes."""
    cap(device, cap_gb)
    teacher = DeviceTeacher.of(build(configs(tiny)[1], device).eval(), torch.bfloat16, device, "teacher")
    pipe.send("ready")
    while (batch := pipe.recv()) is not None:
        passes = passes_of({k: jagged(v) for k, v in batch.items()})
        pipe.send(timed(partial(teacher.score, passes), [device], 0))


class RemoteTeacher:
    """:func:`serve` and its process, as a run has its teacher's worker."""

    def __init__(self, tiny: bool, device: torch.device, cap_gb: float | None):
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, tiny, device, cap_gb), daemon=True)
        self.process.start()

    def ask(self, batch: dict[str, Tensor]) -> None:
        """Starts scoring; rows travel as lists."""
        self.pipe.send({k: list(v.unbind()) for k, v in batch.items()})

    def answer(self) -> tuple[float, list[float]]:
        """Waits for it."""
        if not self.pipe.poll(300):
            raise RuntimeError("the teacher's process does not answer")
        return self.pipe.recv()  # type: ignore[no-any-return]


def cap(device: torch.device, cap_gb: float | None) -> None:
    """Limits what this process may take of a device."""
    if cap_gb is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap_gb * 1e9 / total, 1.0), device)


class Bench:
    """The measurements of one process."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.table = args, Table(args.out)
        cuda = torch.cuda.is_available() and not args.tiny
        self.devices = [torch.device("cuda", i) for i in range(args.devices)] if cuda else [torch.device("cpu")] * args.devices
        self.student_config, self.teacher_config = configs(args.tiny)
        self.turns, self.reply, self.brief = (4, 5, 7) if args.tiny else (60, 90, 1000)
        self.choice = kernels.choose(
            kernels.Facts.of_this_process() if cuda else kernels.Facts(False, False, None, None, None, False)
        )
        self.stop_at = time.monotonic() + args.limit_s
        for d in self.devices:
            cap(d, args.cap_gb)
        if cuda:
            use_tuned()
        where = torch.cuda.get_device_name() if cuda else platform.machine()
        packages = ("torch", "transformers", "peft", "triton", "fla-core", "liger-kernel")
        found = [f"{p} {v}" for p in packages if (v := kernels._version(p)) is not None]
        self.table.say(f"# {' '.join(['python', *sys.argv])}")
        self.table.say(f"# {len(self.devices)} x {where}; {', '.join(found)}; torch {version('torch')}")
        self.table.say(f"# {self.choice}")
        self.rate = matmul_rate(self.devices[0])
        self.table.say(f"# bf16 matrix product: {self.rate / 1e12:.0f} TFLOP/s")
        self.table.say(f"{'context':>8} {'what':30} {'seconds':>8} {'tokens/s':>9} {'share':>6} {'peak GB':>16}  note")

    def row(
        self,
        context: int,
        what: str,
        work: Callable[[], Any],
        tokens: float,
        flop: float,
        note: Callable[[], str] = str,
        devices: Sequence[torch.device] = (),
    ) -> float:
        """Measures and prints one row; NaN where it did not run."""
        if time.monotonic() > self.stop_at:
            self.table.say(f"{context:8} {what:30} not run: the time limit of {self.args.limit_s} s is over")
            return float("nan")
        free()
        try:
            first, _ = timed(work, devices or self.devices, 0)
            retries = self.retries()
            seconds, peaks = timed(work, devices or self.devices, 0)
        except torch.OutOfMemoryError as error:
            self.table.say(f"{context:8} {what:30} out of memory: {str(error)[:90]}")
            return float("nan")
        peak = " ".join(f"{p / 1e9:.1f}" for p in peaks)
        share = flop / seconds / self.rate
        notes = [note()] if note() else []
        if first > 1.1 * seconds:
            notes.append(f"{first:.2f} s at first")
        if self.retries() > retries:
            notes.append("the allocator had to return memory")
        self.table.say(
            f"{context:8} {what:30} {seconds:8.2f} {tokens / seconds:9.0f} {share:6.2f} {peak:>16}  {'; '.join(notes)}"
        )
        return seconds

    def retries(self) -> int:
        """How often the first device's allocator gave everything back to find room."""
        return int(torch.cuda.memory_stats(self.devices[0])["num_alloc_retries"]) if self.devices[0].type == "cuda" else 0

    def profile(self, context: int, what: str, work: Callable[[], Any]) -> None:
        """Where the time of a row goes, if it was asked for."""
        if context in self.args.profile and self.devices[0].type == "cuda" and time.monotonic() < self.stop_at:
            self.table.say(f"# {context} {what}, under the profiler:")
            for line in where(work):
                self.table.say(f"#   {line}")

    def batch(self, context: int) -> dict[str, Tensor]:
        """One trajectory as a batch, with a random signal in the place of the teacher's."""
        batch = as_batch([trajectory(context, self.turns, self.reply, self.brief, self.student_config.vocab_size)])
        n = self.turns * self.reply
        signal = torch.randn(n, self.teacher_config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
        return batch | {"opsd_signal": jagged([signal])}

    def total(self) -> float:
        """Bytes of the first device that this process may take."""
        cuda = self.devices[0].type == "cuda"
        return min(torch.cuda.mem_get_info(self.devices[0])[1] if cuda else 64e9, (self.args.cap_gb or 1e9) * 1e9)

    def run(self) -> None:
        """Every part that was asked for, in the order in which memory allows them."""
        if self.args.devices == 2:
            self.side_by_side()
            return
        parts, near, far = self.args.parts, self.devices[0], self.devices[-1]
        student = teacher = None
        if {"plain", "turns", "student", "pair"} & set(parts):
            student = Student.of(self.student_config, near)
        teacher_model = (
            build(self.teacher_config, far).eval() if {"plain", "turns", "teacher", "pair", "fp8"} & set(parts) else None
        )
        student_n = ModelShape.of(self.student_config).body
        teacher_n = ModelShape.of(self.teacher_config).body
        n_loss = self.turns * self.reply
        head_VH = None if teacher_model is None else teacher_model.get_output_embeddings().weight.detach().to(near)
        per_turn = plain = float("nan")
        context = self.args.contexts[0]
        if "turns" in parts:
            assert student is not None
            seeds = Seeds(student, teacher_model)
            ids = trajectory(context, self.turns, self.reply, 0, self.student_config.vocab_size)["input_ids"]
            ends = [int(context * f) for f in (1 / 6, 3 / 6, 5 / 6)]

            def turns() -> None:
                for e in ends:
                    seeds.turn(ids[:e], self.reply)

            per_turn = self.row(
                context, "per turn, top 20 (3 of 60)", turns, sum(ends), sum(ends) * (6 * student_n + 2 * teacher_n)
            )
            self.table.say(f"# per turn: {len(ends) * self.reply / per_turn:.1f} loss tokens a GPU-second")
        if "plain" in parts:
            assert student is not None and teacher_model is not None and head_VH is not None
            batch = self.batch(context)
            ids_T = batch["opsd_view_ids"].unbind()[0][None].to(far)
            plain = self.row(context, "plain student", lambda: student.step(batch, head_VH), context, 6 * student_n * context)
            with torch.no_grad():
                work = lambda: teacher_model.model(input_ids=ids_T, use_cache=False)  # noqa: E731
                plain += self.row(context, "plain teacher", work, context, 2 * teacher_n * context)
            self.table.say(f"{context:8} {'plain pair':30} {plain:8.2f} {context / plain:9.0f}")
        if {"student", "pair"} & set(parts):
            if near.type == "cuda":
                config = self.student_config
                found = kernels.require(config, near, torch.bfloat16, self.choice)
                self.table.say("# gradient check: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()))
            assert student is not None
            student.fuse(self.choice)
        if teacher_model is not None and {"teacher", "pair", "fp8"} & set(parts):
            teacher = DeviceTeacher.of(teacher_model, torch.bfloat16, far, "teacher")
        for context in self.args.contexts:
            compared = per_turn if context == self.args.contexts[0] else float("nan")
            self.one_context(context, student, teacher, head_VH, student_n, teacher_n, n_loss, compared)
        if "fp8" in parts and teacher is not None:
            self.fp8(teacher, teacher_n, student, head_VH)

    def fp8(self, teacher: DeviceTeacher, teacher_n: int, student: Student | None, head_VH: Tensor | None) -> None:
        """The same teacher in FP8: its rate, the pair's with it, and the divergence of its distributions from those in bf16."""
        context = self.args.contexts[0]
        batch = self.batch(context)
        passes = passes_of(batch)
        exact_NH = teacher.score(passes).hidden_NH
        products = teacher.to_fp8()
        free()
        self.row(
            context,
            "teacher, FP8",
            partial(teacher.score, passes),
            context,
            2 * teacher_n * context,
            lambda: f"{products} products",
        )
        self.profile(context, "teacher, FP8", partial(teacher.score, passes))
        rounded_NH = teacher.score(passes).hidden_NH
        assert exact_NH is not None and rounded_NH is not None
        found = fp8.error(exact_NH.to(self.devices[-1]), rounded_NH.to(self.devices[-1]), teacher.weight_VH)
        self.table.say("# FP8 against bf16, reverse KL in nats: " + ", ".join(f"{k} {v:.2e}" for k, v in found.items()))
        if student is not None and head_VH is not None:
            free()
            chosen = self.choose(student, context)
            both = lambda: (teacher.score(passes), student.step(batch, head_VH))  # noqa: E731
            flop = (6 * student.shape.body + 2 * teacher_n) * context
            self.row(context, "pair, FP8 teacher", both, context, flop, lambda: chosen)

    def one_context(
        self,
        context: int,
        student: Student | None,
        teacher: DeviceTeacher | None,
        head_VH: Tensor | None,
        student_n: int,
        teacher_n: int,
        n_loss: int,
        per_turn: float,
    ) -> None:
        """Student, teacher and both at one context."""
        batch = self.batch(context)
        seconds: dict[str, float] = {}
        parts, expected = set(self.args.parts), ["", ""]
        if student is not None and {"student", "pair"} & parts:
            expected[0] = self.choose(student, context)
        if student is not None and "student" in parts:
            weight = head_VH
            if weight is None:
                size = self.student_config.vocab_size, self.teacher_config.hidden_size
                weight = torch.zeros(size, device=self.devices[0], dtype=torch.bfloat16)
            work = partial(student.step, batch, weight)
            flop = 6 * student_n * context
            seconds["student"] = self.row(context, "student", work, context, flop, lambda: expected[0])
            self.profile(context, "student", work)
        if teacher is not None:
            there = torch.cuda.memory_allocated(self.devices[-1]) if self.devices[-1].type == "cuda" else 0.0
            bytes_ = there + memory.score_bytes(ModelShape.of(self.teacher_config), context + self.brief, teacher.part)
            expected[1] = f"{bytes_ / 1e9:.1f} GB predicted, parts of {memory.part_tokens(context + self.brief)}"
        if teacher is not None and "teacher" in parts:
            passes = passes_of(batch)
            scored = partial(teacher.score, passes)
            flop = 2 * teacher_n * context
            seconds["teacher"] = self.row(context, "teacher", scored, context, flop, lambda: expected[1])
            self.profile(context, "teacher", scored)
        if student is None or teacher is None or "pair" not in self.args.parts or head_VH is None:
            return
        flop = (6 * student_n + 2 * teacher_n) * context
        both = seconds.get("student", math.nan) + seconds.get("teacher", math.nan)
        if self.args.tiny or context == self.args.contexts[0] or math.isnan(both):

            def one_after_other() -> None:
                hidden_NH = teacher.score(passes_of(batch)).hidden_NH
                assert hidden_NH is not None
                student.step(batch | {"opsd_signal": jagged([hidden_NH])}, head_VH)

            both = self.row(context, "pair, one after the other", one_after_other, context, flop)
        else:
            self.table.say(
                f"{context:8} {'pair, sum of the two':30} {both:8.2f} {context / both:9.0f} {flop / both / self.rate:6.2f}"
            )
        if not math.isnan(per_turn):
            ours, theirs = n_loss / both, 3 * self.reply / per_turn
            self.table.say(f"# per branch: {ours:.0f} loss tokens a GPU-second, {ours / theirs:.0f} times the layout per turn")

    def side_by_side(self) -> None:
        """The student on the first device, the teacher's process on the second, both at work on a trajectory each."""
        near, far = self.devices
        remote = RemoteTeacher(self.args.tiny, far, self.args.cap_gb)
        student = Student.of(self.student_config, near)
        if near.type == "cuda":
            found = kernels.require(self.student_config, near, torch.bfloat16, self.choice)
            self.table.say("# gradient check: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()))
        student.fuse(self.choice)
        assert remote.pipe.recv() == "ready"
        size = self.student_config.vocab_size, self.teacher_config.hidden_size
        weight = torch.randn(size, device=near, dtype=torch.bfloat16) * 0.02
        teacher_shape = ModelShape.of(self.teacher_config)
        flop = 6 * student.shape.body + 2 * teacher_shape.body
        for context in self.args.contexts:
            batch = self.batch(context)
            chosen = self.choose(student, context)
            answers: list[tuple[float, list[float]]] = []

            def both(batch: dict[str, Tensor] = batch, answers: list[Any] = answers) -> None:
                remote.ask({k: v for k, v in batch.items() if k != "opsd_signal"})
                student.step(batch, weight)
                answers.append(remote.answer())

            def note(chosen: str = chosen, answers: list[Any] = answers) -> str:
                return f"{chosen}; teacher alone {answers[-1][0]:.2f} s, peak {answers[-1][1][0] / 1e9:.1f} GB"

            self.row(context, "pair, side by side", both, context, flop * context / 2, note, [near])
        remote.pipe.send(None)

    def choose(self, student: Student, context: int) -> str:
        """Sets which layers keep their activations in what memory is left; says what that should take."""
        resident = torch.cuda.memory_allocated(self.devices[0]) if self.devices[0].type == "cuda" else 0.0
        chosen = memory.activations(student.shape, context, "auto", None, memory.usable(self.total()) - resident)
        checkpointing.apply(student.model, chosen)
        return f"{(resident + memory.step_bytes(student.shape, context, chosen)) / 1e9:.1f} GB predicted, {chosen}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 16384, 65536, 131072])
    parser.add_argument(
        "--parts", nargs="+", default=["turns", "plain", "student", "teacher", "pair", "fp8"], help="of one device"
    )
    parser.add_argument("--devices", type=int, default=1, choices=[1, 2], help="2: the teacher has one of its own")
    parser.add_argument("--cap-gb", type=float, help="memory that this process may take of each device")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no row begins after this many seconds")
    parser.add_argument(
        "--profile", type=int, nargs="*", default=[], help="contexts at which the student's and teacher's kernels are listed"
    )
    parser.add_argument("--out", type=Path, help="also write the table here, row by row")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if args.tiny:
        args.contexts = [96, 160]
        print("tiny shapes on the CPU, to show that the script runs; no number below is a result")
    transformers.logging.set_verbosity_error()
    Bench(args).run()


if __name__ == "__main__":
    main()
