"""Cases about Ulysses sequence parallelism: two ranks share every sequence. See ``run.py``."""

from __future__ import annotations

import cpu_platform  # noqa: F401
import torch
from cases_parity import kept_reference, reward_reference, rewarded_rows
from ranks import (
    ADAPTER,
    INITIAL,
    MODELS,
    WORLD,
    all_rows,
    build,
    compare,
    copy_into,
    gathered,
    means,
    mine,
    one_step,
    set_params,
)
from tiny import batch, eager, reference_model

from verl_opsd.distill.policy import PpoClip
from verl_opsd.verl_adapter import checks, ulysses
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import OpsdLoss


def _rows(anchor: bool = False) -> list[dict]:
    rows = all_rows()
    for i, row in enumerate(rows if anchor else []):
        row["opsd_anchor"] = torch.rand(len(row["opsd_position"]), generator=torch.Generator().manual_seed(i)) / 10
    return rows


def _step(engine: OpsdEngine, loss: OpsdLoss, rows: list[dict], **settings: object) -> dict:
    """``ranks.one_step`` where all ranks have all rows: every rank reports every position."""
    got = one_step(engine, batch(rows, **settings), loss)
    got["divergence"] = got["divergence"][: len(got["divergence"]) // WORLD]
    return got


def _check_of_blind_attention(engine: OpsdEngine) -> dict:
    """The start-up check where attention sees the rank's own slice only, as plain SDPA does."""
    sees_all = ulysses.get_ulysses_sequence_parallel_world_size
    ulysses.get_ulysses_sequence_parallel_world_size = lambda: 1
    try:
        found = {c["name"]: c for c in checks.startup_checks(engine, ADAPTER)}["sequence_parallel"]
    finally:
        ulysses.get_ulysses_sequence_parallel_world_size = sees_all
    return {"value": found["value"], "passed": found["passed"], "fatal": found["fatal"]}


def case_sequence_parallel() -> dict:
    """Size 2 against eager full logits, with every term of the loss; and the identity control."""
    out: dict = {}
    for name, lora in (("untied", True), ("tied", False)):
        engine = build(
            name, lora, attention="ulysses_sdpa", ulysses_sequence_parallel_size=WORLD, checkpointing=name == "untied"
        )
        loss = ADAPTER if lora else INITIAL
        base = None if lora else reference_model(f"{MODELS}/{name}", False)
        if not lora:
            engine.prepare(loss)
            set_params(engine, "weight", 0.12, seed=8)
        student = reference_model(f"{MODELS}/{name}", lora)
        copy_into(student, engine)
        want = eager(student, base, _rows(anchor=True), lora)
        anchored = OpsdLoss(chunk=5, reference=loss.reference, anchor=True)
        for setting, values in (("micro1", dict(micro=1)), ("micro2", dict(micro=2)), ("dynamic", dict(dynamic=True))):
            got = _step(engine, anchored, _rows(anchor=True), **values)
            out[f"{name}-{lora}-{setting}"] = compare(got, want, ordered=setting != "dynamic")
        if name == "untied":
            found = checks.startup_checks(engine, loss)
            checks.require(found)
            out["checks"] = {c["name"]: c["value"] for c in found}
    engine = build("untied", attention="ulysses_sdpa", ulysses_sequence_parallel_size=WORLD)
    out["blind"] = _check_of_blind_attention(engine)
    student = reference_model(f"{MODELS}/untied", True)
    copy_into(student, engine)
    eight = all_rows(8)
    want = eager(student, None, eight, True)
    out["cuts"] = {f"micro{n}": compare(_step(engine, ADAPTER, eight, micro=n), want) for n in (1, 2, 4, 8)}
    out["cuts"]["dynamic"] = compare(_step(engine, ADAPTER, eight, dynamic=True), want, ordered=False)
    want, kept = kept_reference(student, all_rows())
    out["kept"] = compare(_step(engine, kept, all_rows(), micro=1), want)
    rewarded = OpsdLoss(chunk=5, task_reward=PpoClip())
    out["reward"] = compare(_step(engine, rewarded, rewarded_rows(), micro=1), reward_reference(student, rewarded_rows()))
    positions = gathered(int(engine.mine_N.sum()))
    out["split"] = {"each": positions, "all": len(engine.mine_N)}
    hybrid = build("hybrid", attention="ulysses_sdpa", ulysses_sequence_parallel_size=WORLD)
    student = reference_model(f"{MODELS}/hybrid", True)
    copy_into(student, hybrid)
    out["hybrid"] = compare(_step(hybrid, ADAPTER, all_rows(), micro=2), eager(student, None, all_rows(), True))
    for name, shift in (("identity", 0), ("shifted", 1)):
        out[name] = means(checks.control(engine, batch(_rows()), ADAPTER, "own", shift)["value_divergence"])
    return out


def case_shared_sequences() -> dict:
    """All ranks share every sequence, for plain and for hybrid layers: against eager full logits in float32, and against one rank a sequence
    in bfloat16; and hybrid layers that see their own slice alone."""
    out: dict = {}
    together = dict(attention="ulysses_sdpa", ulysses_sequence_parallel_size=WORLD)
    for name in ("untied", "hybrid"):
        engine = build(name, checkpointing=True, **together)
        student = reference_model(f"{MODELS}/{name}", True)
        copy_into(student, engine)
        want = eager(student, None, all_rows(), True)
        for micro in (1, 2):
            out[f"{name}-{micro}"] = compare(_step(engine, ADAPTER, all_rows(), micro=micro), want)
        out[f"{name}-check"] = {c["name"]: c["value"] for c in checks.startup_checks(engine, ADAPTER)}["sequence_parallel"]
        one = one_step(build(name, attention="ulysses_sdpa", dtype="bf16"), batch(mine(all_rows()), micro=1), ADAPTER)
        shared = _step(build(name, dtype="bf16", **together), ADAPTER, all_rows(), micro=1)
        out[f"{name}-bf16"] = {"loss": abs(shared["loss"] - one["loss"]), "value": one["loss"]}
    share, ulysses.share_sequences = ulysses.share_sequences, lambda model: None
    try:
        blind = build("hybrid", **together)
        found = {c["name"]: c for c in checks.startup_checks(blind, ADAPTER)}["sequence_parallel"]
    finally:
        ulysses.share_sequences = share
    return out | {"blind": {"value": found["value"], "stops": found["fatal"] and not found["passed"]}}
