"""Everything that is checked and made before verl starts anything: bad input stops here, with exit code 2 and nothing left."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_opsd import resume
from verl_opsd.config import OpsdConfig, SandboxConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation import canary
from verl_opsd.evaluation.design import Design
from verl_opsd.evaluation.model_size import model_size
from verl_opsd.evidence.predictions import read as read_predictions
from verl_opsd.evidence.predictions import write_down
from verl_opsd.paths import cache_dir
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.verl_adapter import budget
from verl_opsd.verl_adapter.actor_briefs import actor_briefs
from verl_opsd.verl_adapter.brief_checks import MadeBriefs, check_briefs, check_worth, record_briefs, record_worth
from verl_opsd.verl_adapter.choices import check_choices
from verl_opsd.verl_adapter.cluster import check_ray
from verl_opsd.verl_adapter.contradictions import check_folders, check_rounds, check_verl_keys, check_with_verl, data_file
from verl_opsd.verl_adapter.found import check_siblings, freeze_contract, record_tasks
from verl_opsd.verl_adapter.ignored import check_ignored
from verl_opsd.verl_adapter.keys import check_keys, check_texts
from verl_opsd.verl_adapter.memory_checks import Need, check_memory
from verl_opsd.verl_adapter.optimizer import check_optimizer
from verl_opsd.verl_adapter.requirements import (
    check_chat,
    check_hardware,
    check_heads,
    check_layers,
    check_rollout,
    check_served,
    check_support,
    check_trl,
    ensure_student,
)
from verl_opsd.verl_adapter.routes import check_routes
from verl_opsd.verl_adapter.targets import check_adapter
from verl_opsd.verl_adapter.teacher_checks import check_teachers

PACKAGES = ("verl-opsd", "verl", "torch", "transformers", "peft", "ray", "cooperbench", "TransferQueue", "vllm")


def parse(config: DictConfig) -> OpsdConfig:
    """The `opsd` section, validated; verl's own keys that contradict it are refused.

    Raises:
        OpsdError: see :meth:`OpsdConfig.parse`, a key that nothing reads, and every contradiction between verl's keys and ours.
    """
    if not isinstance(config.get("recipe", None), (type(None), DictConfig)) or config.get("opsd") is None:
        raise OpsdError(
            f"+recipe={config.get('recipe')} is a plain key in the composed config",
            "`+recipe=` must be resolved as a config group, or verl's defaults would run instead",
            "install with `pip install .`, or `pip install -e . --config-settings editable_mode=compat`",
        )
    check_choices(config)
    missing = [str(k) for k in config if OmegaConf.is_missing(config, k)]  # first: keys of the section refer to them
    try:
        missing = missing or [f"{k}" for k in sorted(OmegaConf.missing_keys(config.opsd))]
    except OmegaConfBaseException as error:
        raise _unresolved(error) from error
    if missing:
        raise OpsdError(f"{', '.join(missing)} not set", "there is no default", "give KEY=VALUE on the command line")
    check_keys(config)
    opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
    check_verl_keys(config, opsd)
    check_ignored(config)
    check_texts(config)
    check_optimizer(config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim")
    return opsd


def _unresolved(error: OmegaConfBaseException) -> OpsdError:
    rule = "every key that another one refers to is there"
    return OpsdError(" ".join(str(error).split()), rule, "leave that key as the groups set it")


def load_pairs(opsd: OpsdConfig) -> tuple[list[PairTask], list[PairTask]]:
    """Training and evaluation pairs: known, disjoint, prepared and qualified.

    Raises:
        OpsdError: an unknown subset, an overlap, or a pair that is not qualified.
    """
    from verl_opsd.cooperbench.dataset import assert_disjoint, dataset_folder, load_subset
    from verl_opsd.cooperbench.qualification import require_qualified

    root = dataset_folder(opsd.tasks.dataset, "opsd.tasks.dataset")
    evaluation = load_subset(opsd.tasks.eval, root, split="eval")
    train = [] if opsd.tasks.train is None else load_subset(opsd.tasks.train, root, split="train")
    t = opsd.tasks
    trained, evaluated = f"training (opsd.tasks.train={t.train})", f"evaluation (opsd.tasks.eval={t.eval})"
    assert_disjoint(train, evaluation, level=t.disjoint, what=(trained, evaluated))
    if opsd.tasks.test is not None:
        locked = load_subset(opsd.tasks.test, root, split="test")
        test = f"the locked test split (opsd.tasks.test={t.test})"
        assert_disjoint(train, locked, level=t.disjoint, what=(trained, test))
        if opsd.tasks.look is None:
            assert_disjoint(evaluation, locked, level=t.disjoint, what=(evaluated, test))
        elif not {p.key for p in evaluation} & {p.key for p in locked}:
            raise OpsdError(
                f"opsd.tasks.look={opsd.tasks.look!r}, and opsd.tasks.eval={opsd.tasks.eval} holds no pair of {opsd.tasks.test}",
                "a look at the locked test split evaluates on it",
                f"set opsd.tasks.eval={opsd.tasks.test}, or leave opsd.tasks.look out",
            )
    train, evaluation = train[: opsd.tasks.max_train], evaluation[: opsd.tasks.max_eval]
    if (not train and opsd.mode != "evaluate") or not evaluation:
        raise OpsdError(
            f"{len(train)} training pairs, {len(evaluation)} evaluation pairs",
            "a run needs both",
            "name subsets that hold pairs",
        )
    if opsd.tasks.prepare:
        prepare_missing(opsd.sandbox, train + evaluation)
    require_qualified(train + evaluation, cache_dir())
    return train, evaluation


def prepare_missing(sandbox: SandboxConfig, pairs: list[PairTask]) -> None:
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
            qualify(task_dir, prepared, missing, backend=sandbox.backend, allow_unsafe=sandbox.allow_unsafe)


def canary_limits(opsd: OpsdConfig) -> Path:
    """The file of the canary's limits."""
    return canary.DEFAULT if opsd.canary.limits is None else Path(opsd.canary.limits).expanduser()


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


