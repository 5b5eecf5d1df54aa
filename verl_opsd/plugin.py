"""verl's entry point: imported by every process that imports verl, so it imports nothing heavy.

Registrations happen in post-import hooks: when verl imports the module that holds a registry, our entry is added. A failure
here stops the process with an error, because verl itself logs a broken plugin at DEBUG level and goes on without it.
"""

from __future__ import annotations

import difflib
import functools
import importlib.abc
import importlib.util
import os
import sys
import traceback
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_opsd import SUPPORTED_VERL
from verl_opsd.paths import cache_dir

#: Starts of the names of variables that processes of a run need, where Ray does not inherit them from the run's own process.
FORWARDED = ("OPSD_", "VERL_", "HF_", "VLLM_", "NCCL_", "WANDB_", "OMP_NUM_THREADS", "TMPDIR", "PYTHON", "GLIBC_TUNABLES")

_HOOKS: dict[str, list[Callable[[ModuleType], None]]] = {}


def register_resolvers() -> None:
    """OmegaConf resolvers used by our configs.

    ``opsd_scale``: name of the scale that fits the hardware. ``opsd_student``: folder of an embedded student. ``opsd_slots``: device
    slots of a run without accelerators, student ranks plus teacher workers. ``opsd_student_devices``: devices of a scale that teacher
    workers leave to the student. ``opsd_teacher_devices``: those that a device teacher takes of a scale. ``opsd_round``: the least
    multiple of the student's ranks that is not below a number of pairs. ``opsd_threads``: threads of a process when so many share this host's
    cores. ``opsd_ray_tmp``: a new short directory for Ray's session, removed after the run. ``opsd_start``: time of the start, the same
    for all ranks that one torchrun has started. ``opsd_port``: torchrun's port, or a free one. ``opsd_ray_env``: Ray's runtime_env with the
    variables of this process that start with :data:`FORWARDED`.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("opsd_scale", _scale_from_hardware, replace=True)
    OmegaConf.register_new_resolver("opsd_student", _student_path, replace=True)
    OmegaConf.register_new_resolver("opsd_slots", lambda n, teacher: n + _teacher_devices(teacher), replace=True)
    OmegaConf.register_new_resolver("opsd_student_devices", lambda n, teacher: n - _teacher_devices(teacher), replace=True)
    OmegaConf.register_new_resolver("opsd_teacher_devices", _devices_of_a_teacher, replace=True)
    OmegaConf.register_new_resolver("opsd_round", lambda pairs, ranks: -(-pairs // max(1, ranks)) * max(1, ranks), replace=True)
    OmegaConf.register_new_resolver(
        "opsd_threads", lambda processes: max(1, len(os.sched_getaffinity(0)) // processes), replace=True
    )
    OmegaConf.register_new_resolver("opsd_ray_env", _ray_environment, replace=True)
    OmegaConf.register_new_resolver("opsd_start", _start_time, replace=True)
    OmegaConf.register_new_resolver("opsd_port", _port, replace=True)
    OmegaConf.register_new_resolver("opsd_ray_tmp", lambda: f"/tmp/opsd-ray-{uuid.uuid4().hex[:8]}", replace=True)


def _teacher_devices(teacher: Any) -> int:
    """Device slots of the workers of the section ``opsd.teacher``, its members' included."""
    models = list(teacher.members.values()) if teacher.kind == "routed" else [teacher]
    return sum(int(m.get("devices", 1)) for m in models if m.kind == "device")


def _devices_of_a_teacher(scale: str) -> int:
    """Half of the devices that the scale's name ends with, as ``opsd plan`` lays a pair out; 1 where it names none."""
    number = scale.lstrip("abcdefghijklmnopqrstuvwxyz")
    return max(1, int(number) // 2) if number else 1


def _scale_from_hardware() -> str:
    """``local`` without an accelerator, else the largest of gpu1, gpu2, gpu8 that the visible devices carry."""
    import torch

    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "local" if n == 0 else "gpu1" if n == 1 else "gpu2" if n < 8 else "gpu8"


def _ray_environment() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"env_vars": {k: v for k, v in sorted(os.environ.items()) if k.startswith(FORWARDED)}})


@functools.cache
def _start_time() -> str:
    """``YYYY-mm-dd_HH-MM-SS`` at which this process, or the torchrun above it, was started."""
    import time

    import psutil

    process = psutil.Process(os.getppid()) if "LOCAL_RANK" in os.environ and "RANK" in os.environ else psutil.Process()
    return time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(process.create_time()))


