"""Gradings in processes of their own, so that what the grader computes holds up no agent's turn and no event loop.

A worker process imports the harness once (about 6 s of processor time, 260 MB) and grades one pair after another. The first starts with
the pool, while agents play; others when a grading finds no idle one. A grading that is cancelled ends with its worker, whose sandbox dies with it; a worker that dies is a fault
of its one pair, and the next grading has a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.faults import grading_fault
from verl_opsd.cooperbench.grading import TEST_RUNS, grade_pair
from verl_opsd.cooperbench.grading_sandbox import STEP_TIMEOUT_S
from verl_opsd.cooperbench.identity import load_harness
from verl_opsd.cooperbench.types import PairTask, PreparedTask
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import Grade

#: Steps of the grader itself, at most.
STEPS = 40
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the locks of the parent's threads


def _end_with(parent: int) -> None:
    wait([parent])
    os._exit(1)


def _serve(jobs: Connection) -> None:
    """A worker: answers each job with its grade or its error, until its parent closes the pipe or ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    with contextlib.suppress(OpsdError):  # the job says it
        load_harness()
    while True:
        try:
            args, settings = jobs.recv()
        except EOFError:
            return
        try:
            answer: Grade | OpsdError = grade_pair(*args, **settings)
        except OpsdError as error:
            answer = error
        except Exception:
            answer = OpsdError(
                f"the grader failed: {traceback.format_exc()}", "a grading ends with a grade", "report this as a bug"
            )
        jobs.send(answer)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, end = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(end,), name="opsd-grader", daemon=True)
        self.process.start()
        end.close()

    def ask(self, job: tuple[tuple[Any, ...], dict[str, Any]], limit_s: float) -> Grade | OpsdError:
        """One grading; blocks.

        Raises:
            TimeoutError: no answer in ``limit_s`` seconds.
            EOFError, OSError: the process has ended.
        """
        self._pipe.send(job)
        if not self._pipe.poll(limit_s):
            raise TimeoutError
        answer: Grade | OpsdError = self._pipe.recv()
        return answer

    def ended(self) -> str:
        """How the process ended."""
        self.process.join(10)
        return f"ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.join()


class GradingPool:
    """At most ``processes`` gradings at once, for the coroutines of one event loop.

    Raises:
        OpsdError: ``processes`` is below 1.
    """

    def __init__(self, processes: int):
        if processes < 1:
            raise OpsdError(f"{processes} grading processes", "at least one process grades", "give 1 or more")
        self._slots = asyncio.Semaphore(processes)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="opsd-grading")
        self._idle = [_Worker()]
        self._workers = set(self._idle)

    @staticmethod
    def size(pairs: int, graders: int | None = None) -> int:
        """Processes for ``pairs`` at once: ``graders``, or one for each pair, at most one for each processor."""
        return graders or min(pairs, os.cpu_count() or 1)

    async def grade(
        self,
        pair: PairTask,
        prepared: PreparedTask,
        patches: Sequence[str],
        contract: EvalContract,
        *,
        allow_unsafe: bool = False,
    ) -> Grade:
        """:func:`verl_opsd.cooperbench.grading.grade_pair` under the contract, in a worker process.

        Raises:
            InfraFault, OpsdError: as that function; ``grader_died`` also where the worker died, ``grader_timeout`` where it hung.
        """
        settings = {"backend": contract.sandbox, "allow_unsafe": allow_unsafe, "timeout_s": contract.grade_timeout_s}
        limit_s = TEST_RUNS * contract.grade_timeout_s + STEPS * STEP_TIMEOUT_S
        async with self._slots:
            worker = self._idle.pop() if self._idle else _Worker()
            self._workers.add(worker)
            try:
                answer = await asyncio.get_running_loop().run_in_executor(
                    self._threads, worker.ask, ((pair, prepared, *patches), settings), limit_s
                )
            except TimeoutError as error:
                raise grading_fault("grader_timeout", f"{pair.key}: no grade after {limit_s:.0f} s") from error
            except (EOFError, OSError) as error:
                raise grading_fault("grader_died", f"{pair.key}: its process {worker.ended()}") from error
            else:
                self._idle.append(worker)
            finally:  # also where the caller was cancelled
                if worker not in self._idle:
                    self._workers.discard(worker)
                    worker.end()
        if isinstance(answer, OpsdError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends every worker, also those at work. Idempotent."""
        while self._workers:
            self._workers.pop().end()
        self._idle.clear()
        self._threads.shutdown()
