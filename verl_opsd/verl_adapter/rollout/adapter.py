"""The trainer's side of publishing: sends the student's weights from its rank to that rank's embedded server."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.rollout.replica import server_actor_name
from verl_opsd.verl_adapter.rollout.server import check_rollout_config


class EmbeddedAdapter(BaseRollout):
    """Lives in every rank of the student. Each rank has its own replica, so each rank publishes.

    Args:
        config, model_config, device_mesh: verl's.
        replica_rank: the replica to publish to; -1: the replica of this process's RANK.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh,
        replica_rank: int = -1,
    ):
        super().__init__(config, model_config, device_mesh)
        check_rollout_config(self.config)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._server: ActorHandle | None = None

    @property
    def server(self) -> ActorHandle:
        """The replica's actor; looked up late, because servers start after the trainer's ranks."""
        if self._server is None:
            self._server = ray.get_actor(server_actor_name(self.config.name, self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Publishes adapter tensors (``peft_config`` given and the base already there) or full weights by name.

        The generator is drained to its end before anything is sent: gathering a shard is a collective of all ranks.

        Raises:
            OpsdError: another wire format, or the server refused the weights.
        """
        if wire_format != "named_tensors":
            raise OpsdError(
                f"weights as {wire_format}",
                "the embedded server takes named tensors",
                "set actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
            )
        tensors = {name: t.detach().to("cpu", copy=True) async for name, t in ensure_async_iterator(weights)}
        if peft_config is not None and base_sync_done:
            await self.server.load_adapter.remote(tensors, peft_config, global_steps)
        else:
            await self.server.load_full.remote(tensors, global_steps)