@functools.cache
def _port() -> str:
    import socket

    if "MASTER_PORT" in os.environ:
        return os.environ["MASTER_PORT"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def _student_path(kind: str) -> str:
    """Folder of the embedded student ``tiny``, ``warm`` or ``smollm``; what is not shipped is made by the launch checks."""
    if kind == "warm":
        from verl_opsd.models.tiny import WARM

        return str(WARM)
    if kind == "tiny":
        from verl_opsd.models.tiny import tiny_path

        return str(tiny_path(cache_dir() / "models"))
    from verl_opsd.models.smollm import smollm_path

    return str(smollm_path(cache_dir() / "models"))


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls ``callback(module)`` right after ``name`` was imported, or now if it is there already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _HOOKS.setdefault(name, []).append(callback)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of hooked modules; every other import passes through untouched."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _HOOKS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, name: str):
        self._inner, self._name = inner, name

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for callback in _HOOKS.pop(self._name, []):
            _loud(partial(callback, module), f"registering with {self._name}")

    def __getattr__(self, key: str):  # type: ignore[no-untyped-def]
        return getattr(self._inner, key)


def _loud(action: Callable[[], None], what: str) -> None:
    """Runs ``action``; an exception ends the process, since verl would swallow it and run without this plugin."""
    try:
        action()
    except Exception:
        traceback.print_exc()
        raise SystemExit(
            f"verl-opsd: {what} failed (traceback above); nothing was started.\n"
            f"  rule: verl-opsd supports verl {SUPPORTED_VERL} and refuses to run half registered\n"
            "  way out: run `opsd doctor`; VERL_USE_EXTERNAL_PLUGINS=none runs verl without this plugin"
        ) from None


def _register_hydra() -> None:
    """Registers the search path plugin where Hydra's own discovery can't see it (PEP 660 editable installs)."""
    if not any(a.lstrip("+").startswith("recipe=") for a in sys.argv[1:]):
        added = [a for a in sys.argv[1:] if a.startswith("+") and "=" in a]
        near = [a for a in added if difflib.get_close_matches(a.lstrip("+").split("=")[0], ["recipe"], cutoff=0.7)]
        if near:
            raise SystemExit(
                f"error: {near[0]}\n  rule: the group is called recipe; another key would be added and verl's defaults would run\n"
                f"  way out: +recipe={near[0].split('=', 1)[1]}"
            )
        return
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    if any(c.__name__ == "VerlOpsdSearchPathPlugin" for c in Plugins.instance().discover(SearchPathPlugin)):
        return
    path = Path(__file__).resolve().parent.parent / "hydra_plugins" / "verl_opsd_search_path" / "__init__.py"
    if not path.is_file():
        raise RuntimeError(
            f"`+recipe=` can't be resolved: Hydra does not see hydra_plugins.verl_opsd_search_path and {path} is missing; "
            "install with `pip install .` or `pip install -e . --config-settings editable_mode=compat`"
        )
    spec = importlib.util.spec_from_file_location("hydra_plugins.verl_opsd_search_path", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    Plugins.instance().register(module.VerlOpsdSearchPathPlugin)


def _register() -> None:
    from importlib.metadata import version

    found = version("verl")
    if found != SUPPORTED_VERL:
        raise RuntimeError(f"verl {found} is installed; this version of verl-opsd hangs on the seams of {SUPPORTED_VERL}")
    register_resolvers()
    _register_hydra()

    import torch

    if not torch.cuda.is_available():
        from verl_opsd.verl_adapter import platform

        platform.register()

    def rollout_base(module: ModuleType) -> None:
        from verl_opsd.verl_adapter.rollout import register_rollout

        register_rollout(module)

    def replica(module: ModuleType) -> None:
        from verl_opsd.verl_adapter.rollout import register_replica

        register_replica(module)

    def trainer(module: ModuleType) -> None:
        import verl_opsd.verl_adapter.trainer  # noqa: F401

    def agent_loop(module: ModuleType) -> None:
        # by name: importing the class here would import it in the middle of the import of a module that it needs
        target = "verl_opsd.verl_adapter.agent_loop.OpsdPairLoop"
        module.agent_loop._agent_loop_registry["opsd_pair"] = {"_target_": target}

    def reward_managers(module: ModuleType) -> None:
        import verl_opsd.verl_adapter.reward_manager  # noqa: F401

    after_import("verl.experimental.reward_loop.reward_manager", reward_managers)
    after_import("verl.workers.rollout.base", rollout_base)
    after_import("verl.workers.rollout.replica", replica)
    after_import("verl.trainer.ppo.v1", trainer)
    after_import("verl.experimental.agent_loop", agent_loop)


_loud(_register, "loading the plugin")
