"""Tokens a second and peak memory of one optimizer step of a warm start, against plain transformers with the same kernels.

    python benchmarks/sft.py --mode lora --contexts 32768 65536
    torchrun --nproc_per_node=2 benchmarks/sft.py --mode full --contexts 32768

One row of so many tokens a rank, 1.3% of them with loss. ``engine`` is what `+recipe=warm_start` runs: verl's FSDP2 engine with the
loss-position head. ``plain`` is the same model in transformers (PEFT for an adapter, ``fully_shard`` for several ranks) with the same
kernels in its layers, activations checkpointed, the vocabulary at loss positions only, cross-entropy of torch. ``stock`` is that with the
kernels that transformers chooses. ``--size 9b`` has the shape of Qwen3.5-9B with random weights; ``--size tiny``, the default without an
accelerator, shows that the script runs. An arm that does not fit says so; arms whose first losses differ by more than 1% end the run
with an error.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29533")
os.environ["VERL_ENGINE_VENDOR"] = "opsd_sft"

import torch
import torch.distributed as dist
import verl  # noqa: F401  (runs the plugin, which brings the host's platform)
from torch import Tensor, nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
LOSS_SHARE = 0.013
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_folder(size: str, root: Path) -> Path:
    """A model folder with random weights; rank 0 writes it."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    from verl_opsd.models.tiny import make_tiny_hybrid, make_tokenizer

    path = root / size
    if RANK == 0 and not (path / "config.json").exists():
        if size == "tiny":
            make_tiny_hybrid(path)
        else:
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("cuda" if CUDA else "cpu"):
                model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(max_position_embeddings=131072))
            torch.set_default_dtype(torch.float32)
            model.save_pretrained(path)
            make_tokenizer().save_pretrained(path)
            del model
            free()
    dist.barrier()
    return path


def free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def row(context: int, vocab: int) -> tuple[Tensor, Tensor]:
    """ids and mask of one row, int64[context]; loss in runs of 128 tokens, as replies are."""
    g = torch.Generator().manual_seed(RANK)
    ids, mask = torch.randint(0, vocab, (context,), generator=g), torch.zeros(context, dtype=torch.int64)
    run = min(128, max(1, context // 100))
    for i in range(max(1, round(context * LOSS_SHARE / run))):
        start = context // 10 + i * (context * 8 // 10) // max(1, round(context * LOSS_SHARE / run))
        mask[start : start + run] = 1
    return ids, mask


def batch_of(context: int, vocab: int) -> Any:
    """One row as verl's SFT trainer hands it to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    ids, mask = row(context, vocab)
    fields = {"input_ids": ids, "loss_mask": mask, "position_ids": torch.arange(context)}
    jagged = {k: torch.nested.as_nested_tensor([v], layout=torch.jagged) for k, v in fields.items()}
    data = TensorDict(jagged, batch_size=1)
    tu.assign_non_tensor(data, use_remove_padding=True, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, temperature=1.0)
    return data


def over_ranks(loss: Tensor) -> float:
    """The mean over ranks of what each scaled by their number."""
    if WORLD > 1:
        dist.all_reduce(loss)
    return float(loss) / WORLD


def make_engine(path: Path, mode: str) -> Callable[[int], float]:
    """The recipe's step: context to loss."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.utils.losses import sft_loss

    from verl_opsd.verl_adapter.sft import SftEngineConfig

    lora = {"lora_rank": 32, "lora_alpha": 64, "target_modules": TARGETS} if mode == "lora" else {"lora_rank": 0}
    model = HFModelConfig(
        path=str(path),
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=True,
        enable_gradient_checkpointing=True,
        **lora,
    )
    config = SftEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        model_dtype="bf16" if mode == "lora" and CUDA else "fp32",
        mixed_precision={"param_dtype": "bf16" if CUDA else "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        sft={"chunk": 256},
    )
    optimizer = FSDPOptimizerConfig(lr=5e-6, total_training_steps=100)
    engine = EngineRegistry.new("language_model", "fsdp2", model, config, optimizer, CheckpointConfig())
    engine.initialize()
    vocab, loss = model.hf_config.get_text_config().vocab_size, functools.partial(sft_loss, config=None)

    def step(context: int) -> float:
        with engine.train_mode():
            out = engine.train_batch(batch_of(context, vocab), loss)
        return over_ranks(torch.tensor(float(sum(out["loss"])), device=DEVICE))

    return step


def make_plain(path: Path, mode: str, stock: bool = False) -> Callable[[int], float]:
    """The same in transformers alone.

    Args:
        stock: with the kernels that transformers chooses, not the engine's.
    """
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    from verl_opsd.models import kernels

    compute = torch.bfloat16 if CUDA else torch.float32
    stored = torch.float32 if mode == "full" else compute
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=stored, attn_implementation="sdpa")
    if not stock:
        kernels.install(model, kernels.choose(kernels.Facts.of_this_process()))
    if mode == "lora":
        model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=TARGETS))
        for p in model.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
        model.enable_input_require_grads()
    inner = model.get_base_model() if mode == "lora" else model
    inner.gradient_checkpointing_enable({"use_reentrant": False})
    if WORLD > 1:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for layer in inner.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        model.to(DEVICE)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-6)
    model.train()
    vocab = inner.config.get_text_config().vocab_size

    def step(context: int) -> float:
        ids, mask = (x.to(DEVICE) for x in row(context, vocab))
        at, count = mask[1:].nonzero()[:, 0], mask.sum()
        if WORLD > 1:
            dist.all_reduce(count)
        with torch.autocast(DEVICE.type, dtype=compute, enabled=CUDA):
            logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=at).logits[0]
        loss = nn.functional.cross_entropy(logits.float(), ids[at + 1], reduction="sum") * WORLD / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return over_ranks(loss.detach())

    return step


