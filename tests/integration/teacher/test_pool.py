"""The pool of teacher workers on a local Ray: order, bounds, death in the middle, time limits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter.teacher import IN_FLIGHT, TeacherFacts, TeacherPool, TeacherWorker

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

    def load(self) -> TeacherFacts:
        with (self._folder / "loads").open("a") as f:
            f.write(f"{self._slot}\n")
        facts = super().load()
        if (self._folder / f"differs{self._slot}").exists():
            facts = TeacherFacts(facts.head_error, facts.probe_PH * 1.01)
        return facts

    def score(self, passes: Any) -> Tensor:
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
        return super().score(passes)


def pool_of(path: str, folder: Path, workers: int, **kwargs: Any) -> TeacherPool:
    make = ray.remote(Recording)
    return TeacherPool("t", torch.float32, lambda slot: make.remote(path, str(folder), slot), workers, **kwargs)


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


def test_life_of_a_pool(path: str, tmp_path: Path) -> None:
    """Equal to in-process; a refusal passes through; a worker that is killed loses nothing; a slot's second death stops."""
    pool = pool_of(path, tmp_path, 2)
    rows = rows_of(8)
    assert_equal_to_in_process(path, rows, pool.score(rows))
    assert pool.score([]) == [] and [tuple(h.shape) for h in pool.score([[], []])] == [(0, 96), (0, 96)]
    begun = [line.split() for line in (tmp_path / "rows").read_text().splitlines()]
    assert sorted(int(r) for _, r in begun) == [0, 1, 3, 4, 5, 6, 7]  # each once
    assert {s for s, _ in begun} == {"0", "1"}
    assert 0 <= pool.spread <= pool.tolerance and 0 <= pool.head_error <= pool.tolerance and pool.restarts == 0
    assert torch.equal(ray.get(pool.head_weight()), DeviceTeacher(path, torch.float32, "cpu", "t").weight_VH)

    with pytest.raises(OpsdError, match="same ids"):
        pool.score([[Pass(0, torch.tensor([0]), torch.tensor([1, 5000, 2]), torch.tensor([0]))]])

    kills = [tmp_path / f"kill{slot}-5" for slot in (0, 1)]
    kills[0].write_text("1"), kills[1].write_text("0")
    while kills[0].read_text() == "1":  # until slot 0 is the one that gets row 5
        assert_equal_to_in_process(path, rows, pool.score(rows))
    assert pool.restarts == 1 and sorted((tmp_path / "loads").read_text().split()) == ["0", "0", "1"]

    kills[0].write_text("1")
    with pytest.raises(InfraFault, match="second time on slot 0") as caught:
        for _ in range(20):
            pool.score(rows)
    assert caught.value.kind == "teacher_died"


def test_worker_that_comes_back_different_is_refused(path: str, tmp_path: Path) -> None:
    pool = pool_of(path, tmp_path, 1)
    (tmp_path / "kill0-4").write_text("1")
    (tmp_path / "differs0").touch()
    with pytest.raises(OpsdError, match=r"started again differs by 0\.01"):
        pool.score(rows_of(6))


def test_workers_that_differ_or_hang_are_seen(path: str, tmp_path: Path) -> None:
    (tmp_path / "differs1").touch()
    pool = pool_of(path, tmp_path, 2, score_timeout_s=3.0)
    assert pool.spread == pytest.approx(0.01, rel=1e-2) and pool.spread > pool.tolerance
    (tmp_path / "hang0").touch(), (tmp_path / "hang1").touch()
    with pytest.raises(InfraFault, match="more than 3 s") as caught:
        pool.score(rows_of(9))
    assert caught.value.kind == "teacher_timeout"
    assert len((tmp_path / "rows").read_text().splitlines()) <= 2  # begun; what waits behind is bounded
    assert len(str(caught.value).split("[")[1].split("]")[0].split(",")) == 2 * IN_FLIGHT
