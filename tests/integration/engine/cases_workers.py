"""Cases about the training worker and the remote worker. See ``run.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cpu_platform  # noqa: F401
import torch
from ranks import ADAPTER, INITIAL, MODELS, OUT, RANK, WORLD, all_rows, configs, gathered, means, mine, refusal, set_params
from tiny import batch, full, make_row
from verl.utils import tensordict_utils as tu
from verl.workers.config import TrainingWorkerConfig

from verl_opsd.verl_adapter.passes import jagged
from verl_opsd.verl_adapter.worker import OpsdTrainingWorker


def _worker(**kwargs: Any) -> OpsdTrainingWorker:
    torch.manual_seed(0)
    mc, ec, oc, cc = configs("untied", **kwargs)
    worker = OpsdTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=mc, engine_config=ec, optimizer_config=oc, checkpoint_config=cc
        )
    )
    worker.reset()
    set_params(worker.engine, "lora_B", 0.3)
    return worker


def case_worker() -> dict:
    rows = all_rows(8)
    rows[5] = make_row(105, loss_tokens=False)  # as a padding row

    def update(signal: bool | None) -> tuple[dict, int, list]:
        worker = _worker()
        worker.set_loss_fn(ADAPTER)
        worker.engine.shares_forwards()
        data = batch(mine(rows), mini_batch_size=4, epochs=2, seed=1, dataloader_kwargs={"shuffle": True})
        if signal or (signal is None and RANK == 0):
            data["opsd_signal"] = jagged(
                worker.engine.score(data, ADAPTER)
                if signal
                else [torch.zeros(len(r["opsd_position"]), worker.engine.head.in_features) for r in mine(rows)]
            )
        worker.engine.forwards = 0
        out = worker.train_mini_batch(data)
        return tu.get(out, "metrics"), worker.engine.forwards, [full(p.data).clone() for p in worker.engine.module.parameters()]

    metrics, forwards, weights = update(False)
    _, given_forwards, given_weights = update(True)
    lengths = {k: len(v) for k, v in metrics.items() if k.startswith("opsd/")}
    return {
        "keys": sorted(metrics),
        "lengths": sorted(set(lengths.values())),
        "tokens": sum(len(r["opsd_position"]) for r in rows),
        "steps": sorted(set(metrics["opsd/step"])),
        "losses": [float(x) for x in metrics["loss"]],
        "norms": [float(x) for x in metrics["grad_norm"]],
        "weighted": sum(
            c * d
            for c, d, s in zip(metrics["opsd/coef"], metrics["opsd/divergence"], metrics["opsd/step"], strict=True)
            if s == 0
        ),
        "flat": all(isinstance(x, (int, float)) for x in metrics["opsd/divergence"]),
        "forwards": gathered(forwards),
        "given_forwards": gathered(given_forwards),
        "same": all(torch.equal(a, b) for a, b in zip(weights, given_weights, strict=True)),
        "disagree": gathered(refusal(lambda: update(None))) if WORLD > 1 else [],
        "set_loss": refusal(lambda: _worker(lora=False).set_loss_fn(ADAPTER)),
    }


def case_remote() -> dict:
    """`OpsdWorker` from verl's own composed configuration, with the methods that the trainer calls."""
    from hydra import compose, initialize_config_module

    from verl_opsd.verl_adapter.worker import OpsdWorker

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={MODELS}/untied",
                "actor_rollout_ref.model.lora_rank=4",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.rollout.name=vllm",
                "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
                "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
            ],
        )
    os.environ.pop("VERL_ENGINE_VENDOR"), os.environ.pop("VERL_ENGINE_DEVICE", None)
    worker = OpsdWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    worker.set_loss_fn(ADAPTER)
    found = worker.opsd_checks()
    data = batch(mine(all_rows()))
    identity = batch(mine(all_rows()), opsd_control_teacher="own", opsd_control_shift=0, opsd_control_adapters="off")
    shifted = batch(mine(all_rows()), opsd_control_teacher="own", opsd_control_shift=1, opsd_control_adapters="off")
    return {
        "engine": type(worker.actor.engine).__name__,
        "passed": all(c["passed"] for c in found),
        "stats": worker.opsd_adapter_stats(),
        "identity": means(worker.opsd_control(identity)["value_divergence"]),
        "shifted": means(worker.opsd_control(shifted)["value_divergence"]),
        "unnamed": refusal(lambda: worker.opsd_control(data)),
        "logprobs": gathered([list(a.shape) for a in worker.opsd_logprobs([[5, 6, 7]], [[0, 2]])]),
    }


