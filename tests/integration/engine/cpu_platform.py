"""A verl platform for tests without an accelerator, where no installed plugin brings one. Import it before verl's engines."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
import verl  # noqa: F401  (runs installed plugins first)
from verl.plugin.platform import PlatformBase, PlatformRegistry

CPU = torch.device("cpu")


def _module() -> Any:
    m = types.ModuleType("torch_cpu")

    def nothing(*_: Any, **__: Any) -> None:
        return None

    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed"):
        setattr(m, name, nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(m, name, lambda *_: 0)
    m.is_available = lambda: True
    m.current_device = lambda: CPU
    m.device_count = lambda: 1
    m.mem_get_info = lambda *_: (1, 1)
    m.get_device_name = lambda *_: "cpu"
    m.get_device_capability = lambda *_: (None, None)
    m.get_rng_state, m.set_rng_state = torch.get_rng_state, torch.set_rng_state
    return m


class PlatformCPU(PlatformBase):
    """What verl asks of a device, answered for the host."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> Any:
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> Any:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


if "cpu" not in PlatformRegistry.registered_names():
    PlatformRegistry.register("cpu")(PlatformCPU)
