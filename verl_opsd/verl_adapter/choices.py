"""What was chosen on the command line: the entry point, files of groups that are no choices, and arms that were taken apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.paths import conf_dir
from verl_opsd.verl_adapter.keys import leaves

#: verl's entry points that a recipe of this project runs under, by the configuration that each composes.
COMMANDS = {"ppo_trainer": "verl.trainer.main_ppo", "sft_trainer_engine": "verl.trainer.sft_trainer"}
#: The key that says which file of a group was composed.
IDENTITY = {"brief": "name", "teacher": "kind"}


def require_command(config: DictConfig, wanted: str) -> None:
    """The recipe runs under the entry point that it was written for.

    Args:
        wanted: name of the configuration that this entry point composes.

    Raises:
        OpsdError: another one; names the command to use.
    """
    recipe = OmegaConf.select(config, "hydra.runtime.choices.recipe", default=OmegaConf.select(config, "opsd.recipe"))
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = "" if spec is None else spec.name
    name = OmegaConf.select(config, "hydra.job.config_name", default=wanted)
    strange = module.startswith("verl.trainer.") and module != COMMANDS[wanted]
    if name != wanted or strange:
        raise OpsdError(
            f"+recipe={recipe} with {module if strange else COMMANDS.get(name, f'the configuration {name}')}",
            "a recipe sets the keys of one entry point of verl's; another one would read none of them",
            f"use `python -m {COMMANDS[wanted]} +recipe={recipe} ...`",
        )


def check_choices(config: DictConfig) -> None:
    """Every chosen file is a choice, and an arm is what its file says.

    Raises:
        OpsdError: a file that only others are built on (``_base``), or an arm whose brief, teacher or keys were set to something else.
    """
    chosen = OmegaConf.select(config, "hydra.runtime.choices") or {}
    groups = {p.name for p in conf_dir().iterdir() if p.is_dir()}
    for group, name in chosen.items():
        if group in groups and str(name).startswith("_"):
            raise OpsdError(
                f"{group}={name}",
                "a file whose name begins with _ holds what the others of its group share, and is no choice",
                f"choose one of {', '.join(_options(group))}; in a sweep {group}=glob(*,exclude=_*)",
            )
    arm = chosen.get("arm")
    if arm is not None:
        _check_arm(config, str(arm), dict(chosen))


def _options(group: str) -> list[str]:
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml") if not p.stem.startswith("_"))


def _check_arm(config: DictConfig, arm: str, chosen: dict[str, Any]) -> None:
    groups, values = _contents(conf_dir() / "arm" / f"{arm}.yaml")
    keys = {f"opsd.{group}.{IDENTITY[group]}": group for group in groups}
    for key, own in (values | {key: groups[group] for key, group in keys.items()}).items():
        given = OmegaConf.select(config, key)
        if given == own:
            continue
        group = keys.get(key)
        name = group if group is not None and chosen.get(group) == given else key
        raise OpsdError(
            f"+arm={arm} with {name}={given}",
            f"the arm {arm} is {key}={own}: the run would be called something that it is not",
            f"leave {name} out, or the arm",
        )


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Groups that an arm chooses, and the keys that it sets, with those of the files it is built on."""
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            ((group, name),) = entry.items()
            groups[group.removeprefix("override /")] = name
        elif entry != "_self_":
            below = _contents(path.with_name(f"{entry}.yaml"))
            groups, values = groups | below[0], values | below[1]
    return groups, values | leaves(content, "")
