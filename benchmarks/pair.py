"""Throughput and memory of a distillation pair: LoRA steps of a 9B-shaped student, scoring by a 27B-shaped teacher.

    python benchmarks/pair.py [--contexts 16384 32768] [--parts plain turns student teacher pair] [--devices 1]

Random weights of the real shapes, made on the device; synthetic trajectories of 60 turns. What runs is this project's own step (rows,
head, kernels, checkpointing by budget) and its device teacher. Measured in the same run: the rate of a bf16 matrix product,
plain transformers (SDPA, every layer checkpointed, PEFT's LoRA), and the layout of one pass per turn with the teacher's top 20.
``share`` is the part of the matrix rate reached by 6 N FLOP a token of the student and 2 N of the teacher, attention left out.
``--tiny`` runs the same code with small shapes anywhere; its numbers say nothing.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from verl_opsd.distill.head import LossPositionHead, install_head
from verl_opsd.models import checkpointing, kernels
from verl_opsd.models.attention import ATTENTION
from verl_opsd.models.forward import run_head
from verl_opsd.planning import memory
from verl_opsd.planning.shape import TARGETS, ModelShape
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged, rows_of, view_passes
from verl_opsd.verl_adapter.step import loss_task

LONGEST = 262144
TINY = {
    "vocab_size": 211,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LOSS = OpsdLoss(teacher="device", chunk=256)
TOP_K = 20


def configs(tiny: bool) -> tuple[Qwen3_5TextConfig, Qwen3_5TextConfig]:
    """Student and teacher: Qwen3.5's 9B (the defaults of the configuration) and 27B."""
    if tiny:
        common = TINY | {"max_position_embeddings": LONGEST}
        return (
            Qwen3_5TextConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, **common),
            Qwen3_5TextConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=4, **common),
        )
    return Qwen3_5TextConfig(max_position_embeddings=LONGEST), Qwen3_5TextConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_value_heads=48,
        max_position_embeddings=LONGEST,
    )


def build(config: Qwen3_5TextConfig, device: torch.device) -> Any:
    """A model with random weights on the device, in bf16, frozen."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.requires_grad_(False)


@dataclass
class Student:
    """A model with LoRA (r 32, alpha 64) under the loss-position head, its optimizer, and the head itself."""

    model: Any
    head: LossPositionHead
    optimizer: torch.optim.Optimizer
    shape: ModelShape
    device: torch.device

    @classmethod
    def of(cls, config: Qwen3_5TextConfig, device: torch.device) -> Student:
        """With transformers' layers and PEFT's LoRA, every layer checkpointed."""
        base = build(config, device)
        head = install_head(base)
        lora = LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, target_modules=list(TARGETS), bias="none")
        model = get_peft_model(base, lora).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:  # masters stay float32, as in the engine
            p.data = p.data.float()
        checkpointing.apply(model, checkpointing.everything(config.num_hidden_layers))
        optimizer = torch.optim.AdamW(trained, lr=1e-5)
        for p in trained:  # so that its state is there before memory is planned
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        return cls(model, head, optimizer, ModelShape.of(config), device)

    def fuse(self, choice: kernels.Choice) -> None:
        """Changes the layers into this project's."""
        kernels.install(self.model, choice)
        kernels.fuse_adapters(self.model)
        self.model.get_base_model().set_attn_implementation(ATTENTION)

    def step(self, batch: dict[str, Tensor], weight_VH: Tensor) -> float:
        """One optimizer step on rows with ``opsd_signal``; the loss in nats."""
        loss = self.backward(batch, weight_VH, torch.bfloat16)
        self.update()
        return loss

    def backward(self, batch: dict[str, Tensor], weight_VH: Tensor, dtype: torch.dtype) -> float:
        """Loss in nats, and the gradients of its adapters. ``weight_VH`` is the teacher's vocabulary weight."""
        moved = {k: v.to(self.device) for k, v in batch.items()}
        ids = list(moved["input_ids"].unbind())
        task = loss_task(moved, LOSS, ("teacher", weight_VH), ("student", None), 1, packed=True)
        places = torch.cat([torch.arange(len(x), device=self.device) for x in ids])
        inputs = {"input_ids": torch.cat(ids)[None], "position_ids": places[None]}
        if len(ids) > 1:
            inputs["cu_seq_lens_q"] = kernels.cumulative([len(x) for x in ids], self.device)
        loss = run_head(self.model, self.head, task, dtype, inputs).sum()
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """Clips, steps, clears."""
        torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trajectory(context: int, turns: int, reply: int, brief: int, vocab: int) -> dict[str, Tensor]:
    """One row: ``turns`` replies of ``reply`` tokens, evenly spaced in ``context`` tokens; the teacher's view begins with a brief."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(vocab, (context,), generator=generator)
    ends = torch.linspace(context / turns, context, turns).long()
    position = torch.cat([torch.arange(int(e) - reply - 1, int(e) - 1) for e in ends])
    n = len(position)
    view = torch.cat([torch.randint(vocab, (brief,), generator=generator), ids])
    zeros, ints = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
    return {
        "input_ids": ids,
        "opsd_position": position,
        "opsd_coef": torch.full((n,), 1.0 / n),
        "opsd_anchor": zeros,
        "opsd_behaviour": zeros,
        "opsd_reward": zeros,
        "opsd_class": ints,
        "opsd_turn": torch.arange(turns).repeat_interleave(reply),
        "opsd_view_ids": view,
        "opsd_view_len": torch.tensor([len(view)]),
        "opsd_view_pos": position + brief,
    }


def as_batch(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows as jagged fields."""
    return {k: jagged([r[k] for r in rows]) for k in rows[0]}


