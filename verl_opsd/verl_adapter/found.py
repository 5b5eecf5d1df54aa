"""The fields of the contract that no configuration sets: harness, templates, tokenizer, tasks, pairs, serving, sandbox."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import subset_hash, tree_hash
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.verl_adapter.requirements import tokenizer_of
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS

#: Keys of verl's rollout section that decide how a model is served; capacity alone (memory share, logging) is not among them.
SERVING = (
    "dtype",
    "quantization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "logprobs_mode",
)


def freeze_contract(
    config: DictConfig, opsd: OpsdConfig, train: list[PairTask], evaluation: list[PairTask], model_path: str
) -> EvalContract:
    """The contract of this run: the configured fields plus what was found."""
    from verl_opsd.cooperbench.identity import harness_identity, identity_string
    from verl_opsd.cooperbench.sandbox import traits
    from verl_opsd.teachers.cache import tokenizer_hash

    pairs = train + evaluation
    return dataclasses.replace(
        opsd.contract,
        harness=identity_string(),
        templates_hash=harness_identity()["templates_hash"],
        tokenizer_hash=tokenizer_hash(tokenizer_of(model_path)),
        dataset_hash=tree_hash(task_folders(pairs)),
        subset_hash=subset_hash(pairs),
        serving=serving(config),
        sandbox_traits=traits(opsd.contract.sandbox),
    )


def task_folders(pairs: list[PairTask]) -> list[Path]:
    """Folders of the pairs' tasks, each once, in the order in which the contract hashes them."""
    return sorted({p.task_dir for p in pairs})


def serving(config: DictConfig) -> str:
    """Rollout engine, version, parallel layout, precision, batching and device, as one line that two runs can be compared by.

    The embedded servers compute each request alone, so of verl's keys only their number of replicas is a layout.
    """
    rollout = config.actor_rollout_ref.rollout
    sizes = {k: int(OmegaConf.select(rollout, f"{k}_parallel_size") or 1) for k in ("tensor_model", "data", "pipeline_model")}
    ranks = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    one = sizes["tensor_model"] * sizes["data"] * sizes["pipeline_model"]
    parts = [str(rollout.name)]
    if rollout.name not in OWN_BACKENDS:
        parts.append(_version(rollout.name))
    parts += [f"tp={sizes['tensor_model']}", f"dp={sizes['data']}", f"pp={sizes['pipeline_model']}", f"replicas={ranks // one}"]
    if rollout.name not in OWN_BACKENDS:
        parts += [f"{key}={OmegaConf.select(rollout, key)}" for key in SERVING]
        engine: Any = OmegaConf.select(rollout, f"engine_kwargs.{rollout.name}")
        plain = {} if engine is None else OmegaConf.to_container(engine, resolve=True)
        parts.append(f"engine_kwargs={json.dumps(plain, sort_keys=True)}")
    return " ".join([*parts, f"device={_device()}"])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def check_siblings(run: RunDir, contract: EvalContract, varies: str | None) -> None:
    """The jobs of one sweep differ from one another in the declared field of the contract at most.

    Raises:
        OpsdError: naming the first job of the same sweep whose contract differs in another field.
    """
    if not (run.path.parent / "multirun.yaml").is_file():
        return
    for folder in sorted(run.path.parent.iterdir()):
        if folder != run.path and (folder / "contract.json").is_file():
            contract.require_same(RunDir(folder).contract(), f"job {folder.name} of the sweep {run.path.parent}", varies)


def record_tasks(run: RunDir, opsd: OpsdConfig, train: list[PairTask], evaluation: list[PairTask]) -> None:
    """Writes ``tasks.json`` (pairs by split, the folders of their tasks), and a look at the locked split into the evidence."""
    folders = [str(folder) for folder in task_folders(train + evaluation)]
    splits = {"train": [p.key for p in train], "eval": [p.key for p in evaluation]}
    write_json(run.path / "tasks.json", {**splits, "locked": opsd.tasks.test, "look": opsd.tasks.look, "folders": folders})
    if opsd.tasks.look is not None:
        run.evidence("locked_look", subset_hash(evaluation), None, None, f"{opsd.tasks.test}: {opsd.tasks.look}")


def check_tasks_unchanged(run: RunDir) -> None:
    """The task files are those that the run began with.

    Raises:
        OpsdError: a file was changed, added or taken away.
    """
    folders = [Path(f) for f in json.loads((run.path / "tasks.json").read_text())["folders"]]
    before, after = run.contract().dataset_hash, tree_hash(folders)
    way_out = "restore the data set, and find out what wrote to it: grades before and after are of two data sets"
    run.require("tasks_unchanged", after, before, after == before, way_out, f"{len(folders)} task folders")
