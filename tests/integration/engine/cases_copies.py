"""Cases about teachers that are the student's own earlier weights: frozen, moving average, lagged. See ``run.py``."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import cpu_platform  # noqa: F401
import torch
from cases_workers import _worker
from ranks import MODELS, OUT, RANK, WORLD, all_rows, means, mine, refusal
from tiny import batch, full, reference_model

from verl_opsd.verl_adapter.loss import OpsdLoss

DECAY, LAG, ROUNDS = 0.7, 2, 4


def _loss(kind: str, lora: bool) -> OpsdLoss:
    more: dict[str, Any] = {"ema": {"decay": DECAY}, "lagged": {"lag": LAG}}.get(kind, {})
    return OpsdLoss(chunk=5, teacher=kind, reference="adapter_off" if lora else "initial", **more)  # type: ignore[arg-type]


def _weights(worker: Any) -> dict[str, torch.Tensor]:
    worker.engine._reshard()
    return {k: full(p.data).double().clone() for k, p in worker.engine.module.named_parameters() if p.requires_grad}


def _hidden_of(weights: dict[str, torch.Tensor], lora: bool, rows: list[dict]) -> torch.Tensor:
    """Hidden states of the teacher's views from eager code under given weights."""
    model = reference_model(f"{MODELS}/untied", lora)
    theirs = dict(model.named_parameters())
    for name, value in weights.items():
        theirs[name].data.copy_(value.float())
    base = model.base_model.model.model if lora else model.model
    out = []
    with torch.no_grad():
        for r in rows:
            passes = [base(input_ids=p[None])[0][0] for p in r["opsd_view_ids"].split(r["opsd_view_len"].tolist())]
            out.append(torch.cat(passes)[r["opsd_view_pos"]])
    return torch.cat(out)


def _recorded(worker: Any, steps: list[dict[str, torch.Tensor]]) -> None:
    """Appends the weights after every optimizer step of this worker."""
    step = worker.engine.optimizer_step

    def recording() -> float:
        norm: float = step()
        steps.append(_weights(worker))
        return norm

    worker.engine.optimizer_step = recording


def _expected(kind: str, began: list[dict], steps: list[dict]) -> dict[str, torch.Tensor]:
    """The teacher's weights for the round that begins now, by their definition."""
    if kind == "lagged":
        return began[max(0, len(began) - 1 - LAG)]
    out = began[0]
    for w in steps if kind == "ema" else []:
        out = {k: DECAY * v + (1 - DECAY) * w[k] for k, v in out.items()}
    return out


def _train(worker: Any, rounds: int) -> None:
    for _ in range(rounds):
        worker.train_mini_batch(
            batch(mine(all_rows()), micro=1, mini_batch_size=2, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
        )


def case_copies() -> dict:
    """Four rounds of two steps, a checkpoint after three of them, and a new worker that goes on from it."""
    out: dict[str, Any] = {}
    for kind in ("frozen", "ema", "lagged"):
        for lora in (True, False):
            name, folder = f"{kind}-{'lora' if lora else 'full'}", str(Path(OUT).parent / f"copies-{kind}-{lora}-{WORLD}")
            loss, rows = _loss(kind, lora), mine(all_rows())
            worker = _worker(lora=lora)
            worker.set_loss_fn(loss)
            steps: list[dict] = []
            began: list[dict] = []
            hidden, moved = [], []
            _recorded(worker, steps)
            for n in range(ROUNDS):
                began.append(_weights(worker))
                got = torch.cat(worker.engine.score(batch(rows), loss))
                hidden.append(float((got - _hidden_of(_expected(kind, began, steps), lora, rows)).abs().max()))
                moved.append(float((got - _hidden_of(began[0], lora, rows)).abs().max()))
                _train(worker, 1)
                if n == ROUNDS - 2:
                    worker.engine.save_checkpoint(folder)
            controlled = {"opsd_control_shift": 0, "opsd_control_adapters": "off"}
            identity = means(worker.control(batch(rows, opsd_control_teacher="own", **controlled))["value_divergence"])
            brief = means(worker.control(batch(rows, opsd_control_teacher="view", **controlled))["value_divergence"])
            again = _worker(lora=lora)
            again.keep(loss)
            again.engine.load_checkpoint(folder)
            again.set_loss_fn(loss)
            _train(again, 1)
            a, b = (torch.cat(w.engine.score(batch(rows), loss)) for w in (worker, again))
            out[name] = {
                "hidden": hidden,
                "moved": moved,
                "resumed": float((a - b).abs().max()),
                "student": max(float((v - _weights(again)[k]).abs().max()) for k, v in _weights(worker).items()),
                "identity": identity["max"],
                "brief": brief["mean"],
            }
            if kind == "ema" and lora:
                out |= _refusals(folder, loss)
    return out


def _refusals(folder: str, loss: OpsdLoss) -> dict[str, str]:
    out = {}
    for what, kept in (("other_decay", dataclasses.replace(loss, decay=0.5)), ("missing", loss)):
        worker = _worker()
        worker.keep(kept)
        if what == "missing":
            Path(folder, f"opsd_teacher_world_size_{WORLD}_rank_{RANK}.pt").unlink()
        out[what] = refusal(partial(worker.engine.load_checkpoint, folder))
    late = _worker()
    late.engine.load_checkpoint(folder)
    out["late"] = refusal(lambda: late.set_loss_fn(loss))
    return out