def plain_config(config: DictConfig) -> dict[str, Any]:
    """The composed configuration without Hydra's own section, references unresolved."""
    plain: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"]), resolve=False)
    return plain


def meta(config: DictConfig, opsd: OpsdConfig, started: float) -> dict[str, Any]:
    """What this run used: versions, files, devices, seeds, temporary directories, the config."""
    import torch

    from verl_opsd.cooperbench.identity import harness_identity

    student = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
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
        "student": student,
        "model_size": dict(zip(("parameters", "active_parameters"), model_size(Path(student).expanduser()), strict=True)),
        "temporary": {"run": os.environ["OPSD_TMP"], "ray": os.environ["OPSD_RAY_TMP"]},
        "opsd": dataclasses.asdict(opsd),
        "config": plain_config(config),
    }


def check_host(config: DictConfig) -> OpsdConfig:
    """The checks that need no task and no model: keys, hardware, installation, sandbox. Writes nothing."""
    from verl_opsd.cooperbench.harness import check_contract
    from verl_opsd.cooperbench.sandbox import require_sandbox

    opsd = parse(config)
    check_hardware(config, opsd)
    check_ray(config)
    check_trl()
    check_rollout(config.actor_rollout_ref.rollout)
    check_contract(opsd.contract)
    check_folders(config)
    check_with_verl(config)
    require_sandbox(opsd.sandbox.backend, allow_unsafe=opsd.sandbox.allow_unsafe)
    return opsd


def check_models(config: DictConfig, opsd: OpsdConfig) -> str:
    """Makes the embedded student where it is missing; student, teacher, template and parser fit together, and the devices.

    Returns:
        The student's path.
    """
    model_path = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    ensure_student(opsd, model_path)
    check_adapter(config.actor_rollout_ref.model, "actor_rollout_ref.model", model_path)
    check_support(opsd, model_path)
    check_heads(config.actor_rollout_ref.actor.ulysses_sequence_parallel_size, "actor_rollout_ref.actor", model_path)
    check_layers(config, opsd, model_path)
    check_served(config.actor_rollout_ref.model, config.actor_rollout_ref.rollout)
    check_chat(opsd, model_path)
    check_teachers(opsd, model_path)
    return model_path


