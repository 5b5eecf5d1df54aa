"""The CPU platform: complete for what verl calls, absent where an accelerator is present."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path

import pytest
import torch

from verl_opsd.verl_adapter import cpu_device, platform


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cpu:gloo,cpu:gloo", "cpu:gloo"),
        ("cpu:gloo, cpu:gloo", "cpu:gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("gloo", "gloo"),
        (None, None),
    ],
)
def test_backend_string(given, expected):
    assert platform.dedupe_backend(given) == expected


def test_device_module_has_all_that_verl_calls():
    """Every ``get_torch_device().<name>`` in verl's own code for training and rollout."""
    root = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    used = set()
    for file in root.rglob("*.py"):
        used |= set(re.findall(r"get_torch_device\(\)\.(\w+)", file.read_text()))
    assert {"empty_cache", "synchronize", "memory_allocated"} <= used
    assert sorted(name for name in used if not hasattr(cpu_device, name)) == []


FRESH = """
import torch, torch.distributed as dist
stock = dist.init_process_group
from verl_opsd.verl_adapter import platform
{prepare}
assert platform.register() is platform.register() is {registered}
from verl.plugin.platform import PlatformRegistry, get_platform
{check}
"""
CPU = """
p = get_platform()
assert p.device_name == "cpu" and p.current_device() == torch.device("cpu") and p.ray_resource_name() == "GPU"
assert p.communication_backend_name() == "gloo" and not p.is_ipc_supported()
from verl.utils.distributed import initialize_global_process_group_ray
initialize_global_process_group_ray()
t = torch.ones(3)
dist.all_reduce(t)
assert dist.get_world_size() == 1 and t.tolist() == [1, 1, 1]
assert dist.init_process_group.opsd_original is stock
"""
ACCELERATOR = """
assert "cpu" not in PlatformRegistry.registered_names() and dist.init_process_group is stock
import os
assert "VERL_ENGINE_DEVICE" not in os.environ
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without an accelerator")
@pytest.mark.parametrize(
    ("prepare", "registered", "check"),
    [
        ("", True, CPU),
        ("torch.cuda.is_available = lambda: True", False, ACCELERATOR),
        (
            # A Ray actor without a device of its own, on a machine that has one.
            "from verl.plugin.platform import PlatformRegistry as R\n"
            "R.get('nvidia').is_platform_available = lambda self, use_smi_check=False: use_smi_check",
            False,
            ACCELERATOR,
        ),
    ],
    ids=["cpu", "cuda", "cuda hidden from this process"],
)
def test_registration_in_a_fresh_process(prepare, registered, check, forks, monkeypatch, tmp_path):
    for name in ("VERL_ENGINE_DEVICE", "VERL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {"VERL_USE_EXTERNAL_PLUGINS": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (done,) = forks.run(FRESH.format(prepare=prepare, registered=registered, check=check), [], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
