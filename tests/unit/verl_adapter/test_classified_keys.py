"""Every key of verl's composed configuration, and every field of the classes that it is read into, is honoured or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.contradictions import check_verl_keys
from verl_opsd.verl_adapter.ignored import IGNORED, IGNORED_BY_WARM_START, check_ignored
from verl_opsd.verl_adapter.keys import fields_of, leaves, listed_keys, warm_start_keys
from verl_opsd.verl_adapter.sft_config import parse

MODEL = {
    "path", "use_shm", "external_lib", "override_config.attn_implementation", "enable_gradient_checkpointing",
    "enable_activation_offload", "use_remove_padding", "lora_rank", "lora_alpha", "target_modules", "exclude_modules",
    "lora_adapter_path", "use_liger",
}  # fmt: skip
ENGINE = {
    "param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "fsdp_size", "forward_prefetch", "model_dtype",
    "mixed_precision.param_dtype", "mixed_precision.reduce_dtype", "seed", "full_determinism", "ulysses_sequence_parallel_size",
    "use_no_sync_for_gradient_accumulation", "pad_to_length", "pad_to_length_bucket",
}  # fmt: skip
OPTIM = {
    "optimizer", "optimizer_impl", "lr", "lr_warmup_steps_ratio", "lr_warmup_steps", "weight_decay", "betas", "clip_grad",
    "min_lr_ratio", "num_cycles", "lr_scheduler_type", "zero_indexed_step", "override_optimizer_config",
}  # fmt: skip
CHECKPOINT = {"save_contents", "load_contents", "save_lora_only"}


def below(section: str, keys: set[str]) -> set[str]:
    return {f"{section}.{k}" for k in keys}


#: What a warm start does as the key says; "profiler" is verl's, whole.
WARM_START = {
    *below("model", MODEL), *below("engine", ENGINE), *below("optim", OPTIM), *below("checkpoint", CHECKPOINT),
    *below("data", {"train_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu", "use_dynamic_bsz", "num_workers"}),
    *below("trainer", {"default_hdfs_dir", "project_name", "experiment_name", "logger", "save_freq", "test_freq", "max_ckpt_to_keep"}),
    "trainer.profile_interval",
}  # fmt: skip
ACTOR = {
    "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
    "ulysses_sequence_parallel_size", "pad_to_length",
}  # fmt: skip
#: The same of distillation's student.
STUDENT = {
    *below("actor_rollout_ref.model", MODEL), *below("actor_rollout_ref.actor", ACTOR),
    *below("actor_rollout_ref.actor.fsdp_config", ENGINE), *below("actor_rollout_ref.actor.optim", OPTIM),
    *below("actor_rollout_ref.actor.checkpoint", CHECKPOINT),
}  # fmt: skip


@pytest.fixture(scope="module")
def composed() -> Iterator[dict[str, Any]]:
    from hydra import compose, initialize_config_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=opd"])
        patch.setenv("OPSD_RUN_DIR", "/run")
        patch.setenv("OPSD_RAY_TMP", "/ray")
        import verl  # noqa: F401

        with initialize_config_module("verl.trainer.config", version_base=None):
            yield {
                "warm_start": compose("sft_trainer_engine", ["+recipe=warm_start", "sft_scale=local", "corpus=C"]),
                "opd": compose("ppo_trainer", ["+recipe=opd", "scale=local"]),
            }


def every_key(node: dict[str, Any], where: str = "") -> dict[str, Any]:
    """All leaves with their values, and None for fields of a section's class that the section doesn't list."""
    found: dict[str, Any] = dict.fromkeys(f"{where}{f}" for f in fields_of(node.get("_target_")) - node.keys())
    for key, value in node.items():
        found |= every_key(value, f"{where}{key}.") if isinstance(value, dict) else {f"{where}{key}": value}
    return found


def another(value: Any) -> Any:
    """A value of the same kind, as far as it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, "x"] if isinstance(value, list) else 7 if value is None or "${" in value else f"{value}x"


def not_refused(config: Any, keys: dict[str, Any], *checks: Callable[[Any], object]) -> set[str]:
    left = set()
    for key, value in keys.items():
        changed = config.copy()
        OmegaConf.update(changed, key, another(value), force_add=True)
        for check in checks:
            try:
                check(changed)
            except OpsdError:
                break
        else:
            left.add(key)
    return left


def test_a_warm_start_refuses_every_key_of_verl_that_it_does_not_honour(composed):
    config = composed["warm_start"]
    plain: Any = OmegaConf.to_container(config)
    keys = {k: v for k, v in every_key(plain).items() if k.split(".")[0] not in ("opsd", "corpus", "profiler")}
    keys.pop("engine.sft")  # a section as a whole: test_warm_start_rules
    assert keys.keys() >= leaves(warm_start_keys(), "").keys() - leaves(warm_start_keys()["profiler"], "profiler").keys()
    assert keys.keys() >= WARM_START
    rest = {k: v for k, v in keys.items() if k not in WARM_START}
    assert not_refused(config, rest, lambda c: check_ignored(c, IGNORED_BY_WARM_START, warm_start_keys()), parse) == set()
    parse(config)


def test_distillation_refuses_every_key_of_its_student_that_it_does_not_honour(composed):
    config = composed["opd"]
    opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
    section: Any = {k: v for k, v in OmegaConf.to_container(config.actor_rollout_ref).items() if k != "rollout"}
    keys = {k: v for k, v in every_key({"actor_rollout_ref": section}).items() if ".profiler" not in k}
    listed = leaves({k: v for k, v in listed_keys()["actor_rollout_ref"].items() if k != "rollout"}, "actor_rollout_ref")
    assert keys.keys() >= {k for k in listed if ".profiler" not in k} and keys.keys() >= STUDENT
    rest = {k: v for k, v in keys.items() if k not in STUDENT}
    ignored = {k: v for k, v in IGNORED.items() if k.startswith("actor_rollout_ref.")}
    left = not_refused(OmegaConf.masked_copy(config, ["actor_rollout_ref"]), rest, lambda c: check_ignored(c, ignored))
    assert not_refused(config, {k: rest[k] for k in left}, lambda c: check_verl_keys(c, opsd)) == set()


@pytest.mark.parametrize(
    ("ignored", "honoured", "reference"),
    [(IGNORED, STUDENT, listed_keys), (IGNORED_BY_WARM_START, WARM_START, warm_start_keys)],
    ids=["opd", "warm_start"],
)
def test_no_key_is_both(ignored, honoured, reference):
    assert not {k for k in honoured for i in ignored if k == i or k.startswith(f"{i}.")}
    assert all(way_out.strip() for way_out in ignored.values())