@dataclass(frozen=True)
class Launch:
    """What the checks of a configuration have found; :func:`prepare_run` writes it down.

    Attributes:
        needs: of accelerators' memory. briefs: of the pairs that are trained on. worth: verdict and detail; None: nothing is distilled.
    """

    opsd: OpsdConfig
    train: list[PairTask]
    evaluation: list[PairTask]
    contract: EvalContract
    cost: budget.Estimate
    needs: list[Need]
    briefs: MadeBriefs
    worth: tuple[bool, str] | None


def check_run(config: DictConfig) -> Launch:
    """Every check that does not depend on what the run directory holds. The first rule that is broken raises; nothing is started."""
    opsd = check_host(config)
    model_path = check_models(config, opsd)
    needs = check_memory(config, opsd)
    train, evaluation = load_pairs(opsd)
    check_rounds(config, len(train or evaluation))
    if opsd.canary.every is not None:
        canary.read_limits(canary_limits(opsd))
    cost = budget.estimate(config, opsd, len(evaluation) * opsd.evaluation.seeds)
    budget.require_within(cost, opsd.budget)
    contract = freeze_contract(config, opsd, train, evaluation, model_path)
    taught = train
    if opsd.mode == "offline":
        from verl_opsd.verl_adapter.corpus import check_corpus, corpus_pairs

        check_corpus(opsd, contract, evaluation)
        taught = corpus_pairs(opsd)
    check_routes(opsd, taught)
    for pair in train + evaluation:
        actor_briefs(opsd.actor_brief, pair)
    briefs = check_briefs(opsd, taught, model_path)
    worth = None if opsd.brief.name == "none" else check_worth(opsd, briefs.audits)  # the identity arm distils nothing
    if opsd.predictions is not None:
        read_predictions(Path(opsd.predictions).expanduser())
    return Launch(opsd, train, evaluation, contract, cost, needs, briefs, worth)


def prepare_run(config: DictConfig, run: RunDir, checked: Launch | None = None) -> OpsdConfig:
    """Checks everything and makes what the run needs. Nothing is started.

    Args:
        checked: what :func:`check_run` found for this very configuration; None: it is checked now.

    Raises:
        OpsdError: a check, or the run directory holds another run.
        DryRun: nothing else was asked for.
    """
    found = checked or check_run(config)
    opsd, contract, pairs = found.opsd, found.contract, found.train or found.evaluation
    print(f"verl-opsd: recipe={opsd.recipe} scale={opsd.scale} run directory {run.path}", flush=True)
    resume.check(run, contract, plain_config(config))
    check_siblings(run, contract, opsd.varies)
    if opsd.dry_run:
        raise budget.DryRun(found.cost.text())
    # verl wants a training file also where nothing is trained
    write_data(run, pairs, "train", batch=config.data.train_batch_size)
    write_data(run, [p for p in found.evaluation for _ in range(opsd.evaluation.seeds)], "val")
    write_json(run.path / "contract.json", contract.as_dict())
    budget.record(run, found.cost, opsd.budget)
    for need in found.needs:
        run.evidence("planned_memory", need.total, need.room, True, str(need))
    record_tasks(run, opsd, found.train, found.evaluation)
    if opsd.mode == "evaluate":
        from verl_opsd.verl_adapter import full_eval

        full_eval.prepare(config, opsd, run, found.evaluation, contract)
    elif found.evaluation:
        print(f"verl-opsd: evaluation: {Design(len(found.evaluation), opsd.evaluation.seeds).text()}", flush=True)
    if opsd.canary.every is not None:
        canary.write_down(run, canary_limits(opsd))
    record_briefs(run, opsd, found.briefs)
    if found.worth is not None:
        record_worth(run, *found.worth)
    if opsd.predictions is not None:
        write_down(run.path, Path(opsd.predictions).expanduser())
    counts = f"{len(found.train)} training pairs, {len(found.evaluation)} evaluation pairs"
    print(f"verl-opsd: contract {contract.hash[:12]}, {counts}", flush=True)
    if contract.sampling:
        print(f"verl-opsd: {contract.sampling}", flush=True)
        run.evidence("sampling", None, None, None, contract.sampling)
    return opsd