def case_resumed_reference() -> dict:
    """Full-parameter training: a step, a checkpoint, and a new engine that loads it."""
    folder = str(Path(OUT).parent / f"checkpoint-{WORLD}")

    def scored(worker: OpsdTrainingWorker, adapters: str) -> torch.Tensor:
        controlled = dict(opsd_control_teacher="view", opsd_control_shift=0, opsd_control_adapters=adapters)
        return torch.cat(list(worker.control(batch(mine(all_rows()), **controlled))["value_divergence"].unbind()))

    first = _worker(lora=False)
    first.set_loss_fn(INITIAL)
    untouched = scored(first, "off")
    start = [full(p.data).clone() for p in first.engine.module.parameters()]
    first.train_mini_batch(batch(mine(all_rows()), mini_batch_size=4, epochs=2, seed=1))
    trained, weights = scored(first, "on"), [full(p.data).clone() for p in first.engine.module.parameters()]
    first.engine.save_checkpoint(folder)

    second = _worker(lora=False)
    second.keep(INITIAL)
    second.engine.load_checkpoint(folder)
    second.set_loss_fn(INITIAL)
    late = _worker(lora=False)
    late.engine.load_checkpoint(folder)
    now = [full(p.data) for p in second.engine.module.parameters()]
    return {
        "moved": max(float((a - b).abs().max()) for a, b in zip(start, weights, strict=True)),
        "loaded": max(float((a - b).abs().max()) for a, b in zip(now, weights, strict=True)),
        "reference": max(
            float((scored(second, "off") - untouched).abs().max()), float((scored(second, "on") - trained).abs().max())
        ),
        "late": refusal(lambda: late.set_loss_fn(INITIAL)),
    }


def case_export() -> dict:
    """The exported adapter in PEFT's own hands, on a model that this project has not touched."""
    from peft import PeftModel
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    worker, folder = _worker(), Path(OUT).parent / f"export-{WORLD}" / "adapter"
    ids, positions = [[5, 6, 7, 8, 9], [20, 30]], [[0, 2, 3], [1]]
    worker.export_adapter(str(folder))  # replaced below
    set_params(worker.engine, "lora_A", 0.1)
    trained = worker.logprobs(ids, positions)
    worker.export_adapter(str(folder))
    if RANK:
        return {}
    with safe_open(folder / "adapter_model.safetensors", "pt") as f:
        dtypes = sorted({str(f.get_tensor(k).dtype) for k in f.keys()})
    base = AutoModelForCausalLM.from_pretrained(f"{MODELS}/untied", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        plain = [base(torch.tensor([i])).logits[0, p].log_softmax(-1).numpy() for i, p in zip(ids, positions, strict=True)]
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        loaded = [model(torch.tensor([i])).logits[0, p].log_softmax(-1).numpy() for i, p in zip(ids, positions, strict=True)]
    return {
        "files": sorted(p.name for p in folder.iterdir() if p.suffix in (".json", ".safetensors")),
        "beside": sorted(p.name for p in folder.parent.iterdir()),
        "dtypes": dtypes,
        "base": model.peft_config["default"].base_model_name_or_path == f"{MODELS}/untied",
        "moved": max(float(abs(a - b).max()) for a, b in zip(plain, trained, strict=True)),
        "gap": max(float(abs(a - b).max()) for a, b in zip(loaded, trained, strict=True)),
    }
