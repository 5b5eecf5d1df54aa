"""The trainer's scoring step on a local Ray: verl's resource pool, the teacher's workers, and the rows in TransferQueue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from tensordict import TensorDict

from verl_opsd.config import TeacherConfig
from verl_opsd.models.tiny import make_tiny
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.tokens.rows import padding_fields

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def local_ray() -> Iterator[None]:
    env = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}}
    ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, object_store_memory=100_000_000, runtime_env=env)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    yield
    ray.shutdown()


def test_signal_of_every_row_is_in_the_queue(tmp_path: Path) -> None:
    import transfer_queue as tq
    from verl.single_controller.ray import RayResourcePool
    from verl.utils.transferqueue_utils import _meta_to_realdata

    from verl_opsd.verl_adapter.passes import jagged
    from verl_opsd.verl_adapter.teacher import teacher_pool
    from verl_opsd.verl_adapter.trainer import OpsdTrainer

    path = str(make_tiny(tmp_path / "teacher", seed=5, hidden_size=96))
    pool = teacher_pool(TeacherConfig("device", path, 1, "float32"), RayResourcePool([1], use_gpu=True, name_prefix="t"))
    g = torch.Generator().manual_seed(3)
    own = [torch.randint(2048, (n,), generator=g) for n in (12, 9, 15)]
    brief = torch.randint(2048, (4,), generator=g)
    position = [torch.tensor([3, 6, 7]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 12])]
    rows = []
    for ids, p in zip(own, position, strict=True):
        row = padding_fields(ids)
        if len(p):
            row |= {k: torch.zeros(len(p), dtype=v.dtype) for k, v in row.items() if v.numel() == 0} | {"opsd_position": p}
            row |= {
                "opsd_view_ids": torch.cat([brief, ids]),
                "opsd_view_len": torch.tensor([len(ids) + 4]),
                "opsd_view_pos": p + 4,
            }
        rows.append(row | {"input_ids": ids})
    tq.init()
    keys = ["a_0", "b_0", "c_0"]
    fields = TensorDict({k: jagged([r[k] for r in rows]) for k in rows[0]}, batch_size=3)
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{}] * 3)
    batch.extra_info = {"epochs": 2}

    own_teacher = DeviceTeacher(path, torch.float32, "cpu", "t")
    for source in ("own", "view", "own"):  # written again each time
        scored = OpsdTrainer.score(SimpleNamespace(teacher=pool, signals=None), batch, source)  # type: ignore[arg-type]
        assert scored.keys == keys and scored.extra_info == {"epochs": 2} and "opsd_signal" in scored.fields
        data = _meta_to_realdata(scored)  # what a training worker gets
        signals = data["opsd_signal"].unbind()
        assert [tuple(s.shape) for s in signals] == [(3, 96), (0, 96), (2, 96)]
        for ids, p, signal in zip(own, position, signals, strict=True):
            if len(p):
                view, shift = (ids, 0) if source == "own" else (torch.cat([brief, ids]), 4)
                want = own_teacher.score([Pass(0, torch.arange(len(p)), view, p + shift)]).hidden_NH
                assert want is not None and float((signal - want).norm() / want.norm()) < 1e-6
    tq.close()
