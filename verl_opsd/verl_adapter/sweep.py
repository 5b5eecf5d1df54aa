"""A Hydra multirun: every job is composed and checked, once, before the first one starts."""

from __future__ import annotations

import json

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.launch import Launch, check_run, plain_config


def key_of(config: DictConfig) -> str:
    """What tells one job's configuration from another's; the run directory is not in it."""
    return json.dumps(plain_config(config), sort_keys=True)


def check_multirun(config: DictConfig, config_name: str) -> dict[str, Launch]:
    """Composes and checks every job of Hydra's basic sweeper; other sweepers choose their values later.

    Returns:
        What was found, by :func:`key_of`; nothing for another sweeper.

    Raises:
        OpsdError: a value that Hydra can't read; or naming the job's own overrides, a check of its own; or its contract differs from
            the first job's in a field that is not declared.
    """
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return {}
    jobs, swept = _jobs(config)
    found: dict[str, Launch] = {}
    first: EvalContract | None = None
    folders: dict[str, int] = {}
    for number, job in enumerate(jobs):
        own = " ".join(w for w in job if w.split("=")[0] in swept)
        try:
            composed = compose(config_name, job, return_hydra_config=True)
            launch = check_run(composed)
            if launch.opsd.dry_run:
                rule, way_out = "a dry run estimates one job", "give each key one value, without -m"
                raise OpsdError("opsd.dry_run=true in a sweep", rule, way_out)
            first = first or launch.contract
            launch.contract.require_same(first, "job 0", launch.opsd.varies, mine="this job")
            _require_own_folder(composed, folders, number)
            found[key_of(composed)] = launch
        except OpsdError as error:
            raise OpsdError(f"job {number} of {len(jobs)} ({own}): {error.what}", error.rule, error.way_out) from error
        except HydraException as error:
            raise _hydra(f"job {number} of {len(jobs)} ({own})", error) from error
    return found


def _jobs(config: DictConfig) -> tuple[list[list[str]], set[str]]:
    """The overrides of each job, as Hydra's sweeper makes them, and the keys that have several values."""
    given = [f"{k}={v}" for k, v in (config.hydra.sweeper.params or {}).items()] + list(config.hydra.overrides.task)
    try:
        overrides = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(given)
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
    except HydraException as error:
        raise _hydra("-m", error) from error
    return jobs, {o.get_key_element() for o in overrides if o.is_sweep_override()}


def _require_own_folder(config: DictConfig, folders: dict[str, int], number: int) -> None:
    """No two jobs write checkpoints to one place, where the second would go on from the first one's.

    Args:
        folders: where earlier jobs write theirs; this one's is added.
    """
    raw = OmegaConf.to_container(config.trainer, resolve=False)["default_local_dir"]  # type: ignore[index, call-overload]
    if "${" not in str(raw) and raw in folders:
        raise OpsdError(
            f"trainer.default_local_dir={raw}, as in job {folders[raw]}",
            "a job resumes from the checkpoints that it finds",
            "leave it out: each job's checkpoints are in its own directory",
        )
    folders[str(raw)] = number


def _hydra(where: str, error: Exception) -> OpsdError:
    text = " ".join(str(error).split())
    return OpsdError(f"{where}: {text}", "every job of a sweep composes", "correct the value that Hydra names")
