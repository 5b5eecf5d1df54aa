"""On accelerators: device teachers in processes of their own against a forward in this one, in bf16; two teachers on two devices at once; one
teacher over two devices; a worker that is killed in the middle. `python -m pytest -s tests/gpu/test_teachers.py` prints the numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter.teacher import TeacherPool, TeacherWorker

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
SIZES = {"vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def local_ray() -> Iterator[None]:
    """A cluster a test: what a failed one leaves holds no device of the next."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import this file
    env = {"env_vars": {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0"}}
    ray.init(num_gpus=torch.cuda.device_count(), include_dashboard=False, runtime_env=env, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of 16 layers, one wider than the other."""
    out = []
    for n, hidden in enumerate((1024, 1536)):
        torch.manual_seed(n)
        config = Qwen3Config(**SIZES, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=16)
        folder = tmp_path_factory.mktemp("models") / f"teacher{n}"
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        out.append(str(folder))
    return out


def rows_of(count: int, length: int) -> list[list[Pass]]:
    g, rows = torch.Generator().manual_seed(1), []
    for r in range(count):
        ids = torch.randint(32000, (length + 37 * r,), generator=g)
        index = torch.randperm(len(ids), generator=g)[:200].sort().values
        rows.append([Pass(r, torch.arange(200), ids, index)])
    return rows


class Killed(TeacherWorker):
    """Ends itself once, in the middle of its second call."""

    def __init__(self, path: str, dtype: str, name: str, flag: str):
        super().__init__(path, dtype, name)
        self._flag, self._calls = Path(flag), 0

    def score(self, rows: Any) -> Tensor:
        self._calls += 1
        if self._calls == 2 and self._flag.exists():
            self._flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(rows)


def pool(
    path: str, name: str = "t", replicas: int = 1, ranks: int = 1, worker: type = TeacherWorker, *more: Any
) -> TeacherPool:
    make = ray.remote(num_gpus=1)(worker)
    return TeacherPool(name, torch.bfloat16, lambda slot: make.remote(path, "bfloat16", name, *more), replicas, ranks)


@asynccontextmanager
async def loaded(*pools: TeacherPool) -> AsyncIterator[None]:
    try:
        await asyncio.gather(*(p.load() for p in pools))
        yield
    finally:
        for p in pools:
            await p.close()


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest relative difference of a row's hidden states."""
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(a, b, strict=True))


def in_process(path: str, rows: list[list[Pass]], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    teacher = DeviceTeacher(path, dtype, "cuda:0", "own")
    out = [teacher.score(r).hidden_NH for r in rows]
    del teacher
    torch.cuda.empty_cache()
    return [h for h in out if h is not None]


def floor(path: str, rows: list[list[Pass]]) -> float:
    """What bf16 alone does: the same model's states in float32."""
    return distance(in_process(path, rows), in_process(path, rows, torch.float32))


def test_another_process_is_below_the_bf16_floor(paths: list[str]) -> None:
    rows = rows_of(6, 2048)

    async def run() -> list[Tensor]:
        one = pool(paths[0])
        async with loaded(one):
            return await one.score(rows)

    error, limit = distance(asyncio.run(run()), in_process(paths[0], rows)), floor(paths[0], rows)
    print(f"another process: relative difference {error:.2e}, bf16 floor {limit:.2e}")
    assert error <= limit


def test_a_worker_that_is_killed_loses_nothing(paths: list[str], tmp_path: Path) -> None:
    rows, flag = rows_of(6, 1024), tmp_path / "kill"
    flag.touch()

    async def run() -> tuple[list[Tensor], int]:
        one = pool(paths[0], "t", 1, 1, Killed, str(flag))
        async with loaded(one):
            return await one.score(rows), one.restarts

    got, restarts = asyncio.run(run())
    assert restarts == 1 and distance(got, in_process(paths[0], rows)) <= floor(paths[0], rows)


@two_devices
def test_two_teachers_on_two_devices_run_at_once(paths: list[str]) -> None:
    rows = rows_of(24, 4096)

    async def run() -> tuple[list[float], float, list[list[Tensor]]]:
        both = [pool(path, f"t{n}") for n, path in enumerate(paths)]
        async with loaded(*both):
            for p in both:
                await p.score(rows[:2])  # warm
            alone = []
            for p in both:
                began = time.monotonic()
                await p.score(rows)
                alone.append(time.monotonic() - began)
            began = time.monotonic()
            got = await asyncio.gather(*(p.score(rows) for p in both))
            return alone, time.monotonic() - began, got

    alone, together, got = asyncio.run(run())
    print(f"alone {alone[0]:.2f} s and {alone[1]:.2f} s, at once {together:.2f} s")
    assert together < 0.8 * sum(alone)
    for path, signals in zip(paths, got, strict=True):
        assert distance(signals[:4], in_process(path, rows[:4])) <= floor(path, rows[:4])


@two_devices
def test_one_teacher_over_two_devices(paths: list[str]) -> None:
    rows = rows_of(7, 2048)

    async def run() -> list[Tensor]:
        sharded = pool(paths[1], "t", 1, 2)
        async with loaded(sharded):
            return await sharded.score(rows)

    error, limit = distance(asyncio.run(run()), in_process(paths[1], rows)), floor(paths[1], rows)
    print(f"FSDP2 over two devices: relative difference {error:.2e}, bf16 floor {limit:.2e}")
    assert error <= limit