def passes_of(batch: dict[str, Tensor]) -> list[Pass]:
    """The teacher's passes of a batch of one row."""
    return view_passes(rows_of(batch))


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


class Table:
    """Rows that are printed, and written to a file, as they come."""

    def __init__(self, out: Path | None):
        self.out = out
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        if self.out is not None:
            self.out.write_text("\n".join(self.lines) + "\n")


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP a second of a bf16 matrix product on random data."""
    if device.type != "cuda":
        size = 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(timed(lambda: a @ b, [device], 1)[0] for _ in range(10))
    return 2 * size**3 / seconds


def timed(work: Callable[[], Any], devices: Sequence[torch.device], warm: int) -> tuple[float, list[float]]:
    """(seconds, peak bytes on each device) of one run after ``warm`` others."""
    for _ in range(warm):
        work()
    cuda = [d for d in devices if d.type == "cuda"]
    for d in cuda:
        torch.cuda.synchronize(d)
        torch.cuda.reset_peak_memory_stats(d)
    start = time.perf_counter()
    work()
    for d in cuda:
        torch.cuda.synchronize(d)
    return time.perf_counter() - start, [torch.cuda.max_memory_allocated(d) for d in cuda] or [float("nan")]


def free() -> None:
    """Returns what was freed to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
        if args.cap_gb is not None and cuda:
            for d in self.devices:
                total = torch.cuda.get_device_properties(d).total_memory
                torch.cuda.set_per_process_memory_fraction(min(args.cap_gb * 1e9 / total, 1.0), d)
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
        warm: int = 1,
        note: Callable[[], str] = str,
    ) -> float:
        """Measures and prints one row; NaN where it did not run."""
        if time.monotonic() > self.stop_at:
            self.table.say(f"{context:8} {what:30} not run: the time limit of {self.args.limit_s} s is over")
            return float("nan")
        free()
        try:
            seconds, peaks = timed(work, self.devices, warm)
        except torch.OutOfMemoryError as error:
            self.table.say(f"{context:8} {what:30} out of memory: {str(error)[:90]}")
            return float("nan")
        peak = " ".join(f"{p / 1e9:.1f}" for p in peaks)
        share = flop / seconds / self.rate
        self.table.say(f"{context:8} {what:30} {seconds:8.2f} {tokens / seconds:9.0f} {share:6.2f} {peak:>16}  {note()}")
        return seconds

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
        parts, near, far = self.args.parts, self.devices[0], self.devices[-1]
        student = teacher = None
        if {"plain", "turns", "student", "pair"} & set(parts):
            student = Student.of(self.student_config, near)
        teacher_model = build(self.teacher_config, far).eval() if {"plain", "turns", "teacher", "pair"} & set(parts) else None
        student_n = ModelShape.of(self.student_config).body
        teacher_n = ModelShape.of(self.teacher_config).body
        n_loss = self.turns * self.reply
        head_VH = None if teacher_model is None else teacher_model.get_output_embeddings().weight.detach().to(near)
        per_turn = plain = float("nan")
        context = self.args.contexts[min(1, len(self.args.contexts) - 1)]
        if "turns" in parts:
            assert student is not None
            seeds = Seeds(student, teacher_model)
            ids = trajectory(context, self.turns, self.reply, 0, self.student_config.vocab_size)["input_ids"]
            ends = [int(context * f) for f in (1 / 6, 3 / 6, 5 / 6)]
            work = lambda: [seeds.turn(ids[:e], self.reply) for e in ends]  # noqa: E731
            per_turn = self.row(
                context, "per turn, top 20 (3 of 60)", work, sum(ends), sum(ends) * (6 * student_n + 2 * teacher_n)
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
        if teacher_model is not None and {"teacher", "pair"} & set(parts):
            teacher = DeviceTeacher.of(teacher_model, torch.bfloat16, far, "teacher")
        for context in self.args.contexts:
            self.one_context(context, student, teacher, head_VH, student_n, teacher_n, n_loss, per_turn)

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
        warm = 1 if context <= 65536 else 0
        seconds: dict[str, float] = {}
        if student is not None and {"student", "pair"} & set(self.args.parts):
            resident = torch.cuda.memory_allocated(self.devices[0]) if self.devices[0].type == "cuda" else 0.0
            chosen = memory.choose_plan(student.shape, context, memory.usable(self.total()) - resident)
            checkpointing.apply(student.model, chosen)
            expected = resident + memory.step_bytes(student.shape, context, chosen)
            weight = head_VH
            if weight is None:
                weight = torch.zeros(
                    self.student_config.vocab_size, self.teacher_config.hidden_size, device=self.devices[0]
                ).bfloat16()
            work = lambda: student.step(batch, weight)  # noqa: E731
            seconds["student"] = self.row(
                context,
                "student",
                work,
                context,
                6 * student_n * context,
                warm,
                lambda: f"{expected / 1e9:.1f} GB predicted, {chosen}",
            )
        if teacher is not None:
            passes = passes_of(batch)
            there = torch.cuda.memory_allocated(self.devices[-1]) if self.devices[-1].type == "cuda" else 0.0
            wanted = there + memory.score_bytes(ModelShape.of(self.teacher_config), context + self.brief, teacher.part)
            work = lambda: teacher.score(passes)  # noqa: E731
            seconds["teacher"] = self.row(
                context,
                "teacher",
                work,
                context,
                2 * teacher_n * context,
                warm,
                lambda: f"{wanted / 1e9:.1f} GB predicted, parts of {teacher.part}",
            )
        if student is None or teacher is None or "pair" not in self.args.parts or head_VH is None:
            return
        flop = (6 * student_n + 2 * teacher_n) * context
        if self.args.devices == 1:
            both = seconds["student"] + seconds["teacher"]
            if self.args.tiny or context == self.args.contexts[0]:

                def work() -> None:
                    hidden_NH = teacher.score(passes_of(batch)).hidden_NH
                    assert hidden_NH is not None
                    student.step(batch | {"opsd_signal": jagged([hidden_NH])}, head_VH)

                both = self.row(context, "pair, one after the other", work, context, flop, 0)
            else:
                self.table.say(
                    f"{context:8} {'pair, sum of the two':30} {both:8.2f} {context / both:9.0f} {flop / both / self.rate:6.2f}"
                )
            if per_turn == per_turn:
                ours, theirs = n_loss / both, 3 * self.reply / per_turn
                self.table.say(
                    f"# per branch: {ours:.0f} loss tokens a GPU-second, {ours / theirs:.0f} times the layout per turn"
                )
            return

        def side_by_side() -> None:
            other = threading.Thread(target=lambda: teacher.score(passes_of(batch)))
            other.start()
            student.step(batch, head_VH)
            other.join()

        both = self.row(context, "pair, side by side", side_by_side, context, flop / 2, 0)
        if per_turn == per_turn:
            ours, theirs = n_loss / both / len(self.devices), 3 * self.reply / per_turn / len(self.devices)
            self.table.say(f"# per branch: {ours:.0f} loss tokens a GPU-second, {ours / theirs:.0f} times the layout per turn")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--parts", nargs="+", default=["turns", "plain", "student", "teacher", "pair"])
    parser.add_argument("--devices", type=int, default=1, choices=[1, 2], help="2: the teacher has one of its own")
    parser.add_argument("--cap-gb", type=float, help="memory that this process may take of each device")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no row begins after this many seconds")
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
