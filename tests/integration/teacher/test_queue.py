"""The queues before two teachers on a local Ray: verl's resource pools, a server, the cache, the trainer's scoring step and the agent loop's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
import torch
from tensordict import TensorDict

from verl_opsd.config import OpsdConfig
from verl_opsd.models.tiny import make_tiny
from verl_opsd.teachers.base import Pass, common, on_the_wire
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.teachers.server import ServerTeacher
from verl_opsd.tokens.rows import padding_fields

ROOT = Path(__file__).parents[3]
V = 2048


@pytest.fixture
def local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPSD_CACHE", str(tmp_path / "cache"))
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OPSD_CACHE": str(tmp_path / "cache")}
    ray.init(
        num_cpus=24,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": env},
        log_to_driver=False,
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    yield
    ray.shutdown()


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    return {n: str(make_tiny(tmp_path / n, seed=5, hidden_size=h)) for n, h in (("big", 96), ("small", 32))}


@pytest.fixture
def url(models: dict[str, str]) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(ROOT / "tests" / "logprob_server.py"), str(port), models["small"]]
    process = subprocess.Popen(command)
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/v1/models")
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def config(models: dict[str, str], url: str) -> OpsdConfig:
    members = {
        "big": {
            "kind": "device",
            "path": models["big"],
            "dtype": "float32",
            "devices": 2,
            "ranks": 2,
            "cache": True,
            "tasks": ["a/*"],
        },
        "small": {"kind": "server", "path": models["small"], "url": url, "cache": True, "tasks": ["b/*"]},
    }
    return OpsdConfig.parse(
        {
            "recipe": "opd",
            "scale": "local",
            "mode": "online",
            "tasks": {"dataset": "pocket", "train": "pocket_train", "eval": "pocket_eval"},
            "brief": {"name": "peer_spec"},
            "teacher": {"kind": "routed", "members": members},
            "loss": {"support": "teacher_topk", "top_k": 3},
            "contract": {"context_length": 4096, "max_tokens": 96},
        }
    )


def rows_for(lengths: tuple[int, ...], positions: list[list[int]], teachers: list[int]) -> list[dict[str, Any]]:
    """Rows with a brief of 4 tokens in front."""
    g = torch.Generator().manual_seed(3)
    brief, rows = torch.randint(V, (4,), generator=g), []
    for n, p, teacher in zip(lengths, positions, teachers, strict=True):
        ids, position = torch.randint(V, (n,), generator=g), torch.tensor(p, dtype=torch.int64)
        row = padding_fields(ids)
        if p:
            row |= {k: torch.zeros(len(p), dtype=v.dtype) for k, v in row.items() if v.numel() == 0} | {
                "opsd_position": position
            }
            row |= {
                "opsd_view_ids": torch.cat([brief, ids]),
                "opsd_view_len": torch.tensor([n + 4]),
                "opsd_view_pos": position + 4,
            }
        rows.append(row | {"input_ids": ids, "opsd_teacher": torch.tensor([teacher])})
    return rows


def wanted(opsd: OpsdConfig, models: dict[str, str], url: str, rows: list[dict[str, Any]], source: str) -> list[torch.Tensor]:
    """Signals of the same rows from teachers in this process."""
    big = DeviceTeacher(models["big"], torch.float32, "cpu", "big")

    async def scored() -> list[torch.Tensor]:
        small = ServerTeacher(url, models["small"], "small", 3, V)
        await small.probe()
        width, dtype = common([big.voice, small.voice])
        out = []
        for r in rows:
            ids, p = (r["opsd_view_ids"], r["opsd_view_pos"]) if source == "view" else (r["input_ids"], r["opsd_position"])
            row = [Pass(0, torch.arange(len(p)), ids, p)] if len(p) else []
            packed = big.voice.pack(big.score(row)) if int(r["opsd_teacher"]) == 0 else small.voice.pack(await small.score(row))
            out.append(on_the_wire(packed, width, dtype))
        return out

    return asyncio.run(scored())


def assert_same(got: Any, want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert not len(b) or float((a - b).norm() / b.norm()) < 1e-5


def test_two_teachers_score_their_own_rows(
    local_ray: None, models: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transfer_queue as tq
    from verl.single_controller.ray import RayResourcePool
    from verl.utils.transferqueue_utils import _meta_to_realdata

    from verl_opsd.verl_adapter import teacher_queue
    from verl_opsd.verl_adapter.passes import jagged
    from verl_opsd.verl_adapter.teacher import TeacherClosed
    from verl_opsd.verl_adapter.teacher_client import TeacherClient
    from verl_opsd.verl_adapter.teacher_queue import close_teachers, pools_of, start_teachers
    from verl_opsd.verl_adapter.trainer import OpsdTrainer

    opsd = config(models, url)
    assert pools_of(opsd) == {"opsd_teacher_0": [1, 1]}
    slots = {"opsd_teacher_0": RayResourcePool([1, 1], use_gpu=True, name_prefix="t", max_colocate_count=1)}
    teachers = start_teachers(opsd, slots, V, "tokenizer")
    assert [t.name for t in teachers] == ["big", "small"] and [t.voice.width for t in teachers] == [96, 9]
    assert tuple(ray.get(teachers[0].head_weight()).shape) == (V, 96) and ray.get(teachers[1].head_weight()) is None

    # An episode that ended, as the agent loop sees it.
    ended = [SimpleNamespace(opsd_row=r) for r in rows_for((12, 9), [[3, 7], [5]], [0, 1])]
    asyncio.run(TeacherClient(opsd).add_signals(ended))
    assert_same([o.opsd_row["opsd_signal"] for o in ended], wanted(opsd, models, url, [o.opsd_row for o in ended], "view"))
    asyncio.run(TeacherClient(opsd).add_signals(ended))
    assert [(t.report()["cache_hits"], t.report()["cache_misses"]) for t in teachers] == [(1, 1), (1, 1)]

    # A batch, as the trainer sees it.
    rows = rows_for((12, 9, 15, 11), [[3, 6, 7], [], [1, 12], [2]], [0, 1, 1, 0])
    tq.init()
    keys = ["a_0", "b_0", "c_0", "d_0"]
    fields = TensorDict({k: jagged([r[k] for r in rows]) for k in rows[0]}, batch_size=4)
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{"is_padding": k == "d_0"} for k in keys])
    batch.extra_info = {"epochs": 2}
    trainer: Any = SimpleNamespace(teachers=teachers)
    for source in ("own", "view", "own"):  # written again each time
        scored = OpsdTrainer.score(trainer, batch, source)
        assert scored.keys == keys and scored.extra_info == {"epochs": 2} and "opsd_signal" in scored.fields
        data = _meta_to_realdata(scored)  # what a training worker gets
        assert_same(data["opsd_signal"].unbind(), wanted(opsd, models, url, rows, source))
    OpsdTrainer._clear_padding_signals(trainer, scored)
    cleared = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["opsd_signal"])["opsd_signal"].unbind()
    assert [tuple(s.shape) for s in cleared] == [(3, 96), (0, 96), (2, 96), (0, 96)]
    tq.close()

    for _ in range(2):
        close_teachers(teachers)
    for t in teachers:
        with pytest.raises(TeacherClosed, match=f"teacher {t.name} is closed"):
            ray.get(t.actor.score.remote([[Pass(0, torch.tensor([0]), torch.tensor([5, 6, 7]), torch.tensor([1]))]]))
    ray.kill(teachers[0].actor)
    close_teachers(teachers)  # one that has died has nothing left to end

    @ray.remote(num_cpus=0)
    class Stuck:
        def close(self) -> None:
            time.sleep(60)

    @ray.remote(num_cpus=0)
    class Broken:
        def close(self) -> None:
            raise RuntimeError("of its own")

    monkeypatch.setattr(teacher_queue, "CLOSE_TIMEOUT_S", 1.0)
    stuck, broken = Stuck.remote(), Broken.remote()
    ray.get([a.__ray_ready__.remote() for a in (stuck, broken)])
    capsys.readouterr()
    close_teachers([SimpleNamespace(name=n, actor=a) for n, a in (("stuck", stuck), ("broken", broken))])
    said = capsys.readouterr().out
    assert (
        "teacher stuck did not end: GetTimeoutError" in said and "teacher broken did not end" in said and "of its own" in said
    )


def test_a_closed_server_teacher_leaves_no_request() -> None:
    """Requests under way, waiting for their turn and waiting to be sent again."""
    from verl_opsd.verl_adapter.teacher import TeacherClosed
    from verl_opsd.verl_adapter.teacher_queue import ServerPool

    asked, probing = 0, True

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        asked += 1
        if not probing and asked == 1:
            return httpx.Response(500)
        if not probing:
            await asyncio.sleep(60)
        ids = json.loads(request.content)["prompt"]
        entries = [None, *({str(i): {"logprob": -1.0 - n / 9}} for n, i in enumerate(ids[1:]))]
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": entries}]})

    async def run() -> list[Any]:
        nonlocal asked, probing
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        pool = ServerPool(ServerTeacher("http://x", "m", "small", 0, V, requests=2, client=client))
        await pool.load()
        asked, probing = 0, False
        row = [Pass(0, torch.tensor([0]), torch.tensor([5, 6, 7]), torch.tensor([1]))]
        calls = [asyncio.ensure_future(pool.score([row, row])) for _ in range(3)]
        while asked < 3:
            await asyncio.sleep(0.01)
        await pool.close()
        await pool.close()
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert client.is_closed and asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(TeacherClosed):
            await pool.score([])
        return ended

    assert [str(e).splitlines()[0] for e in asyncio.run(run())] == ["teacher small is closed; 6 rows were waiting for it"] * 3


@pytest.mark.parametrize("fault", [None, RuntimeError("of the run")])
def test_a_run_ends_its_teachers_however_it_ends(fault: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from verl_opsd.verl_adapter import trainer

    said: list[Any] = []

    def fit(self: Any, manager: Any) -> None:
        said.append("fit")
        if fault is not None:
            raise fault

    nothing = SimpleNamespace(naming=lambda doing: nullcontext(), interrupting=lambda doing: nullcontext())
    monkeypatch.setattr(PPOTrainerSync, "fit", fit)
    monkeypatch.setattr(trainer, "ActorWatch", lambda *a: nothing)
    monkeypatch.setattr(trainer, "queue_actors", list)
    monkeypatch.setattr(trainer, "close_teachers", lambda teachers: said.append(teachers))
    monkeypatch.setattr(trainer, "check_tasks_unchanged", lambda run: said.append("report"))
    monkeypatch.setattr(trainer, "write_report", lambda *a: None)
    run = SimpleNamespace(stage=lambda *a, **k: nullcontext(), started=lambda: 0.0)
    bare = object.__new__(trainer.OpsdTrainer)
    bare.__dict__ |= {"run_dir": run, "ranks": nothing, "teachers": ["t"], "opsd": None, "tokenizer": None}
    bare.__dict__ |= {"config": SimpleNamespace(trainer=SimpleNamespace(save_freq=1, val_only=False))}
    manager = SimpleNamespace(agent_loop_workers=[])
    if fault is None:
        bare.fit(manager)
    else:
        with pytest.raises(RuntimeError, match="of the run"):
            bare.fit(manager)
    assert said == ["fit", ["t"], *([] if fault else ["report"])]
