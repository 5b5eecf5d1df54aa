"""What the cases of one rank share: engines, rows, gathering, comparison. The first arguments of the process are RANK WORLD
PORT MODELS OUT."""

from __future__ import annotations

import sys
from typing import Any

import cpu_platform  # noqa: F401
import torch
import torch.distributed as dist
from tiny import full, make_row
from torch.distributed.tensor import distribute_tensor
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.engine_forwards import ScoringEngine
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
MODELS, OUT = sys.argv[4], sys.argv[5]
ROWS = 4
ADAPTER, INITIAL = OpsdLoss(chunk=5), OpsdLoss(chunk=5, reference="initial")


def configs(
    model: str,
    lora: bool = True,
    checkpointing: bool = False,
    packed: bool = True,
    reshard: bool = True,
    dtype: str = "fp32",
    model_dtype: str = "fp32",
    lr: float = 1e-2,
    dynamic: bool = False,
    **more: Any,
) -> tuple[Any, Any, Any, Any]:
    fsdp = {k: more.pop(k) for k in ("strategy", "ulysses_sequence_parallel_size") if k in more}
    attention = more.pop("attention", "sdpa")
    mc = HFModelConfig(
        path=f"{MODELS}/{model}",
        override_config={"attn_implementation": attention},
        lora_rank=4 if lora else 0,
        lora_alpha=8,
        use_remove_padding=packed,
        enable_gradient_checkpointing=checkpointing,
        **more,
    )
    ec = FSDPEngineConfig(
        **{"strategy": "fsdp2", **fsdp},
        use_torch_compile=False,
        reshard_after_forward=reshard,
        model_dtype=model_dtype,
        mixed_precision=dict(param_dtype=dtype, reduce_dtype="fp32", buffer_dtype="fp32"),
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=90,
        infer_max_token_len_per_gpu=90,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
    )
    oc = FSDPOptimizerConfig(lr=lr, clip_grad=1e9, total_training_steps=100, weight_decay=0.0)
    return mc, ec, oc, CheckpointConfig()


def build(*args: Any, **kwargs: Any) -> OpsdEngine:
    torch.manual_seed(0)
    mc, ec, oc, cc = configs(*args, **kwargs)
    engine = EngineRegistry.new("language_model", ec.strategy, mc, ec, oc, cc)
    engine.initialize()
    set_params(engine, "lora_B", 0.3)
    return engine


def without_bounds(engine: OpsdEngine) -> OpsdEngine:
    """verl's own inputs: linear-attention layers are not told where packed rows begin."""
    engine.prepare_model_inputs = super(ScoringEngine, engine).prepare_model_inputs  # type: ignore[method-assign]
    return engine


def set_params(engine: OpsdEngine, match: str, scale: float, seed: int = 5) -> None:
    """Random values, the same for any number of ranks, into every trainable parameter whose name contains ``match``."""
    g = torch.Generator().manual_seed(seed)
    for name, p in engine.module.named_parameters():
        if match in name and p.requires_grad:
            value = (torch.randn(p.shape, generator=g) * scale).to(p.dtype)
            p.data.copy_(distribute_tensor(value, p.device_mesh, p.placements))


def all_rows(n: int = ROWS, start: int = 100, **kwargs: Any) -> list[dict]:
    return [make_row(start + i, **kwargs) for i in range(n)]


def mine(rows: list[dict]) -> list[dict]:
    per = len(rows) // WORLD
    return rows[RANK * per : (RANK + 1) * per]


def gathered(value: Any) -> list[Any]:
    out: list[Any] = [None] * WORLD
    dist.all_gather_object(out, value)
    return out


def grads_of(engine: OpsdEngine) -> dict[str, torch.Tensor]:
    return {k: full(p.grad).clone() for k, p in engine.module.named_parameters() if p.grad is not None}


def one_step(engine: OpsdEngine, data: Any, loss: OpsdLoss, values: tuple[str, ...] = ()) -> dict[str, Any]:
    """Scores, then forward and backward; no optimizer step. Loss over ranks, divergences of all rows in order (and other ``values``
    of theirs), gradients."""
    if "opsd_signal" not in data:
        data["opsd_signal"] = jagged(engine.score(data, loss))
    if loss.anchor:
        data["opsd_base"] = jagged(engine.score(data, loss, "own"))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(data, loss)
        grads = grads_of(engine)
    total = torch.tensor(sum(out["loss"]), dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "loss": float(total) / WORLD,
        "divergence": [x for part in gathered(out["metrics"]["opsd/divergence"]) for x in part],
        "grads": grads,
    } | {v: [x for part in gathered(out["metrics"][f"opsd/{v}"]) for x in part] for v in values}


def copy_into(model: Any, engine: OpsdEngine) -> None:
    theirs = dict(model.named_parameters())
    for name, p in engine.module.named_parameters():
        theirs[name].data.copy_(full(p.data).float())


def compare(got: dict, want: dict, ordered: bool = True) -> dict:
    errors = {
        k: float((got["grads"][k] - g).norm() / g.norm().clamp(min=1e-12))
        for k, g in want["grads"].items()
        if k in got["grads"]
    }
    a, b = torch.tensor(got["divergence"]), want["divergence"]
    if not ordered:
        a, b = a.sort().values, b.sort().values
    return {
        "loss": abs(got["loss"] - want["loss"]),
        "loss_value": got["loss"],
        "divergence": float((a - b).abs().max()),
        "mean": float(b.mean()),
        "grad": max(errors.values()),
        "missing": sorted(set(got["grads"]) ^ set(want["grads"])),
    }


def refusal(action: Any) -> str:
    try:
        action()
    except OpsdError as error:
        return str(error)
    return ""


def means(field: Any) -> dict:
    values = torch.cat(list(field.unbind()))
    return {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}


def bits_of(engine: OpsdEngine) -> list[torch.Tensor]:
    return [p.detach().to_local().clone() for p in engine.module.parameters()]
