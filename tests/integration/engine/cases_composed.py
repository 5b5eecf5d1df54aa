"""Supports, data-dependent weights, reductions and an anchor together, on padded and packed rows that the ranks hold unevenly, against
loops over full logits that follow the definitions. See ``run.py``."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_platform  # noqa: F401
import torch
from cases_device import top_of
from ranks import MODELS, RANK, WORLD, all_rows, build, compare, copy_into, one_step
from tiny import batch, make_row, reference_model
from torch import Tensor

from verl_opsd.config import LossConfig
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.weights import Clip, SurprisalGate, Threshold
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged
from verl_opsd.verl_adapter.reduce import with_coefficients

sys.path.insert(0, str(Path(__file__).parents[2]))
from parity import reference

#: Five branches of four turns at most: two of episode a, one each of b and c, and one without a loss position.
KEYS = ["a_0", "a_1", "b_0", "c_0", "d_0"]
ANCHOR = 0.3

#: Name: layout, loss, reduction, and the data-dependent weights by their formulas (divergence, log-probability of the token).
SETTINGS: dict[str, tuple[bool, LossSpec, str, Callable[[Tensor, Tensor], Tensor]]] = {
    f"union_{'packed' if packed else 'padded'}": (
        packed,
        LossSpec(support="union_topk", top_k=5, weights=(Clip(0.03), SurprisalGate(0.7, -6.0))),
        "turn",
        lambda d, logp: (0.03 / d).clamp(max=1) / (1 + (-0.7 * (logp + 6)).exp()),
    )
    for packed in (True, False)
}
SETTINGS |= {
    "teacher": (
        False,
        LossSpec(divergence="forward_kl", support="teacher_topk", top_k=3, weights=(Threshold(0.02),)),
        "episode",
        lambda d, logp: (d > 0.02).double(),
    ),
    "full": (
        True,
        LossSpec(divergence="jsd", beta=0.3, weights=(Threshold(0.05), SurprisalGate(2.0, -6.0))),
        "branch",
        lambda d, logp: (d > 0.05) / (1 + (-2 * (logp + 6)).exp()),
    ),
    "signal": (
        False,
        LossSpec(support="teacher_topk", top_k=7, weights=(Clip(0.03),)),
        "turn",
        lambda d, logp: (0.03 / d).clamp(max=1),
    ),
}


def _rows() -> list[dict]:
    """Weights at random, none in the first turn of every row; the anchor is at every position."""
    rows = [*all_rows(4), make_row(104, loss_tokens=False)]
    for row in rows:
        row["opsd_coef"] = torch.where(row["opsd_turn"] == 0, 0.0, 20 * row["opsd_coef"])
        row["opsd_anchor"] = torch.ones_like(row["opsd_coef"])
    return rows


def _uneven(rows: list[dict]) -> list[dict]:
    """Rank 0 has the first row and rows without a position; the others have the rest."""
    if WORLD == 1:
        return rows
    return [rows[0], *(make_row(200 + i, loss_tokens=False) for i in range(3))] if RANK == 0 else rows[1:]


def _mean(reduction: str, rows: list[dict], weights: list[Tensor], values: list[Tensor]) -> Tensor:
    """The mean over groups with weight of the weighted mean within each."""
    groups: dict[Any, list[tuple[float, Tensor]]] = defaultdict(list)
    for key, row, ws, vs in zip(KEYS, rows, weights, values, strict=True):
        for turn, w, v in zip(row["opsd_turn"].tolist(), ws.tolist(), vs, strict=True):
            groups[{"token": 0, "turn": (key, turn), "branch": key, "episode": key[0]}[reduction]].append((w, v))
    kept = [g for g in groups.values() if sum(w for w, _ in g) > 0]
    return torch.stack([torch.stack([w * v for w, v in g]).sum() / sum(w for w, _ in g) for g in kept]).mean()


def _eager(student: Any, teacher: Any, rows: list[dict], name: str) -> dict:
    _, spec, reduction, weight_of = SETTINGS[name]
    function = reference.DIVERGENCES[spec.divergence]
    student.zero_grad()
    weighted, anchors, divergences = [], [], []
    for row in rows:
        with torch.no_grad(), student.disable_adapter():
            views = row["opsd_view_ids"].split(row["opsd_view_len"].tolist())
            other = torch.cat([(teacher or student)(input_ids=p[None]).logits[0] for p in views])[row["opsd_view_pos"]]
            base = student(input_ids=row["input_ids"][None]).logits[0][row["opsd_position"]]
        own = student(input_ids=row["input_ids"][None]).logits[0][row["opsd_position"]]
        p_NV, q_NV, b_NV = (reference.softmax(x) for x in (own, other, base))
        d, a = [], []
        for p, q, b, label in zip(p_NV, q_NV, b_NV, row["input_ids"][row["opsd_position"] + 1].tolist(), strict=True):
            if spec.support != "full":
                ids = reference.support_of(spec.support, p.detach(), q, label, spec.top_k)
                p, q, b = (reference.outcomes(x, ids) for x in (p, q, b))
            d.append(function(p, q))
            a.append(function(p, b))
        n = len(d)
        value, drift = (torch.stack(x) if n else torch.zeros(0, dtype=torch.float64) for x in (d, a))
        token = row["input_ids"][row["opsd_position"] + 1][:, None]
        logp = p_NV.detach().gather(-1, token)[:, 0].log()
        weighted.append(weight_of(value.detach(), logp) * value)
        anchors.append(drift)
        divergences.append(value.detach())
    loss = _mean(reduction, rows, [r["opsd_coef"] for r in rows], weighted)
    loss = loss + ANCHOR * _mean(reduction, rows, [torch.ones(len(x)) for x in anchors], anchors)
    loss.backward()
    grads = {k: p.grad.clone() for k, p in student.named_parameters() if p.grad is not None}
    drift = torch.cat(anchors).detach()
    return {"loss": float(loss), "divergence": torch.cat(divergences).float(), "grads": grads, "drift": drift}


def case_composed() -> dict:
    engines: dict[bool, OpsdEngine] = {}
    wide, student, rows, out = reference_model(f"{MODELS}/wide", False), reference_model(f"{MODELS}/untied", True), _rows(), {}
    for name, (packed, spec, reduction, _) in SETTINGS.items():
        if packed not in engines:
            engines[packed] = build("untied", packed=packed)
            copy_into(student, engines[packed])
        engine, outside = engines[packed], name == "signal"
        final = with_coefficients(rows, KEYS, [0] * len(rows), LossConfig(reduction=reduction, anchor=ANCHOR))  # type: ignore[arg-type]
        data = batch(_uneven(final), packed=packed, micro=1 if WORLD == 1 else 2)
        if outside:
            voice, signals = top_of(wide, data, spec.top_k or 0)
            engine.add_teacher(voice, None)
            data["opsd_signal"] = jagged(signals)
        loss = OpsdLoss(spec, chunk=5, anchor=True, teacher="device" if outside else "self")
        got = one_step(engine, data, loss, values=("anchor", "weight"))
        if RANK == 0:
            want = _eager(student, wide if outside else None, rows, name)
            out[name] = compare(got, want) | {"drift": float((torch.tensor(got["anchor"]) - want["drift"]).abs().max())}
            out[name]["weights"] = [min(got["weight"]), max(got["weight"])]
    return out
