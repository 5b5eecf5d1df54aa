"""Cases about a device teacher's signal in the engine: another model, another hidden size. See ``run.py``."""

from __future__ import annotations

import dataclasses
from typing import Any

import cpu_platform  # noqa: F401
import torch
from cases_workers import _worker
from ranks import MODELS, ROWS, WORLD, all_rows, build, compare, copy_into, grads_of, means, mine, one_step, refusal, set_params
from tiny import V, batch, eager, make_row, reference_model

from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.support import support_ids, with_tail
from verl_opsd.teachers.base import Pass, Voice, common, on_the_wire
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
    engine.add_teacher(teacher.voice, teacher.weight_VH)
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
    engine.add_teacher(teacher.voice, teacher.weight_VH)

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
    engine.add_teacher(same.voice, same.weight_VH)
    engine.prepare(DEVICE)
    data = batch(mine(all_rows()))
    own = data.clone(recurse=False)
    own["opsd_signal"] = _signal(same, data, own_passes)
    data["opsd_signal"] = _signal(same, data)

    def value(rows: Any, teacher: Any, shift: int = 0) -> dict:
        return means(checks.control(engine, rows, DEVICE, teacher, shift)["value_divergence"])

    worker = _worker()
    worker.add_teacher(same.voice, same.weight_VH)
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
        "vocabulary": refusal(lambda: engine.add_teacher(_teacher("wide").voice, torch.zeros(V + 1, 80))),
        "own_name": refusal(lambda: engine.add_teacher(dataclasses.replace(same.voice, name="student"), same.weight_VH)),
        "unscored": refusal(lambda: worker.train_mini_batch(unscored)),
    }


def top_of(plain: Any, data: Any, k: int) -> tuple[Voice, list[torch.Tensor]]:
    """What a server would give for a model: its top k and the given token, from full logits of plain code."""
    rows = rows_of(data)
    voice, packed = Voice("top", "support", 2 * (k + 1) + 1, torch.float32), []
    for r, row in enumerate(rows):
        out = torch.zeros(len(row["opsd_position"]), voice.width)
        for p in [p for p in view_passes(rows) if p.row == r]:
            with torch.no_grad():
                logq_NV = plain(input_ids=p.ids_T[None]).logits[0, p.index_N].log_softmax(-1)
            ids_NK = support_ids("teacher_topk", logq_NV, logq_NV, p.ids_T[p.index_N + 1], k)
            logq_NJ = with_tail(logq_NV, ids_NK)
            out[p.slots_N] = voice.pack(Signal(ids_NK=ids_NK, logprobs_NK=logq_NJ[:, :-1], tail_N=logq_NJ[:, -1]))
        packed.append(out)
    return voice, packed


def case_routed() -> dict:
    """Rows of an exact teacher and of one that gives its top 7, in one update: the sum of both alone; the exact one cut to its top 7."""
    wide, k = _teacher("wide"), 7
    loss = OpsdLoss(LossSpec(support="teacher_topk", top_k=k), chunk=5, teacher="device")
    numbers = [0, 1, 1, 0]

    def step(whose: list[int], known: tuple[int, ...]) -> dict:
        engine, rows = build("untied"), all_rows(per_turn=True)
        for row, n in zip(rows, whose, strict=True):
            row["opsd_teacher"] = torch.tensor([n])
        data = batch(mine(rows))
        voice, top = top_of(reference_model(f"{MODELS}/wide", False), data, k)
        hidden = list(_signal(wide, data).unbind())
        voices = [wide.voice, voice]
        for n in known:
            engine.add_teacher(voices[n], wide.weight_VH if n == 0 else None)
        width, dtype = common([voices[n] for n in known])
        mine_numbers = [int(r["opsd_teacher"][0]) for r in mine(rows)]
        signals = [(hidden if known[n] == 0 else top)[i] for i, n in enumerate(mine_numbers)]
        data["opsd_signal"] = jagged([on_the_wire(s, width, dtype) for s in signals])
        return one_step(engine, data, loss, values=("teacher",))

    exact, top, both = step([0] * 4, (0,)), step([0] * 4, (1,)), step(numbers, (0, 1))
    return {
        "loss": max(abs(exact["loss"] - x["loss"]) for x in (top, both)),
        "loss_value": exact["loss"],
        "divergence": max(abs(a - b) for x in (top, both) for a, b in zip(exact["divergence"], x["divergence"], strict=True)),
        "grad": max(
            float((g - exact["grads"][key]).norm() / g.norm().clamp(min=1e-12))
            for x in (top, both)
            for key, g in x["grads"].items()
        ),
        "teachers": sorted(set(both["teacher"])),
        "mixed": refusal(lambda: _mixed(wide, loss)),
    }


def _mixed(wide: DeviceTeacher, loss: OpsdLoss) -> None:
    """Rows of two teachers in one forward, which the engine itself never makes."""
    engine = build("untied")
    engine.add_teacher(wide.voice, wide.weight_VH)
    engine.add_teacher(dataclasses.replace(wide.voice, name="other"), wide.weight_VH)
    rows = mine(all_rows())
    data = batch([{**rows[n], "opsd_teacher": torch.tensor([n])} for n in (0, 1)])
    data["opsd_signal"] = _signal(wide, data)
    engine.forward_step(data, loss, forward_only=True)
