"""Cases about control arms on the same rows: the identity teacher, and no teacher at all. See ``run.py``."""

from __future__ import annotations

from typing import Any

import cpu_platform  # noqa: F401
import torch
from cases_workers import _worker
from ranks import ADAPTER, MODELS, all_rows, build, copy_into, gathered, means, mine, one_step, refusal, set_params
from tiny import batch, reference_model

from verl_opsd.distill.loss import LossSpec
from verl_opsd.verl_adapter.loss import OpsdLoss

NLL = OpsdLoss(LossSpec("nll"), chunk=5)


def case_arms() -> dict:
    """Five updates towards the own base with and without a brief, in forwards of the same rows as in scoring (where they differ, rounding is
    a gradient, which Adam makes a step of the learning rate's size); the likelihood of the own tokens against plain code."""
    out: dict[str, Any] = {}
    for name, brief in (("identity", 0), ("briefed", 6)):
        worker = _worker()
        set_params(worker.engine, "lora_B", 0.0)  # a fresh adapter
        worker.set_loss_fn(ADAPTER)
        for _ in range(5):
            rows = mine(all_rows(brief=brief))
            worker.train_mini_batch(batch(rows, mini_batch_size=4, epochs=2, seed=1, dataloader_kwargs={"shuffle": False}))
        controlled = dict(opsd_control_teacher="own", opsd_control_shift=0, opsd_control_adapters="on")
        out[name] = means(worker.control(batch(mine(all_rows()), **controlled))["value_divergence"])["max"]

    engine, rows = build("untied"), all_rows()
    student = reference_model(f"{MODELS}/untied", True)
    copy_into(student, engine)
    data = batch(mine(rows))
    data["opsd_signal"] = torch.nested.as_nested_tensor([torch.zeros(0, 1)] * len(data), layout=torch.jagged)  # not read
    found, want, values = one_step(engine, data, NLL), torch.zeros(()), []
    for row in rows:
        logp = student(input_ids=row["input_ids"][None]).logits[0, row["opsd_position"]].log_softmax(-1)
        value = -logp.gather(-1, row["input_ids"][row["opsd_position"] + 1][:, None])[:, 0]
        want = want + (row["opsd_coef"] * value).sum()
        values.append((value.detach(), row["opsd_coef"]))
    want.backward()
    grads = {k: p.grad for k, p in student.named_parameters() if p.grad is not None}
    worker = _worker()
    worker.set_loss_fn(NLL)
    before = worker.engine.forwards
    worker.train_mini_batch(batch(mine(rows), mini_batch_size=4, epochs=1, seed=1))
    controlled = dict(opsd_control_teacher="own", opsd_control_shift=0, opsd_control_adapters="off")
    out["nll"] = {
        "loss": abs(found["loss"] - float(want)),
        "loss_value": float(want),
        "divergence": max(
            abs(a - float(b))
            for a, b, c in zip(found["divergence"], *map(torch.cat, zip(*values, strict=True)), strict=True)
            if c != 0
        ),
        "grad": max(float((found["grads"][k] - g).norm() / g.norm().clamp(min=1e-12)) for k, g in grads.items()),
        "forwards": gathered(worker.engine.forwards - before),
        "identity": means(worker.control(batch(mine(rows), **controlled))["value_divergence"])["max"],
    }
    out["refused"] = refusal(lambda: OpsdLoss(LossSpec("nll"), teacher="device"))
    return out
