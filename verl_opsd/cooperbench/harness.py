"""One pair of agents, from a prepared task to two submissions: one fault ends both, and nothing of them is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.identity import identity_string, load_harness
from verl_opsd.cooperbench.stopping import StopSignal, located
from verl_opsd.cooperbench.types import ChatSession, PairRun, PairTask, PreparedTask
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.cooperbench.pair import PairPlace

T = TypeVar("T")
_log = logging.getLogger(__name__)
AGENTS = ("agent1", "agent2")

#: The harness calls an agent dead when it shows no sign of life for this many seconds, and a command shows none.
HARNESS_ALIVE_S = 600


async def run_pair(
    pair: PairTask,
    prepared: PreparedTask,
    sessions: Mapping[str, ChatSession],
    contract: EvalContract,
    *,
    work_dir: Path,
    loop: asyncio.AbstractEventLoop,
    executor: ThreadPoolExecutor,
    episode_id: str,
    sandbox_backend: str = "bubblewrap",
    allow_unsafe: bool = False,
    brief_texts: Mapping[str, str] | None = None,
    keep: bool = False,
) -> PairRun:
    """Runs agent1 on the first and agent2 on the second feature, at the same time.

    Args:
        sessions: a gateway session for ``agent1`` and one for ``agent2``.
        work_dir: where this pair makes a directory of its own; it is gone afterwards unless ``keep``.
        loop: the running loop that the sessions belong to; this function may run on another one.
        executor: threads for the agents, two for each pair that runs at once; an agent blocks its thread.
        allow_unsafe: passed to the sandbox backend.
        brief_texts: agent -> text appended to its system message (the actor's own prompt); default none.

    Raises:
        InfraFault: a fault of the infrastructure, named with the pair. Whatever goes wrong in the harness itself has
            the kind ``harness_bug`` and its cause chained. Both agents have stopped, and nothing of the pair is left.
        OpsdError: the arguments contradict one another or the contract.
    """
    started = time.monotonic()
    here, stop = asyncio.get_running_loop(), StopSignal()
    place: PairPlace | None = None
    run: PairRun | None = None
    error: BaseException | None = None

    def start(work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return here.run_in_executor(executor, _reporting, stop, work, *args)

    # Stopping has a thread of its own: it is what ends a command that an agent's thread waits for.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="pair-stop") as stopper:

        def end_commands() -> asyncio.Future[None] | None:
            return here.run_in_executor(stopper, place.stop) if place is not None else None

        try:
            checks = (pair, prepared, set(sessions), contract, sandbox_backend, set(brief_texts or {}))
            await _all(stop, end_commands, [start(_check, *checks)])
            settings = (pair, prepared, contract, AGENTS, work_dir, episode_id, sandbox_backend, allow_unsafe)
            (place,) = await _all(stop, end_commands, [start(_place, *settings)])
            await _all(stop, end_commands, [start(place.open)])
            await _all(stop, end_commands, [start(place.open_agent, a) for a in AGENTS])
            briefs = brief_texts or {}
            calls = [start(place.run_agent, a, sessions[a], loop, stop, briefs.get(a, "")) for a in AGENTS]
            first, second = await _all(stop, end_commands, calls)
            messages = {outcome.agent_id: history for outcome, history in (first, second)}
            run = PairRun((first[0], second[0]), messages, time.monotonic() - started)
        except BaseException as caught:
            error = caught
        if place is not None:
            try:
                await _uninterrupted([here.run_in_executor(stopper, place.close, keep)])
            except BaseException as caught:
                if error is not None:
                    _log.error("%s (%s): closing failed after %r", pair.key, episode_id, error, exc_info=caught)
                error = error or caught
    if error is None and run is not None:
        return run
    if not isinstance(error, Exception):  # cancelled, or the process is ending
        raise error or AssertionError("a pair ends with a run or an error")
    leaving = located(error, f"{pair.key} ({episode_id})")
    raise leaving from (None if leaving is error else error)


def _place(*settings: Any) -> PairPlace:
    load_harness()
    from verl_opsd.cooperbench.pair import PairPlace  # imports the harness: seconds, so on an agent's thread

    return PairPlace(*settings)


def _reporting(stop: StopSignal, work: Callable[..., T], *args: Any) -> T:
    """Runs work on an agent's thread; the first error of the pair is the one that is reported."""
    try:
        return work(*args)
    except BaseException as error:
        stop.set(error)
        raise


async def _all(
    stop: StopSignal, end_commands: Callable[[], asyncio.Future[None] | None], calls: Sequence[asyncio.Future[T]]
) -> list[T]:
    """Results of calls that run on agents' threads. When one fails, or the caller is cancelled, the others are stopped
    and waited for before the error is raised: threads can't be abandoned."""
    try:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if not stop.is_set:
            return [call.result() for call in calls]
    except asyncio.CancelledError as cancelled:
        stop.set(cancelled)
    ending = end_commands()
    await _uninterrupted([*calls, *([ending] if ending else [])], raise_errors=False)
    raise stop.cause or AssertionError("a stopped pair has a cause")


async def _uninterrupted(calls: Sequence[asyncio.Future[Any]], raise_errors: bool = True) -> None:
    """Waits until all calls have ended, whatever cancels the caller meanwhile; a cancellation is raised at the end."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [call for call in calls if not call.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as caught:
            cancelled = caught
    errors = [call.exception() for call in calls]
    if raise_errors:
        for error in filter(None, errors):
            raise error
        if cancelled is not None:
            raise cancelled


def check_contract(contract: EvalContract) -> None:
    """The harness can run under these limits.

    Raises:
        OpsdError: a command may last so long that the harness would tell the peer that the agent is dead.
    """
    if contract.messaging and contract.command_timeout_s >= HARNESS_ALIVE_S:
        raise OpsdError(
            f"contract.command_timeout_s={contract.command_timeout_s:g} with messaging",
            f"a command may not last {HARNESS_ALIVE_S} s: the harness would tell the peer that the agent is dead",
            "lower contract.command_timeout_s",
        )


def _check(
    pair: PairTask,
    prepared: PreparedTask,
    sessions: set[str],
    contract: EvalContract,
    backend: str,
    briefs: set[str],
) -> None:
    """Refuses arguments that contradict one another, before anything is made."""
    check_contract(contract)
    rules = [
        (
            sessions == set(AGENTS),
            f"sessions for {sorted(sessions)}",
            f"a pair is {AGENTS}",
            "give each agent a session",
        ),
        (briefs <= set(AGENTS), f"brief_texts for {sorted(briefs)}", f"a pair is {AGENTS}", "name these agents only"),
        (
            pair.features[0] < pair.features[1],
            f"features {pair.features} of {pair.key}",
            "agent1 gets the lower and agent2 the higher of two features",
            "sort the features of the pair",
        ),
        (
            (prepared.repo, prepared.task_id) == (pair.repo, pair.task_id),
            f"a prepared {prepared.repo}/task{prepared.task_id} for {pair.key}",
            "a pair runs on its own task",
            "prepare the pair's task",
        ),
        (
            contract.sandbox == backend,
            f"sandbox_backend={backend!r} under contract.sandbox={contract.sandbox!r}",
            "the contract names the sandbox that runs commands",
            "make the two the same",
        ),
        (
            contract.harness in ("", identity_string()),
            f"harness {identity_string()} under contract.harness={contract.harness!r}",
            "one harness runs collection, training and evaluation",
            "install the contract's harness, or collect under a contract of this one",
        ),
    ]
    for holds, what, rule, way_out in rules:
        if not holds:
            raise OpsdError(what, rule, way_out)
