"""Runs on every rank: the engine's loss and gradients on rows of ids and masks; rank 0 writes the numbers, and the tests judge them.

python sft_ranks.py RANK WORLD PORT MODELS OUT
"""

from __future__ import annotations

import json
import math
import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import cpu_platform  # noqa: F401
import torch
import torch.distributed as dist
from ranks import MODELS, OUT, RANK, WORLD, configs, copy_into, grads_of, refusal, set_params
from tensordict import TensorDict
from tiny import V, reference_model
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import sft_loss

from verl_opsd.verl_adapter.sft import SftEngine, SftEngineConfig

LOSS = partial(sft_loss, config=None)
GATE = (3.0, -5.5)
ANCHOR = 0.7


def rows(n: int = 4, first: bool = True) -> list[dict[str, torch.Tensor]]:
    """Rows of several lengths with two replies each; the last is padding, without any loss. ``first``: whether the first reply has loss."""
    out = []
    for i in range(n - 1):
        g = torch.Generator().manual_seed(40 + i)
        ids = torch.randint(5, V, (9 + 4 * i,), generator=g)
        mask = torch.zeros_like(ids)
        mask[3:5], mask[-2:] = first, 1
        out.append({"input_ids": ids, "loss_mask": mask, "position_ids": torch.arange(len(ids))})
    pad = torch.tensor([1, 1])
    return [*out, {"input_ids": pad, "loss_mask": pad * 0, "position_ids": torch.arange(2)}]


def batch(mine: list[dict], packed: bool, micro: int, dynamic: bool, temperature: float = 0.5) -> TensorDict:
    data = TensorDict(
        {k: torch.nested.as_nested_tensor([r[k] for r in mine], layout=torch.jagged) for k in mine[0]}, batch_size=len(mine)
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=micro,
        max_token_len_per_gpu=30,
        pad_token_id=0,
        temperature=temperature,
    )
    return data


def build(model: str, lora: bool, packed: bool = True, vendor: str = "opsd_sft", **sft: Any) -> Any:
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    torch.manual_seed(0)
    mc, ec, oc, cc = configs(model, lora=lora, packed=packed)
    if vendor == "opsd_sft":
        fields = {k: v for k, v in ec.items() if k != "_target_"}
        ec = SftEngineConfig(**fields, sft={"chunk": 3, **sft})
    engine = EngineRegistry.new("language_model", "fsdp2", mc, ec, oc, cc)
    engine.initialize()
    set_params(engine, "lora_B", 0.3)
    return engine


def own_rows(first: bool = True) -> list[dict[str, torch.Tensor]]:
    per = len(rows()) // WORLD
    return rows(first=first)[RANK * per : (RANK + 1) * per]


def step(
    engine: Any, packed: bool = True, micro: int = 1, dynamic: bool = False, first: bool = True, **how: Any
) -> dict[str, Any]:
    data = batch(own_rows(first), packed, micro, dynamic, **how)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(data, LOSS)
        grads = grads_of(engine)
    total = torch.tensor(sum(out["loss"]), dtype=torch.float64)
    dist.all_reduce(total)
    return {"loss": float(total) / WORLD, "grads": grads}


def by_hand(model: Any, gate: Any = None, base: Any = None, first: bool = True) -> dict[str, Any]:
    """Cross-entropy from full logits of plain transformers, one sequence at a time, over all loss tokens of the batch."""
    model.zero_grad()
    every = rows(first=first)
    total = sum(int(r["loss_mask"].sum()) for r in every)
    loss = torch.zeros(())
    for row in every:
        target = row["loss_mask"].nonzero()[:, 0]
        if not len(target):
            continue
        logp = model(input_ids=row["input_ids"][None]).logits[0].log_softmax(-1)[target - 1]
        nll = -logp.gather(-1, row["input_ids"][target][:, None])[:, 0]
        weight = 1.0 if gate is None else torch.sigmoid(gate[0] * (-nll.detach() - gate[1]))
        loss = loss + (weight * nll).sum() / total
        if base is not None:
            with torch.no_grad():
                logq = base(input_ids=row["input_ids"][None]).logits[0].log_softmax(-1)[target - 1]
            loss = loss + ANCHOR * (logp.exp() * (logp - logq)).sum() / total
    loss.backward()
    return {"loss": float(loss), "grads": {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}}


def distance(got: dict, want: dict) -> dict[str, float]:
    shared = [k for k in want["grads"] if k in got["grads"]]
    worst = max(float((got["grads"][k] - want["grads"][k]).norm() / want["grads"][k].norm().clamp(min=1e-9)) for k in shared)
    return {
        "loss": got["loss"],
        "want": want["loss"],
        "grad": worst,
        "tensors": len(shared),
        "extra": len(set(got["grads"]) ^ set(want["grads"])),
    }


