"""Cases about Ulysses sequence parallelism: two ranks share every sequence. See ``run.py``."""

from __future__ import annotations

import cpu_platform  # noqa: F401
import torch
import torch.distributed as dist
from ranks import ADAPTER, INITIAL, MODELS, WORLD, all_rows, build, compare, copy_into, gathered, one_step, set_params
from tiny import batch, eager, reference_model

from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip
from verl_opsd.distill.weights import Threshold
from verl_opsd.verl_adapter import checks, ulysses
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import OpsdLoss

KEPT = OpsdLoss(spec=LossSpec(weights=(Threshold(0.2),)), chunk=5, divide_by_kept=True)


def _rows(anchor: bool = False, reward: bool = False) -> list[dict]:
    rows = all_rows()
    for i, row in enumerate(rows):
        g = torch.Generator().manual_seed(i)
        if anchor:
            row["opsd_anchor"] = torch.rand(len(row["opsd_position"]), generator=g) / 10
        if reward:
            row["opsd_reward"] = torch.randn(len(row["opsd_position"]), generator=g) / 10
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
    """Size 2 against eager full logits, and (loss terms that the reference lacks) against what size 1 gives."""
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
    for name, loss, rows in (("kept", KEPT, _rows()), ("reward", OpsdLoss(chunk=5, task_reward=PpoClip()), _rows(reward=True))):
        got = _step(engine, loss, rows)
        out[name] = {"loss": got["loss"], "norm": float(torch.stack([g.norm() for g in got["grads"].values()]).norm())}
    positions = gathered(int(engine.mine_N.sum()))
    out["split"] = {"each": positions, "all": len(engine.mine_N)}
    return out


def case_sequence_whole() -> dict:
    """The same terms with the same attention at size 1, all rows on every rank; compared between runs by the test."""
    out = {}
    engine = build("untied", attention="ulysses_sdpa")
    for name, loss, rows in (("kept", KEPT, _rows()), ("reward", OpsdLoss(chunk=5, task_reward=PpoClip()), _rows(reward=True))):
        got = _step(engine, loss, rows)
        out[name] = {"loss": got["loss"], "norm": float(torch.stack([g.norm() for g in got["grads"].values()]).norm())}
    dist.barrier()
    return out
