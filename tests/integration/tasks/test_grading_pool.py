"""Grading processes: the same grades, the same errors; a death, a hang or a cancellation costs one grading and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

import psutil
import pytest

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench import grading_pool
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.errors import InfraFault, OpsdError

CONTRACT = EvalContract(grade_timeout_s=60.0)


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


def workers(pool: GradingPool) -> list[psutil.Process]:
    return [psutil.Process(w.process.pid) for w in pool._workers]


def test_one_process_grades_and_a_cancelled_grading_ends_with_its_sandbox(prepared, pairs, make_patch):
    """The second grading hangs in its tests; then the caller is cancelled."""
    pair, task = pairs["textkit/1+2"], prepared["textkit"]
    gold = [(pair.task_dir / f"feature{f}" / "feature.patch").read_text() for f in pair.features]
    hanging = make_patch(task, {"textkit/__init__.py": "import time\ntime.sleep(600)\n"})

    async def play() -> None:
        with closing(GradingPool(1)) as pool:
            grades = [pool.grade(pair, task, gold, CONTRACT) for _ in range(2)]
            assert [g.reward for g in await asyncio.gather(*grades)] == [1.0, 1.0]
            (worker,) = workers(pool)
            grading = asyncio.create_task(pool.grade(pair, task, (hanging, gold[1]), CONTRACT))
            children: list[psutil.Process] = []

            def command(process: psutil.Process) -> list[str]:
                try:
                    return process.cmdline()
                except psutil.Error:  # it has ended meanwhile
                    return []

            def testing() -> bool:
                children[:] = worker.children(recursive=True)
                return any("pytest" in " ".join(command(p)) for p in children)

            await until(testing, "test run")
            grading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await grading
            assert not worker.is_running() and workers(pool) == []
            await until(lambda: not any(p.is_running() for p in children), "end of the sandbox")
            with pytest.raises(OpsdError, match="graded on its own task's tree"):  # the slot is free, the next worker fresh
                await pool.grade(pair, prepared["ledger"], ("", ""), CONTRACT)

    asyncio.run(play())


def test_a_worker_that_dies_or_hangs_is_a_fault_of_one_pair(prepared, pairs, monkeypatch):
    """The other of the two gradings goes on."""
    pair, task = pairs["textkit/1+2"], prepared["textkit"]

    async def play() -> None:
        with closing(GradingPool(2)) as pool:
            gradings = [asyncio.create_task(pool.grade(pair, task, ("", ""), CONTRACT)) for _ in range(2)]
            await until(lambda: len(pool._workers) == 2, "two workers")
            workers(pool)[0].send_signal(signal.SIGKILL)
            found = await asyncio.gather(*gradings, return_exceptions=True)
            (fault,) = [f for f in found if isinstance(f, InfraFault)]
            (grade,) = [f for f in found if not isinstance(f, InfraFault)]
            assert fault.kind == "grader_died" and "exit code -9" in fault.what and pair.key in fault.what
            assert grade.reward == 0.0
            monkeypatch.setattr(grading_pool, "TEST_RUNS", 0)
            monkeypatch.setattr(grading_pool, "STEPS", 0)
            (worker,) = workers(pool)
            worker.suspend()
            with pytest.raises(InfraFault, match="no grade after 0 s") as hung:
                await pool.grade(pair, task, ("", ""), CONTRACT)
            assert hung.value.kind == "grader_timeout" and not worker.is_running()

    asyncio.run(play())


PARENT = """
import asyncio, pathlib
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.types import PairTask, PreparedTask
async def main():
    pool, here = GradingPool(1), pathlib.Path()
    task = PreparedTask("r", 1, here, "", here, here)
    grading = asyncio.create_task(pool.grade(PairTask(here, "r", 1, (1, 2)), task, ("", ""), EvalContract()))
    await asyncio.sleep(0.1)
    print(*(w.process.pid for w in pool._workers), flush=True)
    await grading
asyncio.run(main())
"""


def test_a_worker_does_not_outlive_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(30)


def test_how_many():
    with pytest.raises(OpsdError, match="at least one process"):
        GradingPool(0)
    assert [GradingPool.size(n) for n in (1, 10_000)] == [1, os.cpu_count()]
    assert GradingPool.size(1, 5) == 5
