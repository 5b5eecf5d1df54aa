"""Whether the processes that a run consists of are still there. verl starts an episode and never looks again; a rank that dies in the middle
of an update shows itself as another rank's broken exchange, or not at all."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from verl_opsd.errors import OpsdError

#: What to do after a death.
WAY_OUT = (
    "read the output above and the memory of the host and its devices; start again with the same hydra.run.dir to go on from the last "
    "checkpoint: stored episodes are kept, the round is run again"
)


#: Seconds in which Ray learns that a process has died, after another one has seen it.
DEATH_S = 10.0
#: Seconds between two looks of :meth:`ActorWatch.interrupting`.
LOOK_S = 2.0


def queue_actors() -> list[Any]:
    """Handles of the processes of TransferQueue, which hold the rows of a round: its controller, then its storage units. A client
    waits minutes for a unit that has died, and for ever for the controller."""
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    backend = ray.get(controller.get_config.remote()).backend
    return [controller, *(ray.get_actor(name) for name in backend[backend.storage_backend].get("zmq_info") or ())]


class ActorWatch:
    """Finds Ray actors that have died, without waiting for those that are busy.

    Args:
        actors: handles.
        what: what they are, for the error.
        rule: what is lost with one of them, for the error.
    """

    def __init__(self, actors: Sequence[Any], what: str, rule: str):
        self._actors, self._what, self._rule = list(actors), what, rule
        self._pings: list[Any] = [a.__ray_ready__.remote() for a in self._actors]

    def require_alive(self, doing: str = "", wait_s: float = 0.0) -> None:
        """
        Args:
            doing: what the run was doing, for the error.
            wait_s: seconds in which a death may show itself.

        Raises:
            OpsdError: an actor has died since this was called last, or before.
        """
        until = time.monotonic() + wait_s
        while True:
            for i, actor in enumerate(self._actors):
                if not ray.wait([self._pings[i]], timeout=0)[0]:
                    continue  # busy, or not started yet
                try:
                    ray.get(self._pings[i])
                except ray.exceptions.RayActorError as error:
                    raise OpsdError(
                        f"{self._what} {i} has died{doing}: {str(error).splitlines()[0]}", self._rule, WAY_OUT
                    ) from error
                self._pings[i] = actor.__ray_ready__.remote()
            if time.monotonic() >= until:
                return
            time.sleep(0.2)

    @contextmanager
    def naming(self, doing: Callable[[], str], wait_s: float = DEATH_S) -> Iterator[None]:
        """An error of the body that a death has caused, as the death: where another actor's broken exchange was reported first, too.

        Args:
            doing, wait_s: as in :meth:`require_alive`.

        Raises:
            OpsdError: an actor has died; errors of this kind from the body, and those without a death, come as they are.
        """
        try:
            yield
        except OpsdError:
            raise
        except Exception:
            self.require_alive(doing(), wait_s)
            raise

    @contextmanager
    def interrupting(self, doing: Callable[[], str], wait_s: float = DEATH_S) -> Iterator[None]:
        """A body that may wait for a dead actor for ever: a thread looks every :data:`LOOK_S` seconds, and a death ends the wait. Main
        thread only. The wait is ended by a signal (SIGUSR2), since ``ray.get`` lets go for KeyboardInterrupt alone.

        Args:
            doing, wait_s: as in :meth:`naming`.

        Raises:
            OpsdError: an actor has died; otherwise what the body raises.
        """
        found: list[OpsdError] = []
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_S):
                try:
                    self.require_alive(doing())
                except OpsdError as error:
                    found.append(error)
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)  # type: ignore[arg-type]
                    return

        def interrupt(*_: object) -> None:
            if not ended.is_set():
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR2, interrupt)
        thread = threading.Thread(target=look, daemon=True, name="actor-watch")
        thread.start()
        try:
            try:
                with self.naming(doing, wait_s):
                    yield
            finally:
                ended.set()
        except KeyboardInterrupt:
            if found:
                raise found[0] from None
            raise
        finally:
            thread.join()
            signal.signal(signal.SIGUSR2, before)
