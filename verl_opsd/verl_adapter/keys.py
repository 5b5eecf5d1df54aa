"""Refuses keys that neither verl nor this project reads. Hydra itself does so only for overrides without ``+``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.errors import OpsdError

#: Keys that verl 0.9.1's PPO trainer reads and doesn't list in its own configuration.
UNLISTED = {
    "data": {"cache_dir", "chat_template_func", "filter_prompts", "need_tools_kwargs"},
    "reward": {"reward_kwargs", "timeout"},
    "algorithm": {"gdpo_reward_keys"},
    "trainer": {"remove_previous_ckpt_in_save"},
}
#: Sections that are handed on to something else, which checks its own keys.
OPEN = ("kwargs", "override_config", "ray_init", "runtime_env")
#: Top-level sections that are not in verl's list: ours, Hydra's, and the group that chooses the engine's configuration.
OWN = {"opsd", "hydra", "model_engine"}
#: Attentions that a model can be trained with.
ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", "ulysses_sdpa")


def check_keys(
    config: DictConfig, reference: dict[Any, Any] | None = None, unlisted: Mapping[str, set[str]] = UNLISTED
) -> None:
    """Compares a composed configuration with the list of all keys that verl ships.

    Args:
        reference: that list; None: of the PPO trainer. unlisted: keys that the trainer reads beside it.

    A top-level key of a recipe (``corpus``) is known when a value of the ``opsd`` section refers to it.

    Raises:
        OpsdError: unknown keys, each with the nearest known one.
    """
    if reference is None:
        reference = listed_keys()
    given = _raw(config)
    references = str(given.get("opsd"))
    own = OWN | {k for k in given if f"${{{k}}}" in references}
    unknown: dict[str, str] = {}
    _compare({k: v for k, v in given.items() if k not in own}, reference, "", unknown, unlisted)
    if unknown:
        raise OpsdError(
            "unknown key " + ", ".join(f"{key}{hint}" for key, hint in sorted(unknown.items())),
            "every key is one that verl or this project reads; an unknown one would be ignored in silence",
            "correct the spelling or remove the key",
        )


def check_texts(config: DictConfig, reference: dict[Any, Any] | None = None) -> None:
    """Compares the kinds of values with verl's list, as :func:`check_keys` does the keys; for what has no check of its own.

    Raises:
        OpsdError: something else where verl has a number, or true and false.
    """
    _compare_kinds(_raw(config), listed_keys() if reference is None else reference, "")


def _compare_kinds(given: dict[Any, Any], reference: dict[Any, Any], where: str) -> None:
    for key, value in given.items():
        usual = reference.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            _compare_kinds(value, usual, f"{where}{key}.")
        elif isinstance(value, str) and "${" in value:
            continue
        elif isinstance(usual, (int, float)) and (
            isinstance(value, (str, list, dict)) or isinstance(usual, bool) != isinstance(value, bool)
        ):
            kind = "true or false" if isinstance(usual, bool) else "a number"
            raise OpsdError(f"{where}{key}={value}", f"{where}{key} is {kind}", "correct the value")


@functools.cache
def listed_keys() -> dict[Any, Any]:
    """verl's list of all keys of its PPO trainer, with their defaults; references stay as they are written."""
    listed = importlib.resources.files("verl.trainer.config") / "_generated_ppo_trainer.yaml"
    return dict(_raw(OmegaConf.create(listed.read_text())))


@functools.cache
def warm_start_keys() -> dict[Any, Any]:
    """verl's whole configuration of its SFT trainer, as its files say."""
    root = importlib.resources.files("verl.trainer.config")
    main: Any = OmegaConf.to_container(OmegaConf.create((root / "sft_trainer_engine.yaml").read_text()))
    defaults = main.pop("defaults")
    for entry in defaults:
        if isinstance(entry, dict):
            ((group, name),) = entry.items()
            folder, _, key = group.partition("@")
            main[key] = OmegaConf.to_container(OmegaConf.create((root / folder / f"{name}.yaml").read_text()))
            main[key].pop("defaults", None)
    return main


def leaves(value: Any, where: str) -> dict[str, Any]:
    """Values by dotted key, of everything below ``where``; "": the top."""
    if not isinstance(value, dict):
        return {where: value}
    return {k: v for name, below in value.items() for k, v in leaves(below, f"{where}.{name}" if where else str(name)).items()}


def _raw(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def _compare(
    given: dict[Any, Any], reference: dict[Any, Any], where: str, unknown: dict[str, str], unlisted: Mapping[str, set[str]]
) -> None:
    known = (
        set(reference) | unlisted.get(where, set()) | fields_of(reference.get("_target_")) | fields_of(given.get("_target_"))
    )
    for key, value in given.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), map(str, known), 1)
            unknown[path] = f" (did you mean {near[0]}?)" if near else ""
            continue
        below = reference.get(key)
        if isinstance(below, dict) and below and not (isinstance(value, dict) or (isinstance(value, str) and "${" in value)):
            raise OpsdError(
                f"{path}={value}", f"{path} is a group of keys", f"set one below it, such as {path}.{next(iter(below))}"
            )
        if isinstance(value, dict) and isinstance(below, dict) and below and not str(key).endswith(OPEN):
            _compare(value, below, path, unknown, unlisted)


def fields_of(target: Any) -> set[str]:
    """Fields of the dataclass that verl makes of a section; it may have more than verl's YAML lists."""
    if not isinstance(target, str):
        return set()
    from hydra.utils import get_object

    try:
        found = get_object(target)
    except ImportError as error:
        raise OpsdError(
            f"_target_={target}: {str(error).splitlines()[0]}", "it is the class that a section is read into", "leave it out"
        ) from error
    return {f.name for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
