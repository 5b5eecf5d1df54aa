"""What verl expects of a device module (it is written against ``torch.cuda``), for the host processor.

verl calls these through ``get_torch_device()``. Memory figures are bytes: the process's resident set, the host's
memory. Calls that only make sense with a device queue (synchronize, empty_cache, ...) have nothing to do here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Event, get_rng_state, manual_seed, set_rng_state
from torch.cpu import Stream, current_stream, stream

__all__ = ["Event", "Stream", "current_stream", "get_rng_state", "manual_seed", "set_rng_state", "stream"]

DEVICE = torch.device("cpu")
manual_seed_all = manual_seed


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> torch.device:
    return DEVICE


def get_device_name(device: Any = None) -> str:
    return "cpu"


def get_device_capability(device: Any = None) -> tuple[None, None]:
    return None, None


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="cpu", total_memory=psutil.virtual_memory().total)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes of the host."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(device: Any = None) -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    return {}


def _nothing_to_do(*args: Any, **kwargs: Any) -> None:
    """No device queue and no caching allocator exist on the host."""


set_device = synchronize = empty_cache = ipc_collect = _nothing_to_do
reset_peak_memory_stats = reset_max_memory_allocated = set_per_process_memory_fraction = _nothing_to_do
