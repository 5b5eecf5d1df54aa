"""Everything that is checked and made before verl starts anything: bad input stops here, with exit code 2 and nothing left."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd import resume
from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.paths import cache_dir
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.verl_adapter.brief_checks import check_briefs, check_worth, record_briefs, record_worth
from verl_opsd.verl_adapter.keys import check_keys
from verl_opsd.verl_adapter.requirements import (
    check_chat,
    check_hardware,
    check_rollout,
    check_teacher,
    check_trl,
    ensure_student,
)

PACKAGES = ("verl-opsd", "verl", "torch", "transformers", "peft", "ray", "cooperbench", "TransferQueue", "vllm")


def parse(config: DictConfig) -> OpsdConfig:
    """The `opsd` section, validated; verl's own keys that contradict it are refused.

    Raises:
        OpsdError: see :meth:`OpsdConfig.parse`, a key that nothing reads, and every contradiction between verl's keys and ours.
    """
    if not isinstance(config.get("recipe", None), (type(None), DictConfig)) or "opsd" not in config:
        raise OpsdError(
            f"+recipe={config.get('recipe')} is a plain key in the composed config",
            "`+recipe=` must be resolved as a config group, or verl's defaults would run instead",
            "install with `pip install .`, or `pip install -e . --config-settings editable_mode=compat`",
        )
    missing = [str(k) for k in config if OmegaConf.is_missing(config, k)]  # first: keys of the section refer to them
    missing = missing or [f"{k}" for k in sorted(OmegaConf.missing_keys(config.opsd))]
    if missing:
        raise OpsdError(f"{', '.join(missing)} not set", "there is no default", "give KEY=VALUE on the command line")
    check_keys(config)
    opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
    _verl_contradictions(config, opsd)
    return opsd


def _verl_contradictions(config: DictConfig, opsd: OpsdConfig) -> None:
    rollout, actor, model = (config.actor_rollout_ref[k] for k in ("rollout", "actor", "model"))
    c = opsd.contract
    for where, node in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        got, want = (node.temperature, node.top_p, node.top_k), (c.temperature, c.top_p, c.top_k)
        if got != want:
            raise OpsdError(
                f"actor_rollout_ref.{where} samples with temperature, top_p, top_k = {got}",
                f"the contract says {want}; training and evaluation sample as the contract says",
                "change opsd.contract instead",
            )
    files = (str(config.data.train_files), str(config.data.val_files))
    own_files = tuple(str(data_file(RunDir.from_env(), name)) for name in ("train", "val"))
    agent = (rollout.agent.default_agent_loop, OmegaConf.select(rollout, "agent.agent_loop_manager_class"))
    rules = [
        (
            not config.trainer.use_v1,
            "trainer.use_v1=false",
            "verl's older trainer would run PPO and none of this",
            "leave it out",
        ),
        (
            files != own_files,
            f"data.train_files, val_files = {files}",
            "the pairs of opsd.tasks are what is run; files of another place would take their place in silence",
            "leave both out and set opsd.tasks",
        ),
        (
            agent != ("opsd_pair", None),
            f"actor_rollout_ref.rollout.agent.default_agent_loop, agent_loop_manager_class = {agent}",
            "an episode is a pair that opsd_pair runs, grades and stores",
            "leave both out",
        ),
        (actor.strategy != "fsdp2", f"actor.strategy={actor.strategy}", "the engine runs under FSDP2 only", "set it to fsdp2"),
        (model.lora.merge, "model.lora.merge=true", "a bf16 merge loses almost all of a small update", "set it to false"),
        (
            not _is_opsd_trainer(config.trainer.v1.trainer_mode),
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}",
            "a recipe of this project runs OpsdTrainer, or a registered subclass of it",
            "leave the key out, or name the module that registers the subclass in VERL_USE_EXTERNAL_MODULES",
        ),
        (
            bool(config.distillation.enabled),
            "distillation.enabled=true",
            "verl's own distillation would run beside this one",
            "leave it out",
        ),
        (
            bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
            "use_kl_loss or use_kl_in_reward",
            "the anchor is opsd.loss.anchor; verl's KL terms are not part of this loss and would be ignored",
            "set opsd.loss.anchor",
        ),
        (rollout.n != 1 or rollout.val_kwargs.n != 1, "rollout.n != 1", "a row of data is one pair", "leave rollout.n at 1"),
        (
            actor.ulysses_sequence_parallel_size > 1 and model.override_config.get("attn_implementation") == "sdpa",
            f"actor.ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size} with sdpa",
            "sequence parallelism with plain SDPA gives wrong probabilities in silence",
            "set it to 1, or use flash_attention_2 or ulysses_sdpa",
        ),
        (opsd.mode == "offline" and not opsd.corpus, "no corpus", "offline training reads a stored corpus", "corpus=RUN_DIR"),
        (opsd.mode != "offline" and bool(opsd.corpus), f"opsd.corpus={opsd.corpus}", "only offline reads it", "remove it"),
        (
            not 1 <= rollout.agent.num_workers <= c.concurrency,
            f"rollout.agent.num_workers={rollout.agent.num_workers} with contract.concurrency={c.concurrency}",
            "every worker runs at least one pair at a time, and all together no more than the contract says",
            "set it between 1 and opsd.contract.concurrency",
        ),
        (
            not isinstance(config.trainer.test_freq, int) or not isinstance(config.trainer.total_training_steps, int),
            f"trainer.test_freq={config.trainer.test_freq}, total_training_steps={config.trainer.total_training_steps}",
            "both are numbers of rounds",
            "give numbers; test_freq=-1 never evaluates",
        ),
        (
            config.data.train_batch_size < 1
            or (isinstance(config.trainer.total_training_steps, int) and config.trainer.total_training_steps < 1),
            f"data.train_batch_size={config.data.train_batch_size}, total_training_steps={config.trainer.total_training_steps}",
            "a run has at least one round of at least one pair",
            "give numbers above 0",
        ),
        (
            actor.ppo_epochs != opsd.loss.epochs,
            f"actor.ppo_epochs={actor.ppo_epochs}",
            "epochs of this loss are opsd.loss.epochs",
            "set opsd.loss.epochs",
        ),
        (
            actor.ppo_mini_batch_size != config.data.train_batch_size,
            f"actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}",
            "optimizer steps count episodes: opsd.loss.episodes_per_update",
            "set opsd.loss.episodes_per_update",
        ),
        (
            bool(config.critic.enable or config.reward.reward_model.enable),
            f"critic.enable={config.critic.enable}, reward.reward_model.enable={config.reward.reward_model.enable}",
            "episodes are graded by their hidden tests, and this loss reads no value function",
            "leave both out",
        ),
        (actor.entropy_coeff != 0, f"actor.entropy_coeff={actor.entropy_coeff}", "not a term of this loss", "leave it at 0"),
    ]
    for broken, what, rule, way_out in rules:
        if broken:
            raise OpsdError(what, rule, way_out)


def _is_opsd_trainer(mode: str) -> bool:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_opsd.verl_adapter.trainer import OpsdTrainer

    return issubclass(TRAINER_REGISTRY.get(mode, object), OpsdTrainer)


def dataset_path(name: str) -> Path:
    """The folder behind ``opsd.tasks.dataset``."""
    from verl_opsd.cooperbench.dataset import POCKET_DIR

    return POCKET_DIR if name == "pocket" else Path(name).expanduser().resolve()


def load_pairs(opsd: OpsdConfig) -> tuple[list[PairTask], list[PairTask]]:
    """Training and evaluation pairs: known, disjoint, prepared and qualified.

    Raises:
        OpsdError: an unknown subset, an overlap, or a pair that is not qualified.
    """
    from verl_opsd.cooperbench.dataset import assert_disjoint, load_subset
    from verl_opsd.cooperbench.qualification import require_qualified

    root = dataset_path(opsd.tasks.dataset)
    train, evaluation = load_subset(opsd.tasks.train, root, split="train"), load_subset(opsd.tasks.eval, root, split="eval")
    assert_disjoint(train, evaluation, level=opsd.tasks.disjoint)
    train, evaluation = train[: opsd.tasks.max_train], evaluation[: opsd.tasks.max_eval]
    if not train or not evaluation:
        raise OpsdError(
            f"{len(train)} training pairs, {len(evaluation)} evaluation pairs",
            "a run needs both",
            "name subsets that hold pairs",
        )
    if opsd.tasks.prepare:
        prepare_missing(opsd, train + evaluation)
    require_qualified(train + evaluation, cache_dir())
    return train, evaluation


def prepare_missing(opsd: OpsdConfig, pairs: list[PairTask]) -> None:
    """Prepares and qualifies the tasks of ``pairs`` that are not; seconds a pocket task, nothing the second time."""
    from verl_opsd.cooperbench.feature_table import load_table
    from verl_opsd.cooperbench.prepare import prepare
    from verl_opsd.cooperbench.qualification import qualify

    wanted: dict[Path, set[int]] = {}
    for p in pairs:
        wanted.setdefault(p.task_dir, set()).update(p.features)
    for task_dir, features in sorted(wanted.items()):
        prepared = prepare(task_dir, None, cache_dir())
        table = load_table(prepared)
        missing = sorted(features - set(table.rows if table else ()))
        if missing:
            print(f"verl-opsd: qualifying {task_dir.parent.name}/{task_dir.name} features {missing}", flush=True)
            qualify(task_dir, prepared, missing, backend=opsd.sandbox.backend, allow_unsafe=opsd.sandbox.allow_unsafe)


def freeze_contract(opsd: OpsdConfig, pairs: list[PairTask], model_path: str) -> EvalContract:
    """The contract of this run: the configured fields plus what was found: harness, templates, dataset."""
    import hashlib

    from transformers import AutoTokenizer

    from verl_opsd.cooperbench.dataset import tree_hash
    from verl_opsd.cooperbench.identity import harness_identity, identity_string

    identity = harness_identity()
    template = AutoTokenizer.from_pretrained(model_path).chat_template or ""
    return dataclasses.replace(
        opsd.contract,
        harness=identity_string(),
        templates_hash=hashlib.sha256((identity["templates_hash"] + template).encode()).hexdigest(),
        dataset_hash=tree_hash(sorted({p.task_dir for p in pairs})),
    )


def data_file(run: RunDir, name: str) -> Path:
    """verl's prompt file of a run: ``train`` or ``val``."""
    return run.path / "data" / f"{name}.parquet"


