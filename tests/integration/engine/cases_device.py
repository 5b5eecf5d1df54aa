"""Cases about a device teacher's signal in the engine: another model, another hidden size. See ``run.py``."""

from __future__ import annotations

from typing import Any

import cpu_platform  # noqa: F401
import torch
from cases_workers import _worker
from ranks import MODELS, ROWS, WORLD, all_rows, build, compare, copy_into, grads_of, means, mine, one_step, refusal, set_params
from tiny import V, batch, eager, make_row, reference_model

from verl_opsd.distill.signal import Signal
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter import checks
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged, own_passes, rows_of, view_passes

DEVICE, DEVICE_INITIAL = OpsdLoss(chunk=5, teacher="device"), OpsdLoss(chunk=5, teacher="device", reference="initial")


def _teacher(model: str) -> DeviceTeacher:
    return DeviceTeacher(f"{MODELS}/{model}", torch.float32, "cpu", model)


def _signal(teacher: DeviceTeacher, data: Any, passes_of: Any = view_passes) -> torch.Tensor:
    by_row: list[list[Pass]] = [[] for _ in range(len(data))]
    for p in passes_of(rows_of(data)):
        by_row[p.row].append(p)
    signals: list[Signal] = [teacher.score(p) for p in by_row]
    return jagged([s.hidden_NH for s in signals if s.hidden_NH is not None])


def _device_parity(lora: bool) -> dict:
    """Reverse KL to the wide teacher, with per-turn passes; the reference has both models' full logits."""
    loss = DEVICE if lora else DEVICE_INITIAL
    student, wide, teacher = (
        reference_model(f"{MODELS}/untied", lora),
        reference_model(f"{MODELS}/wide", False),
        _teacher("wide"),
    )
    engine = build("untied", lora)
    engine.set_teacher_head("wide", teacher.weight_VH)
    engine.prepare(loss)
    if not lora:
        set_params(engine, "weight", 0.12, seed=8)
    copy_into(student, engine)
    out: dict[str, Any] = {}
    empty = all_rows(per_turn=True)
    for i in range(ROWS // 2, ROWS):
        empty[i] = make_row(100 + i, loss_tokens=False)
    for name, micro, rows in (("one", 1, all_rows(per_turn=True)), ("two", 2, all_rows(per_turn=True)), ("empty", 2, empty)):
        data = batch(mine(rows), micro=micro)
        data["opsd_signal"] = _signal(teacher, data)
        out[name] = compare(one_step(engine, data, loss), eager(student, wide, rows, lora=False))
    return out


def case_parity_device_lora() -> dict:
    return _device_parity(True)


def case_parity_device_full() -> dict:
    return _device_parity(False)


def case_device_anchor() -> dict:
    """The anchor stays the student's own base beside a teacher of another size: the sum of both parts, each measured alone."""
    engine, teacher = build("untied"), _teacher("wide")
    engine.set_teacher_head("wide", teacher.weight_VH)

    def step(teacher_on: bool, anchor: bool) -> dict:
        rows = all_rows(**({} if teacher_on else {"coef": 0.0}))
        for i, row in enumerate(rows if anchor else []):
            row["opsd_anchor"] = torch.rand(len(row["opsd_position"]), generator=torch.Generator().manual_seed(i)) / 10
        data = batch(mine(rows))
        # alone, the anchor is measured under the self teacher with coefficient 0: no device head is involved
        if teacher_on:
            data["opsd_signal"] = _signal(teacher, data)
        return one_step(engine, data, OpsdLoss(chunk=5, teacher="device" if teacher_on else "self", anchor=anchor))

    both, kl, anchor = step(True, True), step(True, False), step(False, True)
    return {
        "loss": abs(both["loss"] - kl["loss"] - anchor["loss"]),
        "parts": [kl["loss"], anchor["loss"]],
        "grad": max(
            float((g - kl["grads"][k] - anchor["grads"][k]).norm() / g.norm().clamp(min=1e-12))
            for k, g in both["grads"].items()
        ),
    }


def case_device_control() -> dict:
    """The identical model as device teacher; the self controls under a loss that names a device teacher; refusals."""
    engine, same = build("untied"), _teacher("untied")
    unset = refusal(lambda: engine.prepare(DEVICE))
    engine.set_teacher_head("untied", same.weight_VH)
    engine.prepare(DEVICE)
    data = batch(mine(all_rows()))
    own = data.clone(recurse=False)
    own["opsd_signal"] = _signal(same, data, own_passes)
    data["opsd_signal"] = _signal(same, data)

    def value(rows: Any, teacher: Any, shift: int = 0) -> dict:
        return means(checks.control(engine, rows, DEVICE, teacher, shift)["value_divergence"])

    worker = _worker()
    worker.set_teacher_head("untied", same.weight_VH)
    worker.set_loss_fn(DEVICE)
    unscored = batch(mine(all_rows()), mini_batch_size=ROWS // WORLD, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    return {
        "identity": value(own, "device"),
        "self_identity": value(data, "own"),
        "self_shifted": value(data, "own", 1),
        "view": value(data, "device")["mean"] - value(data, "view")["mean"],
        "view_mean": value(data, "view")["mean"],
        "grads": len(grads_of(engine)),
        "checks": all(c["passed"] for c in checks.startup_checks(engine, DEVICE)),
        "unset": unset,
        "shifted": refusal(lambda: value(data, "device", 1)),
        "vocabulary": refusal(lambda: engine.set_teacher_head("wide", torch.zeros(V + 1, 80))),
        "own_name": refusal(lambda: engine.set_teacher_head("student", same.weight_VH)),
        "unscored": refusal(lambda: worker.train_mini_batch(unscored)),
    }
