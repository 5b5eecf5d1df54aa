"""Cases about the scoring pass. See ``run.py``."""

from __future__ import annotations

import math
import shutil
from typing import Any

import cpu_platform  # noqa: F401
import torch
from ranks import ADAPTER, INITIAL, MODELS, RANK, all_rows, build, gathered, mine, one_step, set_params
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import batch, make_row, reference_model

from verl_opsd.errors import OpsdError
from verl_opsd.models.forward import adapters_off
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged


def _state(engine: OpsdEngine) -> tuple:
    modules = list(engine.module.modules())
    return (
        [m.training for m in modules],
        [getattr(m, "_disable_adapters", None) for m in modules],
        [p.requires_grad for p in engine.module.parameters()],
        [str(getattr(m, "_active_adapter", None)) for m in modules],
    )


class Interrupt(Exception):
    """Raised in the middle of a scoring pass."""


def _interrupted(engine: OpsdEngine, data: Any, loss: OpsdLoss) -> tuple[bool, bool]:
    """Every rank fails in its second forward, inside the model: whether it did, and whether dropout or gradients were on there."""
    calls, training, layer = (
        [0],
        [True],
        engine.module.get_submodule(next(n for n, _ in engine.module.named_modules() if n.endswith("layers.1"))),
    )

    def hook(*_: Any) -> None:
        calls[0] += 1
        training[0] = torch.is_grad_enabled() or any(m.training for m in engine.module.modules())
        if calls[0] == 2:
            raise Interrupt

    handle = layer.register_forward_pre_hook(hook)
    try:
        engine.score(data, loss)
    except Interrupt:
        return True, training[0]
    finally:
        handle.remove()
    return False, training[0]


def case_state() -> dict:
    out: dict[str, Any] = {}
    for name, lora, loss, reshard in (
        ("lora", True, ADAPTER, False),  # without a reshard after each forward: what was gathered would be used again
        ("lora_initial", True, INITIAL, True),
        ("full", False, INITIAL, True),
        ("full_no_reshard", False, INITIAL, False),
        ("lora_ema", True, OpsdLoss(chunk=5, teacher="ema", decay=0.9), True),
        ("full_lagged", False, OpsdLoss(chunk=5, teacher="lagged", lag=2, reference="initial"), False),
    ):
        engine = build("tied", lora, reshard=reshard, packed=False)
        engine.prepare(loss)
        teacher = [h.clone() for h in engine.score(batch(mine(all_rows())), loss)]
        set_params(engine, "", 0.2, seed=11)
        engine.module.train()
        modules = list(engine.module.modules())
        modules[5].eval()  # a mixture of modes, and for LoRA one adapter that was off before
        layers = [m for m in modules if hasattr(m, "_disable_adapters") and hasattr(m, "lora_A")] if loss is ADAPTER else []
        if layers:
            layers[1]._disable_adapters = True
        shards = [p.detach().to_local() for p in engine.module.parameters()]
        state, bits = _state(engine), [x.clone() for x in shards]
        data = batch(mine(all_rows()))
        again = engine.score(data, loss)
        same = max(float((a - b).abs().max()) for a, b in zip(teacher, again, strict=True))
        after = _state(engine) == state and all(torch.equal(a, b) for a, b in zip(bits, shards, strict=True))
        embedding = next(x for x, (n, _) in zip(shards, engine.module.named_parameters(), strict=True) if "embed_tokens" in n)
        embedding.mul_(2)  # a base weight: no copy of the trained ones holds it
        moved = max(float((a - b).abs().max()) for a, b in zip(again, engine.score(data, loss), strict=True))
        embedding.div_(2)
        norms = []
        for step in range(2):  # training goes on: nothing is frozen, and no forward uses stale weights
            if layers:
                layers[1]._disable_adapters = False
            fresh = batch(mine(all_rows()))
            if step:
                fresh["opsd_signal"] = jagged(teacher)
            grads = one_step(engine, fresh, loss)["grads"]
            norms.append(math.sqrt(sum(float(g.norm()) ** 2 for g in grads.values())))
        engine._reshard()
        engine.module.train()
        modules[5].eval()
        if layers:
            layers[1]._disable_adapters = True
        interrupted, training = _interrupted(engine, data, loss)
        broken = _state(engine) == state and all(torch.equal(a, b) for a, b in zip(bits, shards, strict=True))
        out[name] = {"teacher_unmoved": same, "after": after, "interrupted": interrupted, "after_error": broken, "norms": norms}
        out[name] |= {"training": training, "moved": moved}
    return out


