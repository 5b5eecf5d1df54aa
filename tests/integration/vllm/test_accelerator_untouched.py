"""With an accelerator the plugin only adds registry entries: verl's own rollout path is the same with and without it."""

from __future__ import annotations

import json
from pathlib import Path

from forked import Forks

# Stands in for a driver that sees a device: what the plugin does there is decided by this one answer.
SEEN = """
import json, os, sys, torch
torch.cuda.is_available = lambda: True
import torch.distributed as dist
before = dist.init_process_group
import verl
from verl.workers.rollout import base, replica
from verl.plugin.platform import PlatformRegistry
print(json.dumps({
    "adapters": {"/".join(k): str(v) for k, v in base._ROLLOUT_REGISTRY.items()},
    "replicas": {k: f"{v.__module__}.{v.__qualname__}" for k, v in replica.RolloutReplicaRegistry._registry.items()},
    "platforms": sorted(PlatformRegistry.registered_names()),
    "process_group_untouched": dist.init_process_group is before,
    "environment": {k: v for k, v in os.environ.items() if k.startswith(("VERL_", "VLLM_")) and k != "VERL_USE_EXTERNAL_PLUGINS"},
    "finders": sorted(type(f).__module__ for f in sys.meta_path if type(f).__module__.startswith("verl_opsd")),
    "plugin": "verl_opsd.plugin" in sys.modules,
}))
"""


def seen(forks: Forks, plugins: str, folder: Path) -> dict:
    (done,) = forks.run(SEEN, [], cwd=folder, env={"VERL_USE_EXTERNAL_PLUGINS": plugins})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_only_entries_of_our_own_names_are_added(forks, tmp_path):
    without, with_plugin = seen(forks, "none", tmp_path), seen(forks, "auto", tmp_path)
    assert not without.pop("plugin") and with_plugin.pop("plugin")
    for registry in ("adapters", "replicas"):
        added = {k: with_plugin[registry].pop(k) for k in set(with_plugin[registry]) - set(without[registry])}
        assert added and all(k.startswith("opsd_") for k in added), added
    # Our only import hook waits for modules that hold registries; no distribution is renamed and no platform added.
    assert with_plugin.pop("finders") == ["verl_opsd.plugin"] and without.pop("finders") == []
    assert with_plugin == without
    assert with_plugin["process_group_untouched"] and "cpu" not in with_plugin["platforms"]
