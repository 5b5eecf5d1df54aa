"""Whether the processes that episodes run in are still there. verl starts an episode and never looks again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from verl_opsd.errors import OpsdError


class ActorWatch:
    """Finds Ray actors that have died, without waiting for those that are busy.

    Args:
        actors: handles.
        what: what they are, for the error.
    """

    def __init__(self, actors: Sequence[Any], what: str):
        self._actors, self._what = list(actors), what
        self._pings: list[Any] = [a.__ray_ready__.remote() for a in self._actors]

    def require(self) -> None:
        """
        Raises:
            OpsdError: an actor has died since this was called last, or before.
        """
        for i, actor in enumerate(self._actors):
            if not ray.wait([self._pings[i]], timeout=0)[0]:
                continue  # busy, or not started yet
            try:
                ray.get(self._pings[i])
            except ray.exceptions.RayActorError as error:
                raise OpsdError(
                    f"{self._what} {i} has died: {str(error).splitlines()[0]}",
                    "its unfinished episodes are lost with it, and verl would wait for them for ever",
                    "read the output above and the memory of the host; start again with the same hydra.run.dir to go on from the "
                    "last checkpoint: stored episodes are kept, the round is run again",
                ) from error
            self._pings[i] = actor.__ray_ready__.remote()
