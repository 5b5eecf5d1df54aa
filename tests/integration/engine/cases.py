"""Runs on every rank: builds engines and measures; rank 0 writes the numbers, and the tests judge them.

    python cases.py RANK WORLD PORT MODELS OUT GROUP...

A case is a function ``case_*``; it is collective, and its return value (numbers, lists, strings) goes to ``OUT`` as JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import cpu_platform  # noqa: F401
import torch
import torch.distributed as dist
from tiny import V, batch, eager, full, make_row, reference_model
from torch.distributed.tensor import distribute_tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine.base import EngineRegistry

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.engine import OpsdEngine, OpsdLoss, adapters_off
from verl_opsd.verl_adapter.passes import jagged
from verl_opsd.verl_adapter.worker import OpsdTrainingWorker, select_engine

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
MODELS, OUT = sys.argv[4], sys.argv[5]
ROWS = 4
ADAPTER, INITIAL = OpsdLoss(chunk=5), OpsdLoss(chunk=5, reference="initial")


def configs(
    model: str, lora: bool = True, checkpointing: bool = False, packed: bool = True, reshard: bool = True, dtype: str = "fp32",
    model_dtype: str = "fp32", lr: float = 1e-2, dynamic: bool = False, **more: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    fsdp = {k: more.pop(k) for k in ("strategy", "ulysses_sequence_parallel_size") if k in more}
    mc = HFModelConfig(
        path=f"{MODELS}/{model}", override_config={"attn_implementation": "sdpa"}, lora_rank=4 if lora else 0, lora_alpha=8,
        use_remove_padding=packed, enable_gradient_checkpointing=checkpointing, **more,
    )  # fmt: skip
    ec = FSDPEngineConfig(
        **{"strategy": "fsdp2", **fsdp}, use_torch_compile=False, reshard_after_forward=reshard, model_dtype=model_dtype,
        mixed_precision=dict(param_dtype=dtype, reduce_dtype="fp32", buffer_dtype="fp32"), use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=90, infer_max_token_len_per_gpu=90, micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2,
    )  # fmt: skip
    oc = FSDPOptimizerConfig(lr=lr, clip_grad=1e9, total_training_steps=100, weight_decay=0.0)
    return mc, ec, oc, CheckpointConfig()


def build(*args: Any, **kwargs: Any) -> OpsdEngine:
    torch.manual_seed(0)
    mc, ec, oc, cc = configs(*args, **kwargs)
    engine = EngineRegistry.new("language_model", ec.strategy, mc, ec, oc, cc)
    engine.initialize()
    set_params(engine, "lora_B", 0.3)
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


def one_step(engine: OpsdEngine, data: Any, loss: OpsdLoss) -> dict[str, Any]:
    """Scores, then forward and backward; no optimizer step. Loss over ranks, divergences of all rows in order, gradients."""
    if "opsd_signal" not in data.keys():
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
    }


def copy_into(model: Any, engine: OpsdEngine) -> None:
    theirs = dict(model.named_parameters())
    for name, p in engine.module.named_parameters():
        theirs[name].data.copy_(full(p.data).float())


def compare(got: dict, want: dict, ordered: bool = True) -> dict:
    errors = {k: float((got["grads"][k] - g).norm() / g.norm().clamp(min=1e-12)) for k, g in want["grads"].items() if k in got["grads"]}
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


# ---- parity -----------------------------------------------------------------------------------------------------------


def _parity(model: str, lora: bool) -> dict:
    """All layouts of one model against one eager reference each."""
    loss = ADAPTER if lora else INITIAL
    out, want = {}, {}
    student, teacher = reference_model(f"{MODELS}/{model}", lora), None if lora else reference_model(f"{MODELS}/{model}", False)
    rows = all_rows()
    empty = all_rows()
    for i in range(ROWS // 2, ROWS):  # with 2 ranks: one rank has no loss position
        empty[i] = make_row(100 + i, loss_tokens=False)
    settings = [
        ("packed1", dict(), dict(micro=1), rows), ("packed2", dict(), dict(micro=2), rows),
        ("dynamic", dict(), dict(dynamic=True), rows), ("empty", dict(), dict(micro=1), empty),
        ("padded", dict(packed=False), dict(micro=2, packed=False), rows),
        ("checkpointed", dict(checkpointing=True), dict(micro=2), rows), ("no_reshard", dict(reshard=False), dict(micro=1), rows),
    ]  # fmt: skip
    if WORLD == 1:
        settings.append(("packed4", dict(), dict(micro=4), rows))
    engines: dict[str, OpsdEngine] = {}
    for name, build_with, batch_with, data_rows in settings:
        key = str(build_with)
        if key not in engines:
            engines[key] = build(model, lora, **build_with)
            engines[key].prepare(loss)
            if not lora:  # the student moves away from the frozen copy
                set_params(engines[key], "weight", 0.12, seed=8)
        engine = engines[key]
        kind = "empty" if data_rows is empty else "rows"
        if kind not in want:
            copy_into(student, engine)
            want[kind] = eager(student, teacher, data_rows, lora)
        got = one_step(engine, batch(mine(data_rows), **batch_with), loss)
        out[name] = compare(got, want[kind], ordered=name != "dynamic")
    return out


def case_parity_lora_untied() -> dict:
    return _parity("untied", True)


def case_parity_lora_tied() -> dict:
    return _parity("tied", True)


def case_parity_full_untied() -> dict:
    return _parity("untied", False)


def case_parity_full_tied() -> dict:
    return _parity("tied", False)


def case_anchor() -> dict:
    engine = build("untied")
    rows = all_rows()
    for i, row in enumerate(rows):
        row["opsd_anchor"] = torch.rand(len(row["opsd_position"]), generator=torch.Generator().manual_seed(i)) / 10
    student = reference_model(f"{MODELS}/untied", True)
    copy_into(student, engine)
    want = eager(student, None, rows, True)
    anchored = OpsdLoss(chunk=4, anchor=True)
    out = compare(one_step(engine, batch(mine(rows)), anchored), want)
    try:
        one_step(engine, batch(mine(rows)), ADAPTER)
    except OpsdError as error:
        out["refused"] = str(error)
    return out


def case_views() -> dict:
    """Per turn = per branch without a brief; another brief gives another gradient."""
    engine = build("untied")
    turn = one_step(engine, batch(mine(all_rows(brief=0, per_turn=True))), ADAPTER)
    branch = one_step(engine, batch(mine(all_rows(brief=0))), ADAPTER)
    briefed_turn = one_step(engine, batch(mine(all_rows(per_turn=True))), ADAPTER)
    briefed = one_step(engine, batch(mine(all_rows())), ADAPTER)
    other = all_rows()
    for row in other:
        row["opsd_view_ids"][3] = (row["opsd_view_ids"][3] + 50) % V
    changed = one_step(engine, batch(mine(other)), ADAPTER)

    def difference(a: dict, b: dict) -> float:
        return max(float((a["grads"][k] - g).norm() / g.norm()) for k, g in b["grads"].items())

    def kl(a: dict, b: dict) -> float:
        return max(abs(x - y) for x, y in zip(a["divergence"], b["divergence"], strict=True))

    passes = {tuple(r["opsd_view_len"].tolist()) for r in all_rows(brief=0, per_turn=True)}
    return {
        "passes": min(len(p) for p in passes),
        "kl": kl(turn, branch), "grad": difference(turn, branch),
        "briefed_kl": kl(briefed_turn, briefed), "briefed_grad": difference(briefed_turn, briefed),
        "brief_matters": difference(briefed, branch), "changed": difference(changed, briefed),
    }  # fmt: skip


def case_masked() -> dict:
    """Coefficient 0 everywhere; and NaN-free zeros at single positions are part of every parity case."""
    engine = build("tied")
    zero = one_step(engine, batch(mine(all_rows(coef=0.0))), ADAPTER)
    rows = all_rows(coef=0.0)
    rows[0]["opsd_coef"][0] = 1.0
    one = one_step(engine, batch(mine(rows)), ADAPTER)
    return {
        "nonzero": sum(int((g != 0).sum()) for g in zero["grads"].values()), "tensors": len(zero["grads"]),
        "one": sum(int((g != 0).sum()) for g in one["grads"].values()), "loss": zero["loss"],
    }  # fmt: skip


def case_one_against_two() -> dict:
    """Compared between runs with 1 and 2 ranks by the test."""
    engine = build("untied")
    losses = []
    data = batch(mine(all_rows()), temperature=1.0)
    data["opsd_signal"] = jagged(engine.score(data, ADAPTER))
    for _ in range(3):
        with engine.train_mode():
            out = engine.train_batch(data.clone(recurse=False), ADAPTER)
        total = torch.tensor(sum(out["loss"]))
        dist.all_reduce(total)
        losses.append(float(total) / WORLD)
    return {"losses": losses}


# ---- scoring ----------------------------------------------------------------------------------------------------------


def _state(engine: OpsdEngine) -> tuple:
    modules = list(engine.module.modules())
    return (
        [m.training for m in modules],
        [getattr(m, "_disable_adapters", None) for m in modules],
        [p.requires_grad for p in engine.module.parameters()],
        [tuple(getattr(m, "active_adapters", ())) for m in modules],
    )


def _bits(engine: OpsdEngine) -> list[torch.Tensor]:
    return [p.detach().to_local().clone() for p in engine.module.parameters()]


class Interrupt(Exception):
    """Raised in the middle of a scoring pass."""


def _interrupted(engine: OpsdEngine, data: Any, loss: OpsdLoss) -> bool:
    """Every rank fails in its second forward, inside the model."""
    calls, layer = [0], engine.module.get_submodule(next(n for n, _ in engine.module.named_modules() if n.endswith("layers.1")))

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise Interrupt

    handle = layer.register_forward_pre_hook(hook)
    try:
        engine.score(data, loss)
    except Interrupt:
        return True
    finally:
        handle.remove()
    return False


def case_state() -> dict:
    out: dict[str, Any] = {}
    for name, lora, loss, reshard in (
        ("lora", True, ADAPTER, True), ("lora_initial", True, INITIAL, False),
        ("full", False, INITIAL, True), ("full_no_reshard", False, INITIAL, False),
    ):  # fmt: skip
        engine = build("tied", lora, reshard=reshard)
        engine.prepare(loss)
        teacher = [h.clone() for h in engine.score(batch(mine(all_rows())), loss)]
        set_params(engine, "", 0.2, seed=11)
        engine.module.train()
        modules = list(engine.module.modules())
        modules[5].eval()  # a mixture of modes, and for LoRA one adapter that was off before
        layers = [m for m in modules if hasattr(m, "_disable_adapters") and hasattr(m, "lora_A")]
        if layers:
            layers[1]._disable_adapters = True
        state, bits = _state(engine), _bits(engine)
        data = batch(mine(all_rows()))
        again = engine.score(data, loss)
        same = max(float((a - b).abs().max()) for a, b in zip(teacher, again, strict=True))
        after = _state(engine) == state and all(torch.equal(a, b) for a, b in zip(bits, _bits(engine), strict=True))
        interrupted = _interrupted(engine, data, loss)
        engine._reshard()
        broken = _state(engine) == state and all(torch.equal(a, b) for a, b in zip(bits, _bits(engine), strict=True))
        if layers:
            layers[1]._disable_adapters = False
        norms = []
        for step in range(2):  # training goes on: nothing is frozen, and no forward uses stale weights
            fresh = batch(mine(all_rows()))
            if step:
                fresh["opsd_signal"] = jagged(teacher)
            grads = one_step(engine, fresh, loss)["grads"]
            norms.append(math.sqrt(sum(float(g.norm()) ** 2 for g in grads.values())))
        out[name] = {"teacher_unmoved": same, "after": after, "interrupted": interrupted, "after_error": broken, "norms": norms,
                     "forwards": gathered(engine.forwards)}  # fmt: skip
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
        "shapes": gathered([tuple(h.shape) == (len(r["opsd_position"]), engine.head.in_features) for h, r in zip(hidden, rows, strict=True)]),
    }  # fmt: skip


def case_grouping() -> dict:
    """A scoring pass in groups by token budget or by sequences gives what one sequence at a time gives."""
    alone = build("untied", packed=False)
    out = {}
    want = torch.cat(alone.score(batch(mine(all_rows(per_turn=True))), ADAPTER))
    for name, dynamic in (("tokens", True), ("sequences", False)):
        engine = build("untied", dynamic=dynamic)
        got = torch.cat(engine.score(batch(mine(all_rows(per_turn=True))), ADAPTER))
        engine.forwards, alone.forwards = 0, 0
        engine.score(batch(mine(all_rows(per_turn=True))), ADAPTER)
        alone.score(batch(mine(all_rows(per_turn=True))), ADAPTER)
        out[name] = {"error": float((got - want).abs().max()), "forwards": engine.forwards, "alone": alone.forwards}
    return out


# ---- controls and guards ----------------------------------------------------------------------------------------------


def _means(field: Any) -> dict:
    values = torch.cat(list(field.unbind()))
    return {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}


def case_control() -> dict:
    out: dict[str, Any] = {}
    rows = all_rows()
    for name, engine, loss in (("lora", build("untied"), ADAPTER), ("full", build("tied", False), INITIAL), ("dynamic", build("untied", dynamic=True), ADAPTER)):
        engine.prepare(loss)
        set_params(engine, "", 0.2, seed=11)
        settings = dict(micro=2, dynamic=name == "dynamic")
        run = lambda **k: checks.control(engine, batch(mine(rows), **settings), loss, **k)  # noqa: E731, B023
        identity, shifted, view = run(teacher="own"), run(teacher="own", shift=1), run(teacher="view", adapters="on")
        trained = one_step(engine, batch(mine(rows), **settings), loss)["divergence"]
        mean = [float(x) for part in gathered(torch.cat(list(view["opsd_divergence"].unbind())).tolist()) for x in part]
        lengths = [len(r) for r in identity["opsd_divergence"].unbind()]
        got, want = torch.tensor(mean).sort().values, torch.tensor(trained).sort().values
        out[name] = {
            "identity": _means(identity["opsd_divergence"]), "shifted": _means(shifted["opsd_divergence"]),
            "agree": _means(identity["opsd_agree"]), "rows": lengths == [len(r["opsd_position"]) for r in mine(rows)],
            "view_is_training": float((got - want).abs().max()), "grads": len(grads_of(engine)),
        }  # fmt: skip
        engine.optimizer_zero_grad()
    return out


def case_logprobs() -> dict:
    out = {}
    for name, lora in (("untied", True), ("tied", True), ("tied", False)):
        engine = build(name, lora)
        model = reference_model(f"{MODELS}/{name}", lora)
        copy_into(model, engine)
        sequences, positions = [[7, 8, 9, 10, 11], [40, 41, 42]], [[0, 4], [1]]
        got = checks.logprobs(engine, sequences, positions)
        with torch.no_grad():
            want = [model(input_ids=torch.tensor([s])).logits[0].log_softmax(-1)[p] for s, p in zip(sequences, positions, strict=True)]
        out[f"{name}_{lora}"] = {
            "error": max(float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(got, want, strict=True)),
            "shapes": [list(a.shape) for a in got], "dtype": str(got[0].dtype),
        }  # fmt: skip
    return out


def case_checks() -> dict:
    out: dict[str, Any] = {}
    for name, lora, loss in (("untied", True, ADAPTER), ("tied", False, INITIAL), ("hybrid", True, ADAPTER), ("granite", True, ADAPTER)):
        engine = build(name, lora)
        found = checks.startup_checks(engine, loss)
        out[name] = {c["name"]: c for c in found}
        out[name]["shares"] = engine.shares_forwards()
        out[name]["same"] = len({json.dumps(r, sort_keys=True) for r in gathered(found)})
        try:
            checks.require(found)
            out[name]["required"] = "passed"
        except OpsdError as error:
            out[name]["required"] = str(error)
    return out


def case_hybrid() -> dict:
    """Linear-attention layers see their neighbour when packed here: rows go one a forward, and the loss stays right."""
    engine = build("hybrid")
    student = reference_model(f"{MODELS}/hybrid", True)
    copy_into(student, engine)
    want = eager(student, None, all_rows(), True)
    out = {}
    for name, settings in (("packed", dict(micro=2)), ("dynamic", dict(dynamic=True))):
        out[name] = compare(one_step(engine, batch(mine(all_rows()), **settings), ADAPTER), want, ordered=name != "dynamic")
    engine.layout_error = 0.0  # the verdict overruled: what would have happened
    out["overruled"] = compare(one_step(engine, batch(mine(all_rows()), micro=2), ADAPTER), want)
    return out


# ---- numbers ----------------------------------------------------------------------------------------------------------


def case_adapter_dtype() -> dict:
    out: dict[str, Any] = {}
    for model_dtype in ("bf16", "fp32"):
        engine = build("untied", model_dtype=model_dtype, dtype="bf16", lr=1e-5)
        before = {k: full(p.data).clone() for k, p in engine.module.named_parameters() if p.requires_grad}
        data = batch(mine(all_rows()))
        data["opsd_signal"] = jagged(engine.score(data, ADAPTER))
        for _ in range(5):
            with engine.train_mode():
                engine.train_batch(data.clone(recurse=False), ADAPTER)
        after = {k: full(p.data) for k, p in engine.module.named_parameters() if p.requires_grad}
        moved = sum(int((after[k] != b).sum()) for k, b in before.items())
        out[model_dtype] = {
            "base": str(next(p for k, p in engine.module.named_parameters() if "lora" not in k).dtype),
            "adapters": sorted({str(v.dtype) for v in after.values()}),
            "moved": moved / sum(b.numel() for b in before.values()), "stats": checks.adapter_stats(engine),
            "max_abs_B": max(float(v.abs().max()) for k, v in after.items() if "lora_B" in k),
        }  # fmt: skip
    return out


def case_bf16() -> dict:
    results = {}
    for dtype in ("fp32", "bf16"):
        engine = build("untied", dtype=dtype)
        results[dtype] = one_step(engine, batch(mine(all_rows())), ADAPTER)
    a, b = (torch.cat([g.flatten() for _, g in sorted(results[d]["grads"].items())]) for d in ("fp32", "bf16"))
    kl = [torch.tensor(results[d]["divergence"]) for d in ("fp32", "bf16")]
    return {"cosine": float(torch.cosine_similarity(a, b, 0)), "kl": float((kl[0] - kl[1]).abs().max()), "mean": float(kl[0].mean())}


def case_nonfinite() -> dict:
    out = {}
    for name, value in (("inf", math.inf), ("nan", math.nan)):
        engine = build("untied")
        rows = all_rows()
        if RANK == WORLD - 1:  # one rank only
            mine(rows)[0]["opsd_coef"][0] = value
        data = batch(mine(rows))
        data["opsd_signal"] = jagged(engine.score(data, ADAPTER))
        before, message = _bits(engine), ""
        try:
            with engine.train_mode():
                engine.train_batch(data, ADAPTER)
        except OpsdError as error:
            message = str(error)
        same = all(torch.equal(a, b) for a, b in zip(before, _bits(engine), strict=True))
        out[name] = {"raised": gathered(message), "unchanged": gathered(same), "steps": engine.optimizer_steps}
    return out


def _refusal(action: Any) -> str:
    try:
        action()
    except OpsdError as error:
        return str(error)
    return ""


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
        "fsdp1": _refusal(lambda: EngineRegistry.new("language_model", "fsdp", *configs("tied", strategy="fsdp"))),
        "ulysses": _refusal(lambda: build("tied", ulysses_sequence_parallel_size=2)),
        "lm_head": _refusal(lambda: build("untied", target_modules=["q_proj", "lm_head"])),
        "fused": _refusal(lambda: _fused(lora_engine)),
        "adapter_off": _refusal(lambda: full_engine.prepare(ADAPTER)),
        "anchor": _refusal(lambda: full_engine.prepare(OpsdLoss(reference="initial", anchor=True))),
        "unscored": _refusal(unscored), "other_length": _refusal(other_length), "other_token": _refusal(other_token),
        "fields": _refusal(fields), "shift": _refusal(lambda: lora_engine.score(batch(mine(all_rows())), ADAPTER, shift=60)),
        "moved": _refusal(moved),
    }  # fmt: skip


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
    return {"loss": abs(seen["value"] - want) / abs(want), "grad": float((grads["lm_head.weight"] * WORLD - head).norm() / head.norm())}


# ---- workers ----------------------------------------------------------------------------------------------------------


def _worker(**kwargs: Any) -> OpsdTrainingWorker:
    torch.manual_seed(0)
    mc, ec, oc, cc = configs("untied", **kwargs)
    worker = OpsdTrainingWorker(
        TrainingWorkerConfig(model_type="language_model", model_config=mc, engine_config=ec, optimizer_config=oc, checkpoint_config=cc)
    )
    worker.reset()
    set_params(worker.engine, "lora_B", 0.3)
    return worker


def case_worker() -> dict:
    rows = all_rows(8)

    def update(signal: bool | None) -> tuple[dict, int, list]:
        worker = _worker()
        worker.set_loss_fn(ADAPTER)
        worker.engine.shares_forwards()
        data = batch(mine(rows), mini_batch_size=4, epochs=2, seed=1, dataloader_kwargs={"shuffle": True})
        if signal or (signal is None and RANK == 0):
            data["opsd_signal"] = jagged(worker.engine.score(data, ADAPTER))
        worker.engine.forwards = 0
        out = worker.train_mini_batch(data)
        return tu.get(out, "metrics"), worker.engine.forwards, [full(p.data).clone() for p in worker.engine.module.parameters()]

    metrics, forwards, weights = update(False)
    given, given_forwards, given_weights = update(True)
    lengths = {k: len(v) for k, v in metrics.items() if k.startswith("opsd/")}
    return {
        "keys": sorted(metrics), "lengths": sorted(set(lengths.values())), "tokens": sum(len(r["opsd_position"]) for r in rows),
        "steps": sorted(set(metrics["opsd/step"])), "losses": [float(x) for x in metrics["loss"]], "norms": [float(x) for x in metrics["grad_norm"]],
        "weighted": sum(c * d for c, d, s in zip(metrics["opsd/coef"], metrics["opsd/divergence"], metrics["opsd/step"], strict=True) if s == 0),
        "flat": all(isinstance(x, (int, float)) for x in metrics["opsd/divergence"]),
        "forwards": gathered(forwards), "given_forwards": gathered(given_forwards),
        "same": all(torch.equal(a, b) for a, b in zip(weights, given_weights, strict=True)),
        "disagree": gathered(_refusal(lambda: update(None))) if WORLD > 1 else [],
        "set_loss": _refusal(lambda: _worker(lora=False).set_loss_fn(ADAPTER)),
    }  # fmt: skip


def case_remote() -> dict:
    """`OpsdWorker` from verl's own composed configuration, with the methods that the trainer calls."""
    from hydra import compose, initialize_config_module

    from verl_opsd.verl_adapter.worker import OpsdWorker

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={MODELS}/untied", "actor_rollout_ref.model.lora_rank=4",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa", "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.name=vllm",
                "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
                "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
            ],
        )  # fmt: skip
    os.environ.pop("VERL_ENGINE_VENDOR"), os.environ.pop("VERL_ENGINE_DEVICE", None)
    worker = OpsdWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    worker.set_loss_fn(ADAPTER)
    found = worker.opsd_checks()
    data = batch(mine(all_rows()))
    identity = batch(mine(all_rows()), opsd_control_teacher="own", opsd_control_shift=0, opsd_control_adapters="off")
    shifted = batch(mine(all_rows()), opsd_control_teacher="own", opsd_control_shift=1, opsd_control_adapters="off")
    return {
        "engine": type(worker.actor.engine).__name__, "passed": all(c["passed"] for c in found), "stats": worker.opsd_adapter_stats(),
        "identity": _means(worker.opsd_control(identity)["opsd_divergence"]), "shifted": _means(worker.opsd_control(shifted)["opsd_divergence"]),
        "unnamed": _refusal(lambda: worker.opsd_control(data)),
        "logprobs": gathered([list(a.shape) for a in worker.opsd_logprobs([[5, 6, 7]], [[0, 2]])]),
    }  # fmt: skip


def main() -> None:
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
    os.environ["WG_BACKEND"] = "ray"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60))
    select_engine()
    results: dict[str, Any] = {}
    for name in sys.argv[6:]:
        started = time.time()
        try:
            results[name] = globals()[f"case_{name}"]()
        except BaseException:
            results[name] = {"traceback": traceback.format_exc()}
            print(f"rank {RANK} case {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        results[name]["seconds"] = round(time.time() - started, 2)
        if RANK == 0:
            with open(OUT, "w") as f:
                json.dump(results, f)
        if "traceback" in results[name]:
            os._exit(1)  # ranks may no longer agree about where they are
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
