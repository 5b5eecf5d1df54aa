"""How the two agents of a pair are stopped, and which signs of a broken harness void a run.

An infrastructure fault of one agent ends the pair: the other stops before its next model call, or while it waits for
one.
"""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from verl_opsd.errors import InfraFault, OpsdError

T = TypeVar("T")

#: Seconds between two signs of life while an agent waits for the model; the harness calls an agent dead after 600.
HEARTBEAT_S = 60.0

#: Lines that only a broken harness prints (name -> pattern). The shell's own wording is required, so that a command
#: that merely mentions the text does not match.
TRIPWIRES: dict[str, re.Pattern[str]] = {
    "gh_missing": re.compile(r"^[^\s:]*: (?:line )?\d+: gh: (?:command )?not found$", re.MULTILINE),
    "remote_is_upstream": re.compile(r"^fatal: could not read Username for ", re.MULTILINE),
    "send_message_missing": re.compile(r"^[^\s:]*: (?:line )?\d+: send_message: (?:command )?not found$", re.MULTILINE),
}


class PairStopped(Exception):
    """The other agent of the pair hit a fault, or the caller gave the pair up; never an outcome of its own."""


class WallLimitReached(Exception):
    """The agent's wall-clock limit passed: an outcome of the policy."""


class StopSignal:
    """One-shot, thread-safe signal shared by both agents; the first cause given is kept."""

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.cause: BaseException | None = None
        self._lock = threading.Lock()

    def set(self, cause: BaseException | None = None) -> None:
        """Stops the pair. Later calls change nothing."""
        with self._lock:
            if not self.future.done():
                self.cause = cause
                self.future.set_result(None)

    @property
    def is_set(self) -> bool:
        """Whether the pair has been stopped."""
        return self.future.done()


class RunGuard:
    """Stop signal and wall-clock limit of one agent's run, checked before and during every model call.

    Args:
        stop: the pair's signal.
        wall_limit_s: seconds from now.
        heartbeat: called at least every :data:`HEARTBEAT_S` seconds while a call is in flight.
    """

    def __init__(self, stop: StopSignal, wall_limit_s: float, heartbeat: Callable[[], None] = lambda: None):
        self.stop, self._heartbeat = stop, heartbeat
        self._deadline = time.monotonic() + wall_limit_s

    def check(self) -> None:
        """Raises:
        PairStopped: the pair has been stopped.
        WallLimitReached: the limit has passed.
        """
        if self.stop.is_set:
            raise PairStopped
        if time.monotonic() >= self._deadline:
            raise WallLimitReached

    def result(self, call: concurrent.futures.Future[T]) -> T:
        """Result of a call in flight; a call that is given up is cancelled.

        Raises:
            PairStopped, WallLimitReached: as :meth:`check`.
            Exception: whatever the call raised.
        """
        while not call.done():
            try:
                self.check()
            except (PairStopped, WallLimitReached):
                call.cancel()
                raise
            self._heartbeat()
            timeout = max(0.0, min(HEARTBEAT_S, self._deadline - time.monotonic()))
            either: list[concurrent.futures.Future[Any]] = [call, self.stop.future]
            concurrent.futures.wait(either, timeout=timeout, return_when=concurrent.futures.FIRST_COMPLETED)
        return call.result()


def tripwires_in(output: str) -> set[str]:
    """Names of the :data:`TRIPWIRES` that a command's output sets off."""
    return {name for name, pattern in TRIPWIRES.items() if pattern.search(output)}


def located(error: BaseException, where: str) -> OpsdError:
    """The error that leaves the harness, to be raised from ``error``: a fault keeps its kind and gains ``where``,
    refusals of bad input pass unchanged, and anything else is a fault of kind ``message_store`` or ``harness_bug``."""
    import redis

    if isinstance(error, InfraFault):
        return InfraFault(error.kind, f"{where}: {error.what}", error.rule, error.way_out)
    if isinstance(error, OpsdError):
        return error
    kind = "message_store" if isinstance(error, redis.RedisError) else "harness_bug"
    return InfraFault(
        kind,
        f"{where}: {type(error).__name__}: {error}",
        "only the agents' own actions may decide a score; an error of the harness masks the episode",
        "see the chained exception",
    )
