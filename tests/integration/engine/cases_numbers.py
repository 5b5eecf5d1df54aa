"""Cases about dtypes, non-finite gradients, refusals, verl's own path. See ``run.py``."""

from __future__ import annotations

import math
from typing import Any

import cpu_platform  # noqa: F401
import torch
import torch.distributed as dist
from ranks import (
    ADAPTER,
    INITIAL,
    MODELS,
    RANK,
    WORLD,
    all_rows,
    bits_of,
    build,
    configs,
    gathered,
    grads_of,
    mine,
    one_step,
    refusal,
    without_bounds,
)
from tiny import V, batch, full, reference_model
from verl.workers.engine.base import EngineRegistry

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.passes import jagged


def case_adapter_dtype() -> dict:
    out: dict[str, Any] = {}
    for model_dtype in ("bf16", "fp32"):
        engine = build("untied", model_dtype=model_dtype, dtype="bf16", lr=1e-5)
        before = {k: full(p.data).clone() for k, p in engine.module.named_parameters() if p.requires_grad}
        data = batch(mine(all_rows()))
        data["opsd_signal"] = jagged(engine.score(data, ADAPTER))
        for _ in range(2):
            with engine.train_mode():
                engine.train_batch(data.clone(recurse=False), ADAPTER)
        after = {k: full(p.data) for k, p in engine.module.named_parameters() if p.requires_grad}
        moved = sum(int((after[k] != b).sum()) for k, b in before.items())
        out[model_dtype] = {
            "base": str(next(p for k, p in engine.module.named_parameters() if "lora" not in k).dtype),
            "adapters": sorted({str(v.dtype) for v in after.values()}),
            "moved": moved / sum(b.numel() for b in before.values()),
            "stats": checks.adapter_stats(engine),
            "max_abs_B": max(float(v.abs().max()) for k, v in after.items() if "lora_B" in k),
            "frequencies": [b.tolist() for k, b in engine.module.named_buffers() if k.endswith(".inv_freq")],
        }
    return out


def case_bf16() -> dict:
    results, layout = {}, {}
    for dtype in ("fp32", "bf16"):
        engine = build("untied", dtype=dtype)
        results[dtype] = one_step(engine, batch(mine(all_rows())), ADAPTER)
        hybrid = without_bounds(build("hybrid", dtype=dtype))
        for name, measured in (("untied", engine), ("hybrid", hybrid)):
            layout[f"{name}_{dtype}"] = [measured.measure_layout(), measured.layout_threshold]
    a, b = (torch.cat([g.flatten() for _, g in sorted(results[d]["grads"].items())]) for d in ("fp32", "bf16"))
    kl = [torch.tensor(results[d]["divergence"]) for d in ("fp32", "bf16")]
    return {
        "layout": layout,
        "cosine": float(torch.cosine_similarity(a, b, 0)),
        "kl": float((kl[0] - kl[1]).abs().max()),
        "mean": float(kl[0].mean()),
    }


def case_nonfinite() -> dict:
    out = {}
    for name, value in (("inf", math.inf), ("nan", math.nan)):
        engine = build("untied")
        rows = all_rows()
        if RANK == WORLD - 1:  # one rank only
            mine(rows)[0]["opsd_coef"][0] = value
        data = batch(mine(rows))
        data["opsd_signal"] = jagged(engine.score(data, ADAPTER))
        before, message = bits_of(engine), ""
        try:
            with engine.train_mode():
                engine.train_batch(data, ADAPTER)
        except OpsdError as error:
            message = str(error)
        same = all(torch.equal(a, b) for a, b in zip(before, bits_of(engine), strict=True))
        out[name] = {"raised": gathered(message), "unchanged": gathered(same), "steps": engine.optimizer_steps}
    return out


def case_refusals() -> dict:
    full_engine, lora_engine = build("tied", False), build("untied")

    def moved() -> None:
        data = batch(mine(all_rows()))
        data["opsd_signal"] = jagged(lora_engine.score(data, ADAPTER))
        with lora_engine.train_mode():
            lora_engine.train_batch(data, ADAPTER)
        lora_engine.prepare(INITIAL)

    def unscored() -> None:
        with lora_engine.train_mode():
            lora_engine.forward_backward_batch(batch(mine(all_rows())), ADAPTER)

    def other_length() -> None:
        data = batch(mine(all_rows()))
        data["opsd_signal"] = jagged([h[:-1] for h in lora_engine.score(data, ADAPTER)])
        with lora_engine.train_mode():
            lora_engine.forward_backward_batch(data, ADAPTER)

    def other_token() -> None:
        rows = mine(all_rows())
        rows[0]["opsd_view_ids"] = (rows[0]["opsd_view_ids"] + 1) % V
        lora_engine.score(batch(rows), ADAPTER)

    def fields() -> None:
        lora_engine.score(batch(mine(all_rows())).exclude("opsd_view_len"), ADAPTER)

    return {
        "fsdp1": refusal(lambda: EngineRegistry.new("language_model", "fsdp", *configs("tied", strategy="fsdp"))),
        "ulysses": refusal(lambda: build("tied", ulysses_sequence_parallel_size=2)),
        "lm_head": refusal(lambda: build("untied", target_modules=["q_proj", "lm_head"])),
        "fused": refusal(lambda: _fused(lora_engine)),
        "adapter_off": refusal(lambda: full_engine.prepare(ADAPTER)),
        "unscored": refusal(unscored),
        "other_length": refusal(other_length),
        "other_token": refusal(other_token),
        "fields": refusal(fields),
        "shift": refusal(lambda: lora_engine.score(batch(mine(all_rows())), ADAPTER, shift=60)),
        "moved": refusal(moved),
    }


def _fused(engine: OpsdEngine) -> None:
    engine._prepared = None
    object.__setattr__(engine.model_config, "use_fused_kernels", True)
    try:
        engine.prepare(ADAPTER)
    finally:
        object.__setattr__(engine.model_config, "use_fused_kernels", False)


def case_own_path() -> dict:
    """Another loss function takes verl's path: cross-entropy against a sum by hand."""
    engine = build("untied", False)
    rows = mine(all_rows())
    data = batch(rows, temperature=1.0)
    seen = {}

    def loss(model_output: Any = None, data: Any = None, dp_group: Any = None) -> Any:
        total = -model_output["log_probs"].values().sum()
        seen["value"] = seen.get("value", 0.0) + float(total)
        return total, {}

    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss)
        grads = grads_of(engine)
    model = reference_model(f"{MODELS}/untied", False)
    want, parts = 0.0, []
    for group in (rows[i : i + 2] for i in range(0, len(rows), 2)):
        ids = torch.cat([r["input_ids"] for r in group])  # verl's labels are rolled over the whole packed micro-batch
        logits = torch.cat([model(input_ids=r["input_ids"][None]).logits[0] for r in group])
        parts.append(-logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None]).sum())
    total = sum(parts)
    total.backward()
    want = float(total)
    head = model.lm_head.weight.grad
    dist.all_reduce(head)
    return {
        "loss": abs(seen["value"] - want) / abs(want),
        "grad": float((grads["lm_head.weight"] * WORLD - head).norm() / head.norm()),
    }
