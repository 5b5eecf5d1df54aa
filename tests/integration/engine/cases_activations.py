"""Cases about which layers keep their activations: the gradient of every setting, and the bytes that are saved for it. See ``run.py``."""

from __future__ import annotations

from typing import Any

import cpu_platform  # noqa: F401
import torch
from ranks import ADAPTER, INITIAL, all_rows, build, gathered, mine, one_step, refusal
from tiny import batch
from torch.autograd.graph import saved_tensors_hooks

from verl_opsd.models import checkpointing
from verl_opsd.planning import memory
from verl_opsd.planning.shape import ModelShape

SETTINGS: dict[str, tuple[str, bool | None]] = {
    "none": ("none", None),
    "linear": ("linear_attention", None),
    "full": ("full_attention", None),
    "none_host": ("none", True),
    "full_host": ("full_attention", True),
}


class Saved:
    """Bytes of activations that wait for backward: of whole tensors, each storage once, without weights."""

    def __init__(self, engine: Any):
        shapes = [tuple(p.shape) for p in engine.module.parameters()]
        self.weights = {*shapes, *(s[::-1] for s in shapes)}  # no activation of these rows has one of these shapes
        self.storages: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # so that no address is used twice

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tuple(tensor.shape) not in self.weights:
            self.storages[storage.data_ptr()] = storage.nbytes()
            self.alive.append(tensor)
        return tensor


def case_activations() -> dict:
    out: dict[str, Any] = {}
    for model, lora in (("hybrid", True), ("untied", False)):
        loss = ADAPTER if lora else INITIAL
        rows = mine(all_rows())
        found, plain = {}, build(model, lora, checkpointing=False)
        engine = build(model, lora, checkpointing=True)
        shape = ModelShape.of(engine.module.config)
        moved: list[int] = []
        before = checkpointing.HostInputs._to_host

        def counting(self: Any, t: torch.Tensor, before: Any = before, moved: list[int] = moved) -> Any:
            moved.append(t.untyped_storage().nbytes())
            return before(self, t)

        checkpointing.HostInputs._to_host = counting  # type: ignore[method-assign]
        want = _measured(plain, rows, loss)
        found["verl"] = _compared(_measured(engine, rows, loss), want)
        for name, (keep, offload) in SETTINGS.items():
            if keep not in ("none", *shape.kinds):
                continue
            moved.clear()
            engine.set_activations(memory.activations(shape, 90, keep, offload, 0.0))
            found[name] = _compared(_measured(engine, rows, loss), want) | {"host": sum(moved)}
        checkpointing.HostInputs._to_host = before  # type: ignore[method-assign]
        out[model] = found | {"kept": {"bytes": want["bytes"]}, "layers": len(shape.kinds)}
        out[f"{model}_refused"] = refusal(lambda plain=plain: plain.set_activations(checkpointing.Plan((False,) * 3)))
    out["number"] = refusal(lambda: engine.set_activations(checkpointing.Plan((False,) * 7)))
    return out


def _measured(engine: Any, rows: list[dict], loss: Any) -> dict:
    """One step, and the bytes saved in its forwards on all ranks."""
    saved = Saved(engine)
    data = batch(rows, micro=1)
    with saved_tensors_hooks(saved, lambda t: t):
        found = one_step(engine, data, loss)
    return found | {"bytes": sum(gathered(sum(saved.storages.values())))}


def _compared(found: dict, want: dict) -> dict:
    errors = [float((found["grads"][k] - g).abs().max()) for k, g in want["grads"].items()]
    scale = max(float(g.abs().max()) for g in want["grads"].values())
    return {"grad": max(errors), "scale": scale, "loss": abs(found["loss"] - want["loss"]), "bytes": found["bytes"]}