def write_data(run: RunDir, pairs: list[PairTask], name: str, batch: int = 1) -> None:
    """verl's prompt file: one row a pair, repeated until the rows are whole batches, since verl drops what is left over."""
    import pandas

    rows = []
    count = math.lcm(len(pairs), batch)
    for i in range(count):
        p = pairs[i % len(pairs)]
        info: dict[str, Any] = {"index": i, "pair": dataclasses.asdict(p) | {"dataset_dir": str(p.dataset_dir)}}
        rows.append(
            {
                "data_source": "cooperbench",
                "prompt": [{"role": "user", "content": p.key}],
                "ability": "agent",
                "reward_model": {"style": "rule", "ground_truth": p.key},
                "extra_info": info,
            }
        )
    path = data_file(run, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(path)


def meta(config: DictConfig, opsd: OpsdConfig, started: float) -> dict[str, Any]:
    """What this run used: versions, files, devices, seeds, temporary directories, the config."""
    import torch

    from verl_opsd.cooperbench.identity import harness_identity

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "argv": sys.argv,
        "started": started,
        "python": platform.python_version(),
        "versions": versions,
        "devices": devices or [f"cpu x {os.cpu_count()}"],
        "harness": harness_identity(),
        "student": str(OmegaConf.select(config, "actor_rollout_ref.model.path")),
        "temporary": {"run": os.environ["OPSD_TMP"], "ray": os.environ["OPSD_RAY_TMP"]},
        "opsd": dataclasses.asdict(opsd),
        "config": OmegaConf.to_container(
            OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"]), resolve=False
        ),
    }


