"""Cases about controls, checks and guards. See ``run.py``."""

from __future__ import annotations

import json
from typing import Any

import cpu_platform  # noqa: F401
import torch
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
    grads_of,
    means,
    mine,
    one_step,
    set_params,
    without_bounds,
)
from tiny import batch, eager, reference_model

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import checks


def case_control() -> dict:
    out: dict[str, Any] = {}
    rows = all_rows()
    for name, model, lora, loss in (
        ("lora", "untied", True, ADAPTER),
        ("full", "tied", False, INITIAL),
        ("dynamic", "untied", True, ADAPTER),
    )[: 3 if WORLD == 1 else 2]:
        engine = build(model, lora, dynamic=name == "dynamic")
        engine.prepare(loss)
        set_params(engine, "", 0.2, seed=11)
        settings = dict(micro=2, dynamic=name == "dynamic")
        run = lambda **k: checks.control(engine, batch(mine(rows), **settings), loss, **k)  # noqa: E731, B023
        identity, shifted, view = run(teacher="own"), run(teacher="own", shift=1), run(teacher="view", adapters="on")
        trained = one_step(engine, batch(mine(rows), **settings), loss)["divergence"]
        mean = [float(x) for part in gathered(torch.cat(list(view["value_divergence"].unbind())).tolist()) for x in part]
        lengths = [len(r) for r in identity["value_divergence"].unbind()]
        got, want = torch.tensor(mean).sort().values, torch.tensor(trained).sort().values
        out[name] = {
            "identity": means(identity["value_divergence"]),
            "shifted": means(shifted["value_divergence"]),
            "agree": means(identity["value_agree"]),
            "rows": lengths == [len(r["opsd_position"]) for r in mine(rows)],
            "view_is_training": float((got - want).abs().max()),
            "grads": len(grads_of(engine)),
        }
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
            want = [
                model(input_ids=torch.tensor([s])).logits[0].log_softmax(-1)[p]
                for s, p in zip(sequences, positions, strict=True)
            ]
        out[f"{name}_{lora}"] = {
            "error": max(float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(got, want, strict=True)),
            "shapes": [list(a.shape) for a in got],
            "dtype": str(got[0].dtype),
        }
    return out


def case_checks() -> dict:
    out: dict[str, Any] = {}
    for name, lora, loss in (
        ("untied", True, ADAPTER),
        ("tied", False, INITIAL),
        ("hybrid", True, ADAPTER),
        ("granite", True, ADAPTER),
    )[: 4 if WORLD == 1 else 2]:
        engine = build(name, lora)
        if name == "hybrid":
            without_bounds(engine)
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
    """Linear-attention layers that are not told where rows begin see their neighbour: rows go one a forward, and the loss stays right.
    Told, they share forwards, and the loss is the same."""
    engine = build("hybrid")
    student = reference_model(f"{MODELS}/hybrid", True)
    copy_into(student, engine)
    want = eager(student, None, all_rows(), True)
    out = {
        "told": compare(one_step(engine, batch(mine(all_rows()), micro=2), ADAPTER), want),
        "shares": engine.shares_forwards(),
    }
    without_bounds(engine)
    engine.layout_error = None
    for name, settings in (("packed", dict(micro=2)), ("dynamic", dict(dynamic=True))):
        out[name] = compare(one_step(engine, batch(mine(all_rows()), **settings), ADAPTER), want, ordered=name != "dynamic")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1 + 2**-24 * torch.randn_like(parameter))
    moved = eager(student, None, all_rows(), True)
    out["half_an_ulp"] = compare(moved | {"divergence": moved["divergence"].tolist()}, want)
    engine.layout_error = 0.0  # the verdict overruled: what would have happened
    out["overruled"] = compare(one_step(engine, batch(mine(all_rows()), micro=2), ADAPTER), want)
    return out
