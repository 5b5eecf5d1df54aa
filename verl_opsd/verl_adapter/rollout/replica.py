"""verl's handle on one embedded server: starts the actor on the node of the replica's trainer rank."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutReplica

from verl_opsd.verl_adapter.rollout.server import EmbeddedServer


def server_actor_name(backend: str, replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Ray name of a replica's server, e.g. ``opsd_embedded_server_0``; ``kind`` is '', 'teacher_' or 'reward_'."""
    return f"{backend}_server_{kind}{replica_rank}{suffix}"


class EmbeddedReplica(RolloutReplica):
    """``rollout.name=opsd_embedded``: one server process a replica, one replica a trainer rank."""

    server_class: type[EmbeddedServer] = EmbeddedServer

    async def launch_servers(self) -> None:
        """Starts the server beside the replica's first worker.

        Raises:
            ray.exceptions.RayActorError: the server could not start; its cause carries the `OpsdError`.
        """
        kind = "teacher_" if self.is_teacher_model else "reward_" if self.is_reward_model else ""
        node_id = await self.workers[0].__ray_call__.remote(lambda worker: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(self.server_class)
            .options(
                name=server_actor_name(self.config.name, self.replica_rank, kind, self.name_suffix),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self.config, self.model_config, self.replica_rank)
        )
        self.servers = [server]
        self._server_address = await server.get_address.remote()
        self._server_handle = server

    async def sleep(self) -> None:
        """As verl's vLLM replica: requests end before memory is released."""
        await self.servers[0].wait_for_requests_to_drain.remote()
        await super().sleep()
