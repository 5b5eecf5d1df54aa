"""Runs an `EngineCore` in a thread of its own and hands results out as futures.

The model works in this thread only. Besides requests it takes commands, which run between two steps: at once, when no
request is running (weights), or when none is left (drain). The thread sleeps while there is nothing to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore, Reply, Request

T = TypeVar("T")
When = Literal["now", "idle", "drained"]


class EngineThread:
    """Thread-safe face of one engine. A crash of the engine fails everything in flight and everything after it."""

    def __init__(self, core: EngineCore, name: str = "opsd-engine"):
        self._core = core
        self._wake = threading.Condition()
        self._requests: deque[tuple[Request, Future[Reply]]] = deque()
        self._commands: deque[tuple[When, Callable[[EngineCore], Any], Future[Any]]] = deque()
        self._in_flight: dict[str, Future[Reply]] = {}
        self._stopped = False
        self._fault: InfraFault | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> Future[Reply]:
        """Queues a request; its own errors (too long, over budget) arrive through the future."""
        future: Future[Reply] = _future()
        with self._wake:
            if self._refuse(future):
                return future
            self._requests.append((request, future))
            self._wake.notify()
        return future

    def call(self, function: Callable[[EngineCore], T], when: When = "now") -> Future[T]:
        """Runs ``function(core)`` in the engine's thread.

        ``now``: before the next step. ``idle``: when no request is running; new ones wait until it is done.
        ``drained``: when no request is running or waiting.
        """
        future: Future[T] = _future()
        with self._wake:
            if self._refuse(future):
                return future
            self._commands.append((when, function, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Stops after the current step; what is in flight fails."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _refuse(self, future: Future[Any]) -> bool:
        if self._fault is None and not self._stopped:
            return False
        future.set_exception(self._fault or _fault("the engine was stopped"))
        return True

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                admit = self._run_commands()
                for outcome in self._core.step(admit=admit) if self._core.unfinished else []:
                    self._deliver(outcome)
        except Exception as e:  # the thread's last words: whoever waits must hear of it
            self._die(_fault(f"the engine died: {type(e).__name__}: {e}"), cause=e)
            raise
        self._die(_fault("the engine was stopped"), cause=None)

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopped or self._requests or self._commands or self._core.unfinished > 0)
            return not self._stopped

    def _take_requests(self) -> None:
        with self._wake:
            taken = list(self._requests)
            self._requests.clear()
        for request, future in taken:
            try:
                self._core.submit(request)
            except OpsdError as e:
                future.set_exception(e)
            else:
                self._in_flight[request.request_id] = future

    def _run_commands(self) -> bool:
        """Runs the commands whose time has come, in order; returns whether waiting requests may start."""
        while True:
            self._take_requests()  # what was sent before a command is there when it runs
            with self._wake:
                if not self._commands:
                    return True
                when, function, future = self._commands[0]
                if when == "idle" and self._core.running:
                    return False
                if when == "drained" and self._core.unfinished:
                    return True
                self._commands.popleft()
            try:
                future.set_result(function(self._core))
            except Exception as e:
                future.set_exception(e)
                if not isinstance(e, OpsdError):
                    raise  # the served model may be half changed

    def _deliver(self, outcome: Reply | tuple[str, OpsdError]) -> None:
        if isinstance(outcome, Reply):
            self._in_flight.pop(outcome.request_id).set_result(outcome)
        else:
            self._in_flight.pop(outcome[0]).set_exception(outcome[1])

    def abort_all(self) -> Future[list[str]]:
        """Ends every request in flight with what it has; the future holds their ids."""

        def abort(core: EngineCore) -> list[str]:
            replies = core.abort_all()
            for reply in replies:
                self._deliver(reply)
            return [r.request_id for r in replies]

        return self.call(abort)

    def _die(self, fault: InfraFault, cause: BaseException | None) -> None:
        fault.__cause__ = cause
        with self._wake:
            self._fault = fault
            left = [f for _, f in self._requests] + [f for *_, f in self._commands] + list(self._in_flight.values())
            self._requests.clear()
            self._commands.clear()
        for future in left:
            if not future.done():
                future.set_exception(fault)


def _future() -> Future[Any]:
    """A future that its waiter can't cancel: the engine always sets it exactly once."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _fault(what: str) -> InfraFault:
    return InfraFault(
        "engine_died",
        what,
        "a dead engine serves nothing: its episodes are masked, never scored",
        "read the rollout server's log; the run has to be started again from its last checkpoint",
    )
