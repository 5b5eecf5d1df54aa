"""What the benchmarks of the pair share: models of the real shapes with random weights, trajectories, timing, and the table.

Suffixes: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from verl_opsd.distill.head import LossPositionHead, install_head
from verl_opsd.models import checkpointing, kernels
from verl_opsd.models.attention import ATTENTION
from verl_opsd.models.forward import run_head
from verl_opsd.planning.shape import TARGETS, ModelShape
from verl_opsd.teachers.base import Pass
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
LOSS = OpsdLoss(teacher="device")


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
        bounds = kernels.cumulative([len(x) for x in ids], self.device)
        inputs = {"input_ids": torch.cat(ids)[None], "position_ids": places[None], "cu_seq_lens_q": bounds}
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
