"""Values of verl's keys, each by itself: counts, kinds, and numbers that must divide one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.keys import ATTENTIONS

#: Keys that are counts, with the least value of each; -1 of a frequency means never.
COUNTS = {
    "data.train_batch_size": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": None,  # what is left by a teacher's devices: see `check_hardware`
    "trainer.total_training_steps": 1,
    "trainer.total_epochs": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
}
#: Names that verl takes for a dtype of FSDP, and for a part of a checkpoint.
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
CONTENTS = ("model", "optimizer", "extra", "hf_model")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_SHARE = ("a number from 0 to 1", lambda v: _number(v) and 0 <= v <= 1)
_WHOLE = ("a whole number above 0", lambda v: type(v) is int and v > 0)
_SWITCH = ("true or false", lambda v: isinstance(v, bool))
#: Keys of a kind, each with what it must be.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "actor_rollout_ref.actor.optim.lr": ("a number above 0", lambda v: _number(v) and 0 < v < math.inf),
    "actor_rollout_ref.actor.optim.clip_grad": ("a number above 0", lambda v: _number(v) and v > 0),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("a number from 0 to 1, or null", lambda v: v is None or _SHARE[1](v)),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": _SHARE,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": (
        "a whole number, -1 for lr_warmup_steps_ratio",
        lambda v: type(v) is int and v >= -1,
    ),
    "actor_rollout_ref.actor.optim.num_cycles": ("a number above 0", lambda v: _number(v) and 0 < v < math.inf),
    "actor_rollout_ref.actor.optim.zero_indexed_step": _SWITCH,
    **{
        f"actor_rollout_ref.actor.clip_ratio_{key}": ("a number", lambda v: _number(v) and math.isfinite(v))
        for key in ("low", "high", "c")
    },
    **{
        f"actor_rollout_ref.{key}_micro_batch_size_per_gpu": (
            "a whole number above 0, or null with dynamic batches",
            lambda v: v is None or (type(v) is int and v > 0),
        )
        for key in ("actor.ppo", "rollout.log_prob")
    },
    **{
        f"actor_rollout_ref.{key}_max_token_len_per_gpu": ("a whole number above 0", lambda v: type(v) is int and v > 0)
        for key in ("actor.ppo", "rollout.log_prob")
    },
    "actor_rollout_ref.model.lora_rank": ("a whole number, 0 for full-parameter training", lambda v: type(v) is int and v >= 0),
    # whole: verl writes it so beside its checkpoints, from where an export takes it
    "actor_rollout_ref.model.lora_alpha": ("a whole number above 0", lambda v: type(v) is int and v > 0),
    **{
        f"actor_rollout_ref.actor.fsdp_config.{key}": (f"one of {', '.join(DTYPES)}", lambda v: v is None or v in DTYPES)
        for key in ("model_dtype", "dtype", *(f"mixed_precision.{k}_dtype" for k in ("param", "reduce", "buffer")))
    },
    **{
        f"actor_rollout_ref.actor.checkpoint.{key}": (
            f"a list of {', '.join(CONTENTS)}",
            lambda v: isinstance(v, ListConfig) and set(v) <= set(CONTENTS),
        )
        for key in ("save_contents", "load_contents")
    },
    "actor_rollout_ref.actor.optim.weight_decay": ("a number of at least 0", lambda v: _number(v) and 0 <= v < math.inf),
    "actor_rollout_ref.actor.optim.betas": (
        "two numbers from 0 to below 1",
        lambda v: isinstance(v, ListConfig) and len(v) == 2 and all(_number(b) and 0 <= b < 1 for b in v),
    ),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant or cosine", lambda v: v in ("constant", "cosine")),
    "actor_rollout_ref.rollout.gpu_memory_utilization": ("a share above 0, at most 1", lambda v: _number(v) and 0 < v <= 1),
    "actor_rollout_ref.model.override_config.attn_implementation": (
        f"one of {', '.join(ATTENTIONS)}",
        lambda v: v is None or v in ATTENTIONS,
    ),
    "data.seed": ("a whole number, or null", lambda v: v is None or type(v) is int),
    "trainer.max_actor_ckpt_to_keep": (
        "a whole number above 0, or null for all",
        lambda v: v is None or (type(v) is int and v > 0),
    ),
    "trainer.project_name": ("a name", lambda v: isinstance(v, str) and bool(v)),
    "trainer.experiment_name": ("a name", lambda v: isinstance(v, str) and bool(v)),
    "trainer.resume_mode": ("auto, disable or resume_path", lambda v: v in ("auto", "disable", "resume_path")),
}

#: The same for a warm start; kinds that both have are those above.
WARM_START_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{k.removeprefix("actor_rollout_ref.actor."): v for k, v in KINDS.items() if ".actor.optim." in k},
    **{k.removeprefix("actor_rollout_ref.actor."): v for k, v in KINDS.items() if ".actor.checkpoint." in k},
    **{f"model.{k}": KINDS[f"actor_rollout_ref.model.{k}"] for k in ("lora_rank", "lora_alpha")},
    **{
        f"engine.{k}": KINDS[f"actor_rollout_ref.actor.fsdp_config.{k}"]
        for k in ("model_dtype", "dtype", *(f"mixed_precision.{k}_dtype" for k in ("param", "reduce", "buffer")))
    },
    "checkpoint.save_lora_only": ("true or false", lambda v: v is None or isinstance(v, bool)),
    "trainer.default_hdfs_dir": ("a folder, or null", lambda v: v is None or (isinstance(v, str) and bool(v))),
    "engine.ulysses_sequence_parallel_size": _WHOLE,
    "engine.pad_to_length": _SWITCH,
    "engine.pad_to_length_bucket": _WHOLE,
    "engine.seed": ("a whole number", lambda v: type(v) is int),
    "data.train_batch_size": _WHOLE,
    "data.use_dynamic_bsz": _SWITCH,
    "data.num_workers": ("a whole number", lambda v: type(v) is int and v >= 0),
    "trainer.profile_interval": (
        "the first and the last step to profile, or [-1, -1]",
        lambda v: (
            isinstance(v, ListConfig)
            and (list(v) == [-1, -1] or (len(v) == 2 and all(type(i) is int for i in v) and 0 <= v[0] <= v[1]))
        ),
    ),
    "trainer.project_name": KINDS["trainer.project_name"],
    "trainer.experiment_name": KINDS["trainer.experiment_name"],
    "data.micro_batch_size_per_gpu": _WHOLE,
    "data.max_token_len_per_gpu": _WHOLE,
    "trainer.max_ckpt_to_keep": KINDS["trainer.max_actor_ckpt_to_keep"],
    "engine.forward_only": ("false where something is trained", lambda v: v is False),
}


def check_values(config: DictConfig) -> None:
    """
    Raises:
        OpsdError: the first key whose value verl would not take, or take for something else.
    """
    _check_counts(config)
    check_kinds(config, KINDS)


def check_kinds(config: DictConfig, kinds: Mapping[str, tuple[str, Callable[[Any], bool]]]) -> None:
    """
    Raises:
        OpsdError: the first key whose value is not of its kind.
    """
    for key, (kind, holds) in kinds.items():
        value = OmegaConf.select(config, key)
        if not holds(value):
            raise OpsdError(f"{key}={value}", f"{key} is {kind}", "correct the value")


def _check_counts(config: DictConfig) -> None:
    for key, least in COUNTS.items():
        value = OmegaConf.select(config, key)
        if type(value) is not int or (least is not None and value < least):
            raise OpsdError(
                f"{key}={value}",
                f"{key} is a whole number" + ("" if least is None else f", at least {least}"),
                "correct the value" + ("; -1 means never" if least == -1 else ""),
            )
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    batch, sequence = config.data.train_batch_size, config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    if ranks > 0 and (batch % ranks or ranks % sequence):
        raise OpsdError(
            f"{ranks} ranks of the student with data.train_batch_size={batch}, ulysses_sequence_parallel_size={sequence}",
            "verl wants a batch that is a multiple of the ranks, and ranks that are a multiple of those of a sequence",
            "change data.train_batch_size, trainer.n_gpus_per_node or actor.ulysses_sequence_parallel_size",
        )
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    check_shards(OmegaConf.select(config, key), key, ranks)


def check_shards(size: Any, key: str, ranks: int) -> None:
    """
    Args:
        size: ranks that share the weights out. key: its name. ranks: of the student.

    Raises:
        OpsdError: groups of that many can't be made.
    """
    if type(size) is not int or (size != -1 and (size < 1 or (ranks > 0 and ranks % size))):
        raise OpsdError(
            f"{key}={size} with {ranks} ranks of the student",
            "a group of ranks that shards the weights divides the ranks",
            "leave it at -1: all ranks",
        )