def prepare_run(config: DictConfig, run: RunDir) -> OpsdConfig:
    """Checks everything and makes what the run needs. Nothing is started; the first rule that is broken raises."""
    from verl_opsd.cooperbench.sandbox import require_sandbox

    opsd = parse(config)
    print(f"verl-opsd: recipe={opsd.recipe} scale={opsd.scale} run directory {run.path}", flush=True)
    check_hardware(config, opsd)
    check_trl()
    check_rollout(config.actor_rollout_ref.rollout.name)
    require_sandbox(opsd.sandbox.backend, allow_unsafe=opsd.sandbox.allow_unsafe)
    model_path = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    ensure_student(opsd, model_path)
    check_chat(opsd, model_path)
    check_teacher(opsd, model_path)
    train, evaluation = load_pairs(opsd)
    contract = freeze_contract(opsd, train + evaluation, model_path)
    if opsd.mode == "offline":
        from verl_opsd.verl_adapter.corpus import check_corpus, corpus_pairs

        check_corpus(opsd, contract, evaluation)
        briefs = check_briefs(opsd, corpus_pairs(opsd), model_path)
    else:
        briefs = check_briefs(opsd, train, model_path)
    worth = None if opsd.brief.name == "none" else check_worth(opsd)  # the identity arm distils nothing
    resume.check(run, contract)
    write_data(run, train, "train", batch=config.data.train_batch_size)
    write_data(run, evaluation, "val")
    write_json(run.path / "contract.json", contract.as_dict())
    record_briefs(run, opsd, briefs)
    if worth is not None:
        record_worth(run, *worth)
    print(
        f"verl-opsd: contract {contract.hash[:12]}, {len(train)} training pairs, {len(evaluation)} evaluation pairs", flush=True
    )
    return opsd