def case_adapters_off() -> dict:
    """Adapter off = the base model; and only the flag is touched, inside too."""
    engine = build("untied")
    base = reference_model(f"{MODELS}/untied", False)
    ids = torch.arange(5, 25)
    before = [p.requires_grad for p in engine.module.parameters()]
    with adapters_off(engine.module):
        inside = [p.requires_grad for p in engine.module.parameters()]
        logits = torch.from_numpy(checks.logprobs(engine, [ids.tolist()], [list(range(20))])[0])
    with torch.no_grad():
        want = base(input_ids=ids[None]).logits[0].log_softmax(-1)
    on = torch.from_numpy(checks.logprobs(engine, [ids.tolist()], [list(range(20))])[0])
    return {"error": float((logits - want).abs().max()), "flags": before == inside, "adapter": float((on - want).abs().max())}


def case_uneven() -> dict:
    """Rank 0 scores rows of several passes, the others of one; some have no loss position at all."""
    engine = build("untied", packed=False)
    rows = [make_row(300 + i, per_turn=RANK == 0, loss_tokens=RANK == 0 or i == 0) for i in range(3)]
    before = engine.forwards
    hidden = engine.score(batch(rows), ADAPTER)
    return {
        "forwards": gathered(engine.forwards - before),
        "passes": gathered(sum(len(r["opsd_view_len"]) for r in rows if len(r["opsd_position"]))),
        "shapes": gathered(
            [tuple(h.shape) == (len(r["opsd_position"]), engine.head.in_features) for h, r in zip(hidden, rows, strict=True)]
        ),
    }


def case_grouping() -> dict:
    """A scoring pass in groups by token budget or by sequences gives what one sequence at a time gives."""
    alone = build("untied", packed=False)
    out: dict[str, Any] = {}
    want = torch.cat(alone.score(batch(mine(all_rows(per_turn=True))), ADAPTER))
    for name, dynamic in (("tokens", True), ("sequences", False)):
        engine = build("untied", dynamic=dynamic)
        got = torch.cat(engine.score(batch(mine(all_rows(per_turn=True))), ADAPTER))
        engine.forwards, alone.forwards = 0, 0
        engine.score(batch(mine(all_rows(per_turn=True))), ADAPTER)
        alone.score(batch(mine(all_rows(per_turn=True))), ADAPTER)
        out[name] = {"error": float((got - want).abs().max()), "forwards": engine.forwards, "alone": alone.forwards}
    return out


def case_rope() -> dict:
    """Position ids of checkpoints with a processor of images (verl's four rows): what verl makes of the inputs, packed and padded."""
    out = {}
    for packed in (True, False):
        engine = build("hybrid", packed=packed)
        given = engine.inputs([torch.arange(5), torch.arange(3)])
        rows = [torch.arange(n).expand(4, -1) for n in (5, 3)]
        given["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        prepared, _ = engine.prepare_model_inputs(given)
        out["packed" if packed else "padded"] = prepared["position_ids"].tolist()
    return out


def case_multimodal() -> dict:
    """A checkpoint without one of its weights; a multimodal one against the text model inside it: gradients, and what is published, by the names of the files."""
    out: dict[str, Any] = {}
    for lora in (True, False):
        text, whole = (build(name, lora) for name in ("hybrid", "multimodal"))
        want, got = (one_step(e, batch(mine(all_rows())), ADAPTER if lora else INITIAL)["grads"] for e in (text, whole))
        out[f"grads_{lora}"] = max(float((got[k] - want[k]).abs().max()) for k in want) if want.keys() == got.keys() else None
        inside, published = (dict(e.get_per_tensor_param(base_sync_done=True)[0]) for e in (text, whole))
        out[f"same_{lora}"] = [torch.equal(a, b) for a, b in zip(inside.values(), published.values(), strict=True)]
        out[f"names_{lora}"] = sorted(published)
    shutil.copytree(f"{MODELS}/untied", f"{MODELS}/cut")
    weights = load_file(f"{MODELS}/cut/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, f"{MODELS}/cut/model.safetensors", {"format": "pt"})
    try:
        build("cut")
    except OpsdError as error:
        out["cut"] = str(error)
    with safe_open(f"{MODELS}/multimodal/model.safetensors", "pt") as f:
        out["stored"] = sorted(f.keys())
    return out
