"""The pool of teacher workers on a local Ray: order, bounds, death in the middle, time limits."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.teachers.base import Pass, Voice
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter.teacher import TeacherClosed, TeacherFacts, TeacherPool, TeacherWorker

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    env = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, runtime_env=env, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("models") / "teacher", seed=5, hidden_size=96))


class Recording(TeacherWorker):
    """Writes a line for each row that it begins; what it does beside scoring, its files in ``folder`` say."""

    def __init__(self, path: str, folder: str, slot: int):
        super().__init__(path, "float32", "t")
        self._folder, self._slot = Path(folder), slot

    def load(self, *where: Any) -> TeacherFacts:
        with (self._folder / "loads").open("a") as f:
            f.write(f"{self._slot}\n")
        if (self._folder / f"slow{self._slot}").exists():
            time.sleep(60)
        facts = super().load(*where)
        if (self._folder / f"differs{self._slot}").exists():
            facts = dataclasses.replace(facts, probe_PH=facts.probe_PH * 1.01)
        if (self._folder / f"broken{self._slot}").exists():
            facts = dataclasses.replace(facts, probe_PH=facts.probe_PH.clone().index_fill_(0, torch.tensor([7]), torch.nan))
        return facts

    def score(self, rows: Any) -> Tensor:
        for passes in rows[self._rank : self._rank + 1]:
            if not passes:
                continue
            with (self._folder / "rows").open("a") as f:
                f.write(f"{self._slot} {passes[0].row}\n")
            kill = self._folder / f"kill{self._slot}-{passes[0].row}"
            if kill.exists():
                left = int(kill.read_text())
                if left > 0:
                    kill.write_text(str(left - 1))
                    os.kill(os.getpid(), signal.SIGKILL)
        if (self._folder / f"hang{self._slot}").exists():
            time.sleep(60)
        return super().score(rows)


class Blocking:
    """A pool in an event loop of its own, which runs while something is asked of it."""

    def __init__(self, path: str, folder: Path, replicas: int, **kwargs: Any):
        make = ray.remote(Recording)
        self._loop = asyncio.new_event_loop()
        self.pool = TeacherPool("t", torch.float32, lambda slot: make.remote(path, str(folder), slot), replicas, **kwargs)
        self.wait(self.pool.load())

    def wait(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def until_restarted(self) -> None:
        """The other replica may have finished everything while one starts again."""

        async def poll() -> None:
            for _ in range(600):
                if self.pool.restarts:
                    return
                await asyncio.sleep(0.1)

        self.wait(poll())

    def score(self, rows: list) -> list[Tensor]:
        return self.wait(self.pool.score(rows))

    def close(self) -> None:
        self.wait(self.pool.close())
        assert asyncio.all_tasks(self._loop) == set()  # nothing of the pool is left behind, whatever had happened to it
        self._loop.close()


@pytest.fixture
def pool_of(path: str, tmp_path: Path) -> Iterator[Callable[..., Blocking]]:
    made: list[Blocking] = []

    def make(replicas: int, **kwargs: Any) -> Blocking:
        made.append(Blocking(path, tmp_path, replicas, **kwargs))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def rows_of(n: int) -> list[list[Pass]]:
    """Rows of different lengths; row 2 has no loss position, row 3 has two passes. Tensors are views into a large one."""
    big = torch.randint(2048, (100_000,), generator=torch.Generator().manual_seed(1))
    rows = []
    for r in range(n):
        ids = big[100 * r : 100 * r + 20 + 7 * (r % 5)]
        first = Pass(r, torch.tensor([1, 0]), ids, torch.tensor([5, 11]))
        second = Pass(r, torch.tensor([2]), ids[:15], torch.tensor([13]))
        rows.append([] if r == 2 else [first, second] if r == 3 else [first])
    return rows


def assert_equal_to_in_process(path: str, rows: list[list[Pass]], got: list[Tensor]) -> None:
    own = DeviceTeacher(path, torch.float32, "cpu", "t")
    assert len(got) == len(rows)
    for row, hidden in zip(rows, got, strict=True):
        want = own.score(row).hidden_NH
        assert want is not None and hidden.shape == want.shape and hidden.dtype == want.dtype
        if row:
            assert float((hidden - want).norm() / want.norm()) < 1e-6


def test_life_of_a_pool(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    """Equal to in-process; a refusal passes through; a worker that is killed loses nothing; a slot's second death stops."""
    pool = pool_of(2)
    rows = rows_of(8)
    assert_equal_to_in_process(path, rows, pool.score(rows))
    assert pool.score([]) == [] and [tuple(h.shape) for h in pool.score([[], []])] == [(0, 96), (0, 96)]
    begun = [line.split() for line in (tmp_path / "rows").read_text().splitlines()]
    assert sorted(int(r) for _, r in begun) == [0, 1, 3, 4, 5, 6, 7]  # each once
    assert {s for s, _ in begun} == {"0", "1"}
    found = pool.pool
    assert 0 <= found.spread <= found.tolerance and 0 <= found.head_error <= found.tolerance and found.restarts == 0
    assert found.voice == Voice("t", "exact", 96, torch.float32)
    assert torch.equal(pool.wait(found.head_weight()), DeviceTeacher(path, torch.float32, "cpu", "t").weight_VH)

    with pytest.raises(OpsdError, match="same ids"):  # of this call alone
        pool.score([[Pass(0, torch.tensor([0]), torch.tensor([1, 5000, 2]), torch.tensor([0]))]])

    kills = [tmp_path / f"kill{slot}-5" for slot in (0, 1)]
    kills[0].write_text("1"), kills[1].write_text("0")
    while kills[0].read_text() == "1":  # until slot 0 is the one that gets row 5
        assert_equal_to_in_process(path, rows, pool.score(rows))
    pool.until_restarted()
    assert found.restarts == 1 and sorted((tmp_path / "loads").read_text().split()) == ["0", "0", "1"]

    kills[0].write_text("1")
    with pytest.raises(InfraFault, match="second time on replica 0") as caught:
        for _ in range(20):
            pool.score(rows)
    assert caught.value.kind == "teacher_died"