def plain(engine: Any, model: str, lora: bool) -> Any:
    reference = reference_model(f"{MODELS}/{model}", lora)
    copy_into(reference, engine)
    return reference


def anchored(lora: bool) -> dict[str, Any]:
    """A second step: the weights have moved away from those of the anchor."""
    engine = build("tied", lora, anchor=ANCHOR, gate={"kappa": GATE[0], "gamma": GATE[1]})
    base = reference_model(f"{MODELS}/tied", False) if lora else plain(engine, "tied", False)
    with engine.train_mode():
        engine.train_batch(batch(own_rows(), True, 1, False), LOSS)
    now = plain(engine, "tied", lora)
    held = {"validation": validated(engine), "validation_want": by_hand(now, gate=GATE)["loss"]}
    return distance(step(engine), by_hand(now, gate=GATE, base=base)) | held


def validated(engine: Any) -> float:
    """The loss that verl's validation gets, mean over ranks."""
    data = batch(own_rows(), True, 1, True)
    tu.assign_non_tensor(data, compute_loss=True)
    with engine.eval_mode():
        inferred = engine.infer_batch(data, loss_function=LOSS)
    total = torch.tensor(sum(inferred["loss"]), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / WORLD


def resumed() -> dict[str, Any]:
    """A step after a checkpoint was loaded into a new engine: the anchor is the weights from before it."""
    engine = build("tied", False, anchor=ANCHOR)
    with engine.train_mode():
        engine.train_batch(batch(own_rows(), True, 1, False), LOSS)
    engine.save_checkpoint(f"{OUT}-step1", global_step=1)
    torch.save({}, f"{OUT}-step1/data_{RANK}.pt")
    again = build("tied", False, anchor=ANCHOR)
    base = plain(again, "tied", False)
    again.load_checkpoint(f"{OUT}-step1")
    trained = plain(again, "tied", False)
    moved = max(float((a - b).abs().max()) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    return distance(step(again), by_hand(trained, base=base)) | {"moved": moved}


def measure() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for model in ("tied", "hybrid"):
        for lora in (False, True):
            engine = build(model, lora)
            want = by_hand(plain(engine, model, lora))
            for name, how in {
                "alone": {"micro": 1},
                "packed": {"micro": len(rows()) // WORLD},
                "dynamic": {"dynamic": True},
            }.items():
                out[f"{model}-{'lora' if lora else 'full'}-{name}"] = distance(step(engine, **how), want)
            if not lora:
                engine.pad_to_length, engine.pad_to_length_bucket = True, 64
                out[f"{model}-static"] = distance(step(engine, micro=len(rows()) // WORLD), want)
                engine.pad_to_length = False
            out[f"{model}-{'lora' if lora else 'full'}-shares"] = engine.shares_forwards()
            if model == "hybrid" and not lora:  # as if its kernels were missing
                engine.layout_error, before = math.inf, engine.forwards
                apart = distance(step(engine, micro=len(rows()) // WORLD, dynamic=True), want)
                out["apart"] = apart | {"forwards": engine.forwards - before}
        engine = build(model, False, packed=False)
        want = by_hand(plain(engine, model, False))
        for name, micro in (("padded", 1), ("padded-together", len(rows()) // WORLD)):
            out[f"{model}-{name}"] = distance(step(engine, packed=False, micro=micro), want)
    verls = build("tied", False, vendor="opsd")
    out["verls_own_path"] = distance(step(verls, temperature=1.0), by_hand(plain(verls, "tied", False)))
    one_turn = build("tied", False)
    out["one_turn"] = distance(step(one_turn, first=False), by_hand(plain(one_turn, "tied", False), first=False))
    gated = build("tied", False, gate={"kappa": GATE[0], "gamma": GATE[1]})
    out["gate"] = distance(step(gated), by_hand(plain(gated, "tied", False), gate=GATE))
    for lora in (False, True):
        out[f"anchor-{'lora' if lora else 'full'}"] = anchored(lora)
    out["anchor-resumed"] = resumed()
    engine = build("tied", False)
    out["validation"] = {"loss": validated(engine), "want": by_hand(plain(engine, "tied", False))["loss"]}
    bad = rows()
    bad[0]["loss_mask"][0] = 1
    out["first"] = refusal(lambda: engine.forward_backward_batch(batch(bad, True, 1, False), LOSS))
    assert isinstance(engine, SftEngine)
    return out


def main() -> None:
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60))
    out = measure()
    if RANK == 0:
        with open(OUT, "w") as f:
            json.dump(out, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
