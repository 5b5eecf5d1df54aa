"""The ``opsd`` section of a warm start, validated together with verl's own keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_opsd.config import GateConfig, build_section
from verl_opsd.distill.weights import SurprisalGate
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter.choices import check_choices
from verl_opsd.verl_adapter.contradictions import (
    check_device,
    check_dtypes,
    check_labels,
    check_loggers,
    check_model_keys,
    check_padded,
    check_shared,
)
from verl_opsd.verl_adapter.ignored import IGNORED_BY_WARM_START, check_ignored
from verl_opsd.verl_adapter.keys import ATTENTIONS, check_keys, check_texts, warm_start_keys
from verl_opsd.verl_adapter.optimizer import check_optimizer
from verl_opsd.verl_adapter.values import WARM_START_KINDS, check_kinds

#: What a group sets.
LABELS = {"opsd.recipe": "+recipe=", "opsd.scale": "sft_scale=", "opsd.student": "sft_scale="}
#: How rows share a pass.
PASSES = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")
DATASET = ("pkg://verl_opsd.verl_adapter.sft_data", "CorpusDataset")


@dataclass(frozen=True)
class SftConfig:
    """The loss; see ``verl_adapter.sft``."""

    chunk: int = 256
    gate: GateConfig | None = None
    anchor: float = 0.0


@dataclass(frozen=True)
class PhaseConfig:
    """Buckets with their weights, and epochs; see ``corpus.curriculum``."""

    buckets: dict[str, float]
    epochs: int = 1


@dataclass(frozen=True)
class WarmStartConfig:
    """The ``opsd`` section of a warm start.

    Attributes:
        corpora: bucket -> folder of a corpus. phases: in order, by name.
        seed: of the order of rows.
    """

    recipe: str
    scale: Literal["local", "smollm", "gpu1", "gpu2", "gpu8"]
    corpora: dict[str, str]
    phases: dict[str, PhaseConfig]
    student: Literal["", "tiny", "warm", "smollm"] = ""
    seed: int = 0
    sft: SftConfig = field(default_factory=SftConfig)


def parse(config: DictConfig) -> WarmStartConfig:
    """The section, validated with verl's keys.

    Raises:
        OpsdError: a key that nothing reads, a value out of range, or verl's keys that contradict the section.
    """
    check_choices(config)
    missing = [str(k) for k in config if OmegaConf.is_missing(config, k)]
    if missing:
        raise OpsdError(
            f"{', '.join(missing)} not set", "there is no default", "give KEY=FOLDER, a folder of `opsd corpus build`"
        )
    check_keys(config, warm_start_keys(), {})
    check_labels(config, LABELS)
    check_kinds(config, WARM_START_KINDS)
    check_texts(config, warm_start_keys())
    check_model_keys(config, "model")
    opsd: WarmStartConfig = build_section(WarmStartConfig, OmegaConf.to_container(config.opsd, resolve=True), "opsd")
    sft, trainer, data, saved = opsd.sft, config.trainer, config.data, config.checkpoint
    files = tuple(str(RunDir.from_env().path / "data" / f"{k}.json") for k in ("train", "validation"))
    checkpoints = str(RunDir.from_env().path / "checkpoints")
    missing_state = [k for k in ("model", "optimizer", "extra") if k not in saved.save_contents or k not in saved.load_contents]
    frequencies = (trainer.save_freq, trainer.test_freq)
    attention = OmegaConf.select(config, "model.override_config.attn_implementation")
    rules = [
        (
            attention not in (None, *ATTENTIONS),
            f"model.override_config.attn_implementation={attention}",
            f"it is one of {', '.join(ATTENTIONS)}",
            "correct the value",
        ),
        (sft.chunk < 1, f"opsd.sft.chunk={sft.chunk}", "a chunk holds at least one loss position", "raise it"),
        (
            sft.anchor < 0,
            f"opsd.sft.anchor={sft.anchor}",
            "the weight of a divergence is a number from 0 on",
            "0 leaves the anchor out",
        ),
        (
            sft.anchor > 0 and config.engine.ulysses_sequence_parallel_size > 1,
            f"opsd.sft.anchor={sft.anchor} with engine.ulysses_sequence_parallel_size={config.engine.ulysses_sequence_parallel_size}",
            "an anchored step is computed with whole sequences on each rank",
            "leave one of the two out",
        ),
        (
            config.engine.strategy != "fsdp2",
            f"engine.strategy={config.engine.strategy}",
            "the engine runs under FSDP2",
            "leave it out",
        ),
        (
            config.engine.get("_target_") != "verl_opsd.verl_adapter.sft.SftEngineConfig"
            or _plain(config.engine.get("sft")) != _plain(config.opsd.sft),
            f"engine._target_={config.engine.get('_target_')} sft={config.engine.get('sft')}",
            "the loss is opsd.sft, and the engine that computes it is this project's",
            "set opsd.sft, and leave engine._target_ and engine.sft out",
        ),
        (
            (data.train_files, data.val_files) != files or (data.custom_cls.path, data.custom_cls.name) != DATASET,
            f"data.train_files={data.train_files} val_files={data.val_files} custom_cls={data.custom_cls}",
            "what is trained on are the stored ids of opsd.corpora",
            "leave these keys out and set corpus or opsd.corpora",
        ),
        (
            trainer.total_epochs != 1 or trainer.total_training_steps is not None,
            f"trainer.total_epochs={trainer.total_epochs} total_training_steps={trainer.total_training_steps}",
            "epochs are those of opsd.phases, which verl goes through once",
            "set opsd.phases.NAME.epochs",
        ),
        (
            any(config.engine[k] != data[k] for k in PASSES),
            ", ".join(f"engine.{k}={config.engine[k]}" for k in PASSES),
            "rows share a pass as data." + ", data.".join(PASSES) + " say, the anchor's too",
            "leave these keys of the engine out and set those of data",
        ),
        (data.pad_mode != "no_padding", f"data.pad_mode={data.pad_mode}", "rows keep their length", "leave it out"),
        (
            (data.train_max_samples, data.val_max_samples) != (-1, -1),
            f"data.train_max_samples={data.train_max_samples} val_max_samples={data.val_max_samples}",
            "the schedule says what is trained on",
            "set the weights of opsd.phases",
        ),
        (
            not all(type(f) is int and f for f in frequencies),
            f"trainer.save_freq, test_freq = {frequencies}",
            "both are numbers of steps",
            "give numbers; -1 saves and validates after the last step only",
        ),
        (
            (trainer.resume_mode, trainer.resume_from_path, trainer.default_local_dir) != ("auto", None, checkpoints),
            f"trainer.resume_mode={trainer.resume_mode} resume_from_path={trainer.resume_from_path} default_local_dir="
            f"{trainer.default_local_dir}",
            "a run goes on from its own last checkpoint, under the settings and on the rows that made it",
            "leave these keys out; hydra.run.dir names the run, and model.path a model to start from",
        ),
        (
            trainer.save_freq != -1 and bool(missing_state),
            f"checkpoint.save_contents and load_contents without {', '.join(missing_state)}",
            "a run goes on as if it had not been stopped, so that its checkpoints hold all of its state",
            "leave them out, or save after the last step only (trainer.save_freq=-1)",
        ),
        (
            "model" not in saved.save_contents,
            f"checkpoint.save_contents={list(saved.save_contents)}",
            "what was trained is kept at the end",
            "name model among them",
        ),
        (config.model.use_fused_kernels, "model.use_fused_kernels=true", "they bypass the vocabulary head", "set it to false"),
    ]
    for broken, what, rule, way_out in rules:
        if broken:
            raise OpsdError(what, rule, way_out)
    if sft.gate is not None:
        SurprisalGate(sft.gate.kappa, sft.gate.gamma)
    check_loggers(trainer)
    check_device(trainer, f"sft_scale={opsd.scale}", opsd.scale)
    check_dtypes(config.engine, "engine", config.model, "model")
    check_padded(config.engine, "engine", config.model, "model")
    check_shared(config.engine.ulysses_sequence_parallel_size, "engine", config.model, "model")
    check_ignored(config, IGNORED_BY_WARM_START, warm_start_keys())
    check_optimizer(config.optim, "optim")
    return opsd


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