ARMS: dict[str, Callable[[Path, str], Callable[[int], float]]] = {
    "engine": make_engine,
    "plain": make_plain,
    "stock": functools.partial(make_plain, stock=True),
}


def measure(step: Callable[[], float], repeat: int) -> dict[str, Any]:
    """Loss of the first step here, median seconds of the others, peak bytes; or why it did not run."""
    free()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    try:
        loss, seconds = step(), []
        for _ in range(repeat):
            if CUDA:
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            step()
            if CUDA:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    return {
        "loss": loss,
        "seconds": statistics.median(seconds),
        "peak": torch.cuda.max_memory_allocated() if CUDA else None,
    }


def step_of(build: Callable[[], Callable[[int], float]], context: int) -> float:
    """One step; the first builds the arm, whose failures are then measured with it."""
    return build()(context)


def cells(found: dict[str, Any], context: int) -> list[str]:
    """The measured columns of a row."""
    if "error" in found:
        return [found["error"], "", "", ""]
    peak = "-" if found["peak"] is None else f"{found['peak'] / 1e9:.1f}"
    return [f"{found['loss']:.4f}", f"{found['seconds']:.2f}", f"{context / found['seconds']:.0f}", peak]


def main() -> None:
    p = argparse.ArgumentParser(description="One step of a warm start.")
    p.add_argument("--size", choices=("9b", "tiny"), default="9b" if CUDA else "tiny")
    p.add_argument("--mode", choices=("lora", "full"), default="lora")
    p.add_argument("--contexts", type=int, nargs="+", default=[32768, 65536] if CUDA else [256, 512])
    p.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=["engine", "plain", "stock"])
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "opsd-sft-benchmark", help="of the model")
    p.add_argument("--json", type=Path, help="also write the numbers here, after every row")
    args = p.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    path = make_folder(args.size, args.folder)
    device = torch.cuda.get_device_name() if CUDA else f"{platform.processor() or platform.machine()}, no accelerator"
    if RANK == 0:
        print(f"{args.size} {args.mode}, {WORLD} x {device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
        print("| context | arm | loss | s a step | tokens/s a device | peak GB a device |\n|---|---|---|---|---|---|")
    results = []
    for arm in args.arms:
        free()
        build = functools.cache(functools.partial(ARMS[arm], path, args.mode))
        for context in args.contexts:
            found = measure(functools.partial(step_of, build, context), args.repeat)
            results.append({"context": context, "arm": arm, **found})
            if RANK == 0:
                print(f"| {context} | {arm} | " + " | ".join(cells(found, context)) + " |", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results))
        del build
    dist.destroy_process_group()
    for context in args.contexts:
        losses = [r["loss"] for r in results if r["context"] == context and "loss" in r]
        if losses and max(losses) > 1.01 * min(losses):
            raise SystemExit(f"at {context} tokens the arms have losses {losses}: they do not compute the same")


if __name__ == "__main__":
    main()
