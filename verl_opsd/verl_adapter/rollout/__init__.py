"""Embedded rollout servers behind verl's replica interface: registration only, nothing heavy is imported here.

The plugin calls `register_replica` and `register_rollout` right after verl imported the modules they take.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

EMBEDDED = "opsd_embedded"
SCRIPTED = "opsd_scripted"
OWN_BACKENDS = (EMBEDDED, SCRIPTED)


def register_replica(module: ModuleType) -> None:
    """Call after ``verl.workers.rollout.replica`` was imported: adds the two replica classes by lazy loaders."""
    module.RolloutReplicaRegistry.register(EMBEDDED, _embedded_replica)
    module.RolloutReplicaRegistry.register(SCRIPTED, _scripted_replica)


def register_rollout(module: ModuleType) -> None:
    """Call after ``verl.workers.rollout.base`` was imported: adds the trainer's side of both backends."""
    adapter = "verl_opsd.verl_adapter.rollout.adapter.EmbeddedAdapter"
    module._ROLLOUT_REGISTRY[(EMBEDDED, "async")] = adapter
    module._ROLLOUT_REGISTRY[(SCRIPTED, "async")] = adapter


def _embedded_replica() -> type[Any]:
    from verl_opsd.verl_adapter.rollout.replica import EmbeddedReplica

    return EmbeddedReplica


def _scripted_replica() -> type[Any]:
    from verl_opsd.verl_adapter.rollout.scripted import ScriptedReplica

    return ScriptedReplica