def test_worker_that_comes_back_different_is_refused(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    pool = pool_of(1)
    (tmp_path / "kill0-4").write_text("1")
    (tmp_path / "differs0").touch()
    with pytest.raises(OpsdError, match=r"started again differs by 0\.01"):
        pool.score(rows_of(6))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_worker_whose_states_are_not_numbers_is_seen_wherever_it_is(
    path: str, tmp_path: Path, pool_of: Callable[..., Blocking], slot: int
) -> None:
    (tmp_path / f"broken{slot}").touch()
    found = pool_of(2).pool
    assert math.isnan(found.spread) and not found.spread <= found.tolerance  # as the gate compares


def test_workers_that_differ_or_hang_are_seen(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    (tmp_path / "differs1").touch()
    pool = pool_of(2, score_timeout_s=3.0)
    assert pool.pool.spread == pytest.approx(0.01, rel=1e-2) and pool.pool.spread > pool.pool.tolerance
    (tmp_path / "hang0").touch(), (tmp_path / "hang1").touch()
    with pytest.raises(InfraFault, match="more than 3 s") as caught:
        pool.score(rows_of(9))
    assert caught.value.kind == "teacher_timeout"
    assert len((tmp_path / "rows").read_text().splitlines()) <= 2  # begun; what waits behind is bounded
    with pytest.raises(InfraFault, match="more than 3 s"):  # and nothing more is scored
        pool.score(rows_of(9))


def test_rows_of_calls_that_overlap_are_dealt_as_they_come(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    """Each episode is a call of its own: it is scored while others run, in the order of calls, and no row twice."""
    pool = pool_of(1)
    rows = rows_of(8)

    async def one(row: int, after: float) -> list[Tensor]:
        await asyncio.sleep(after)
        return await pool.pool.score([rows[row]])

    async def all_of_them() -> list[list[Tensor]]:
        return await asyncio.gather(*(one(r, after) for r, after in ((4, 0.0), (0, 0.2), (7, 0.4), (5, 0.6))))

    got = [out[0] for out in pool.wait(all_of_them())]
    assert_equal_to_in_process(path, [rows[r] for r in (4, 0, 7, 5)], got)
    assert [line.split()[1] for line in (tmp_path / "rows").read_text().splitlines()] == ["4", "0", "7", "5"]


def test_a_model_on_two_ranks(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    """FSDP2 over gloo: equal to one process, rows of unequal passes, a rank that is killed in the middle, and its second death."""
    pool = pool_of(1, ranks=2)
    rows = rows_of(7)
    assert_equal_to_in_process(path, rows, pool.score(rows))
    begun = [line.split() for line in (tmp_path / "rows").read_text().splitlines()]
    assert sorted(int(r) for _, r in begun) == [0, 1, 3, 4, 5, 6] and {s for s, _ in begun} == {"0", "1"}
    assert pool.pool.spread <= 1e-6 and torch.equal(
        pool.wait(pool.pool.head_weight()), DeviceTeacher(path, torch.float32, "cpu", "t").weight_VH
    )
    (tmp_path / "kill1-5").write_text("1"), (tmp_path / "kill0-5").write_text("1")
    assert_equal_to_in_process(path, rows, pool.score(rows))
    assert pool.pool.restarts == 1 and sorted((tmp_path / "loads").read_text().split()) == ["0", "0", "1", "1"]


def test_a_closed_pool_scores_nothing_and_leaves_nothing(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    """Whatever the rows were doing: under way at a replica, waiting behind it, or on their way back from a worker that died."""
    pool = pool_of(1)
    workers = [w for r in pool.pool._replicas for w in r.workers]
    (tmp_path / "hang0").touch()

    async def while_it_scores() -> list[Any]:
        calls = [asyncio.ensure_future(pool.pool.score([row])) for row in rows_of(7) if row]
        while not (tmp_path / "rows").exists():
            await asyncio.sleep(0.02)
        assert not any(c.done() for c in calls)
        await asyncio.gather(pool.pool.close(), pool.pool.close())  # more than once, and at a time
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return ended

    ended = pool.wait(while_it_scores())
    assert [type(e) for e in ended] == [TeacherClosed] * 6 and "teacher t is closed; 6 rows" in str(ended[0])
    for ask in (pool.pool.score(rows_of(1)), pool.pool.score([]), pool.pool.head_weight(), pool.pool.load()):
        with pytest.raises(TeacherClosed, match="after everything that scores has ended"):
            pool.wait(ask)
    assert pool.wait(pool.pool.samples()) == [[]]
    with pytest.raises(ray.exceptions.RayActorError):  # the device is free again
        ray.get(workers[0].samples.remote(), timeout=10)


def test_closed_while_a_worker_starts_again(path: str, tmp_path: Path, pool_of: Callable[..., Blocking]) -> None:
    pool = pool_of(1)
    (tmp_path / "kill0-0").write_text("1"), (tmp_path / "slow0").touch()

    async def while_it_starts() -> Any:
        call = asyncio.ensure_future(pool.pool.score(rows_of(2)))
        while (tmp_path / "loads").read_text().split() != ["0", "0"]:
            await asyncio.sleep(0.02)
        await pool.pool.close()
        return await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), 5)

    (ended,) = pool.wait(while_it_starts())
    assert isinstance(ended, TeacherClosed) and pool.pool.restarts == 0


def test_a_pool_that_never_loaded_closes(path: str) -> None:
    async def run() -> None:
        pool = TeacherPool("t", torch.float32, lambda slot: None, 2)
        await pool.close()
        with pytest.raises(TeacherClosed):
            await pool.load()

    asyncio.run(run())


def test_its_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(TeacherClosed("big", 3)))
    assert isinstance(error, TeacherClosed) and str(error) == str(TeacherClosed("big", 3)) and "teacher big" in str(error)
