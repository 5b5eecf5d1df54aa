"""Cases about loss and gradient against the eager reference. See ``run.py``."""

from __future__ import annotations

from typing import Any

import cpu_platform  # noqa: F401
import torch
import torch.distributed as dist
from ranks import (
    ADAPTER,
    INITIAL,
    MODELS,
    ROWS,
    WORLD,
    all_rows,
    build,
    compare,
    copy_into,
    gathered,
    means,
    mine,
    one_step,
    refusal,
    set_params,
)
from tiny import V, batch, eager, eager_sampled, make_row, reference_model

from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip
from verl_opsd.distill.weights import Threshold
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged


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
        ("packed1", dict(), dict(micro=1), rows),
        ("packed2", dict(), dict(micro=2), rows),
        ("dynamic", dict(), dict(dynamic=True), rows),
        ("empty", dict(), dict(micro=1), empty),
        ("padded", dict(packed=False), dict(micro=2, packed=False), rows),
        ("checkpointed", dict(checkpointing=True), dict(micro=2), rows),
        ("no_reshard", dict(reshard=False), dict(micro=1), rows),
    ]
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


def case_cuts() -> dict:
    """Eight rows in micro-batches of 1, 2, 4, 8 (where a rank has so many), and dynamic ones."""
    engine, student, rows = build("untied"), reference_model(f"{MODELS}/untied", True), all_rows(8)
    copy_into(student, engine)
    want = eager(student, None, rows, True)
    sizes = [n for n in (1, 2, 4, 8) if n <= 8 // WORLD]
    out = {f"micro{n}": compare(one_step(engine, batch(mine(rows), micro=n), ADAPTER), want) for n in sizes}
    return out | {"dynamic": compare(one_step(engine, batch(mine(rows), dynamic=True), ADAPTER), want, ordered=False)}


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
    unanchored = all_rows()  # drift measured, and no part of the loss
    measured = one_step(engine, batch(mine(unanchored)), anchored, values=("anchor",))
    plain = one_step(engine, batch(mine(unanchored)), ADAPTER)
    out["drift_loss"] = abs(measured["loss"] - plain["loss"])
    out["drift_grad"] = max(float((measured["grads"][k] - g).norm() / g.norm()) for k, g in plain["grads"].items())
    ones = [r | {"opsd_coef": torch.zeros_like(r["opsd_coef"])} for r in unanchored]
    by_position = []  # KL(student || base) at each position, from the eager reference, one coefficient at a time
    for r, row in enumerate(ones):
        for n in (0, len(row["opsd_position"]) - 1):
            picked = [dict(x) for x in ones]
            picked[r]["opsd_anchor"] = torch.zeros(len(row["opsd_position"]))
            picked[r]["opsd_anchor"][n] = 1.0
            by_position.append(eager(student, None, picked, True)["loss"])
    ends, at = torch.tensor([len(r["opsd_position"]) for r in ones]).cumsum(0).tolist(), []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        at += [measured["anchor"][start], measured["anchor"][end - 1]]
    out["drift"] = max(abs(a - b) for a, b in zip(at, by_position, strict=True))
    out["drift_mean"] = sum(measured["anchor"]) / len(measured["anchor"])
    return out


def case_anchor_full() -> dict:
    """The anchor of full-parameter training: the frozen copy's hidden states under the frozen copy's head."""
    out = {}
    for name in ("untied", "tied"):
        engine, base = build(name, False), reference_model(f"{MODELS}/{name}", False)
        engine.prepare(INITIAL)
        copy_into(base, engine)
        set_params(engine, "weight", 0.12, seed=8)
        student = reference_model(f"{MODELS}/{name}", False)
        copy_into(student, engine)
        rows = all_rows()
        for i, row in enumerate(rows):
            row["opsd_anchor"] = torch.rand(len(row["opsd_position"]), generator=torch.Generator().manual_seed(i)) / 10
        want = eager(student, base, rows, False)
        anchored = OpsdLoss(chunk=5, reference="initial", anchor=True)
        got = one_step(engine, batch(mine(rows)), anchored, values=("anchor",))
        out[name] = compare(got, want) | {"drift": sum(got["anchor"]) / len(got["anchor"])}
    return out


def case_sampled() -> dict:
    """Estimators from the sampled token alone, against their formulas."""
    engine = build("untied")
    student = reference_model(f"{MODELS}/untied", True)
    copy_into(student, engine)
    rows, trust, out = all_rows(), (0.2, 5.0), {}
    for name in ("k1", "k2", "k3", "policy_gradient"):
        want = eager_sampled(student, rows, name, trust)
        spec = LossSpec(divergence=name, trust=trust if name == "policy_gradient" else None)
        loss = OpsdLoss(spec=spec, chunk=5, anchor=True)  # drift: an anchor whose coefficients are 0
        found = one_step(engine, batch(mine(rows)), loss, values=("anchor",))
        out[name] = compare(found, want) | {"masked": float((want["divergence"] == 0).float().mean())}
        out[name]["drift_unknown"] = sum(x != x for x in found["anchor"])
        out[name]["drift"] = max(map(abs, found["anchor"]))
        identity, shifted = (
            checks.control(engine, batch(mine(rows)), loss, "own", shift)["value_divergence"] for shift in (0, 1)
        )
        out[name]["identity"] = max(abs(x) for x in means(identity).values())
        out[name]["shifted"] = max(abs(x) for x in means(shifted).values())
    return out


def rewarded_rows() -> list[dict]:
    rows = all_rows()
    for i, row in enumerate(rows):
        row["opsd_reward"] = torch.randn(len(row["opsd_position"]), generator=torch.Generator().manual_seed(i)) / 10
    return rows


def reward_reference(student: Any, rows: list[dict]) -> dict:
    """The distillation and PPO's term from full logits: loss and gradient of both, the ``term`` alone, and how far it ``moved`` a
    gradient."""
    want = eager(student, None, rows, True)
    plain_loss, grads, term = want["loss"], want["grads"], torch.zeros(())
    student.zero_grad()
    for row in rows:
        token = row["input_ids"][row["opsd_position"] + 1][:, None]
        logp = student(input_ids=row["input_ids"][None]).logits[0][row["opsd_position"]].log_softmax(-1).gather(-1, token)[:, 0]
        a, ratio = row["opsd_reward"], (logp - row["opsd_behaviour"]).exp()
        worst = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        term = term + torch.where(a < 0, torch.minimum(worst, -a * 3), worst).sum()
    term.backward()
    theirs = dict(student.named_parameters())
    want["grads"] = {k: g + theirs[k].grad for k, g in grads.items()}
    moved = max(float(theirs[k].grad.norm() / g.norm()) for k, g in grads.items())
    return want | {"loss": plain_loss + float(term), "term": float(term), "moved": moved}


def case_task_reward() -> dict:
    """PPO's term beside the distillation, against full logits."""
    engine = build("untied")
    student = reference_model(f"{MODELS}/untied", True)
    copy_into(student, engine)
    rows = rewarded_rows()
    want = reward_reference(student, rows)
    out: dict = {k: want[k] for k in ("term", "moved")}
    for name, settings in (("micro1", dict(micro=1)), ("micro2", dict(micro=2)), ("dynamic", dict(dynamic=True))):
        loss = OpsdLoss(chunk=5, task_reward=PpoClip())
        out[name] = compare(one_step(engine, batch(mine(rows), **settings), loss), want, ordered=name != "dynamic")
    out["refused"] = refusal(lambda: one_step(engine, batch(mine(rows)), ADAPTER))
    return out


def kept_reference(student: Any, rows: list[dict]) -> tuple[dict, OpsdLoss]:
    """The mean over the positions above the median from full logits, and the loss that asks for it."""
    every = eager(student, None, rows, True)["divergence"]
    above = float(every.sort().values[len(every) // 2 - 1 :][:2].mean())  # between two values, not on one
    want_rows = [dict(r) for r in rows]
    total = float((torch.cat([r["opsd_coef"] for r in rows]) * (every > above)).sum())
    for row, kl in zip(want_rows, every.split([len(r["opsd_position"]) for r in rows]), strict=True):
        row["opsd_coef"] = row["opsd_coef"] * (kl > above) / total
    loss = OpsdLoss(spec=LossSpec(weights=(Threshold(above),)), chunk=5, divide_by_kept=True)
    return eager(student, None, want_rows, True), loss


def kept_record(got: dict) -> dict:
    """What a step reports of each position, added up: the kept coefficients, 1 of a mean, and the loss."""
    coef, weight, divergence = (torch.tensor(got[k], dtype=torch.float64) for k in ("coef", "weight", "divergence"))
    return {"kept": float((coef * weight).sum()), "reported": float((coef * weight * divergence).sum())}


def case_kept() -> dict:
    """Threshold at current weights over the kept positions: one division a step, whatever the micro-batches."""
    engine = build("untied")
    student = reference_model(f"{MODELS}/untied", True)
    copy_into(student, engine)
    rows = all_rows()
    want, loss = kept_reference(student, rows)
    out = {}
    for name, settings in (("micro1", dict(micro=1)), ("micro2", dict(micro=2)), ("dynamic", dict(dynamic=True))):
        got = one_step(engine, batch(mine(rows), **settings), loss, values=("coef", "weight"))
        out[name] = compare(got, want, ordered=name != "dynamic") | kept_record(got)
    nothing = OpsdLoss(spec=LossSpec(weights=(Threshold(1e6),)), chunk=5, divide_by_kept=True)
    out["nothing"] = gathered(refusal(lambda: one_step(engine, batch(mine(rows)), nothing)))
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
        "kl": kl(turn, branch),
        "grad": difference(turn, branch),
        "briefed_kl": kl(briefed_turn, briefed),
        "briefed_grad": difference(briefed_turn, briefed),
        "brief_matters": difference(briefed, branch),
        "changed": difference(changed, briefed),
    }


def case_masked() -> dict:
    """Coefficient 0 everywhere; and NaN-free zeros at single positions are part of every parity case."""
    engine = build("tied")
    zero = one_step(engine, batch(mine(all_rows(coef=0.0))), ADAPTER)
    rows = all_rows(coef=0.0)
    rows[0]["opsd_coef"][0] = 1.0
    one = one_step(engine, batch(mine(rows)), ADAPTER)
    return {
        "nonzero": sum(int((g != 0).sum()) for g in zero["grads"].values()),
        "tensors": len(zero["grads"]),
        "one": sum(int((g != 0).sum()) for g in one["grads"].values()),
        "loss": zero["loss"],
    }


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
