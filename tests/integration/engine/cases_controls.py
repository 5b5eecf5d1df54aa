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
from tiny import V, batch, eager, full, reference_model
from torch.distributed.tensor import distribute_tensor

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.passes import jagged


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


def case_rehearsal() -> dict:
    """Random values in place of lora_B and back, in a worker that has trained; and what a server that ignores some of them makes of the move."""
    engine = build("untied")
    data = batch(mine(all_rows()))
    data["opsd_signal"] = jagged(engine.score(data, ADAPTER))
    with engine.train_mode():
        engine.train_batch(data, ADAPTER)
    ids = [(37 * i + 5) % V for i in range(41)]
    places = list(range(40))

    def values() -> dict[str, torch.Tensor]:
        engine._reshard()
        return {k: full(p.data).clone() for k, p in engine.module.named_parameters()}

    def said() -> torch.Tensor:
        return torch.from_numpy(checks.token_logprobs(engine, [ids], [places])[0])

    def optimizer() -> list[torch.Tensor]:
        return [
            full(t).clone() for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
        ]

    trained, state, before = values(), optimizer(), said()
    (whole,) = checks.logprobs(engine, [ids], [places])
    engine.rehearse(0.125)
    random, there = values(), said()
    engine.rehearse(0.25)
    doubled = values()
    engine.rehearse(0.125)
    again = values()
    ignored: dict[str, list[float]] = {}
    for name, match in (("nothing", "no such"), ("a layer", "layers.1."), ("the mlp", "mlp"), ("all", "")):
        for k, p in engine.module.named_parameters():
            if "lora_B" in k and match in k:
                engine._reshard()
                p.data.to_local().copy_(distribute_tensor(trained[k], p.device_mesh, p.placements).to_local())
        ignored[name] = (said() - before).tolist()
        engine.rehearse(0.125)
    engine.rehearse(None)
    back, after, end = values(), optimizer(), said()
    engine.rehearse(None)  # nothing is replaced any more
    replaced = [k for k in trained if "lora_B" in k]
    return {
        "chosen": float((torch.from_numpy(whole)[places, ids[1:]] - before).abs().max()),
        "restored": all(torch.equal(trained[k], v) for k, v in back.items()) and torch.equal(before, end),
        "still": all(torch.equal(trained[k], v) for k, v in values().items()),
        "others": all(torch.equal(trained[k], random[k]) for k in trained if k not in replaced),
        "optimizer": len(state) == len(after) > 0 and all(torch.equal(a, b) for a, b in zip(state, after, strict=True)),
        "doubled": all(torch.equal(2 * random[k], doubled[k]) for k in replaced),
        "repeats": all(torch.equal(random[k], v) for k, v in again.items()),
        "scales": [float(random[k].std()) for k in replaced],
        "firsts": gathered([float(random[k].flatten()[-1]) for k in replaced]),
        "move": (there - before).tolist(),
        "ignored": ignored,
    }


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
