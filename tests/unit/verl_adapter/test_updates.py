"""What is written back into the queue, with a queue of dictionaries in place of TransferQueue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from verl_opsd.config import LossConfig, ThresholdConfig
from verl_opsd.verl_adapter import updates


class Queue:
    """Rows by key; each row a dictionary of tensors."""

    def __init__(self, rows: dict[str, dict[str, torch.Tensor]]):
        self.rows = rows

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert partition_id == "train"
        return {
            k: torch.nested.as_nested_tensor([self.rows[key][k] for key in keys], layout=torch.jagged) for k in select_fields
        }

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> None:
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(), strict=True):
                self.rows[key][name] = value


class Batch(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.keys)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    rows = {
        "a_0_0": {"opsd_coef": torch.tensor([0.25, 0.25]), "opsd_turn": torch.tensor([0, 0])},
        "b_0_0": {"opsd_coef": torch.tensor([0.5]), "opsd_turn": torch.tensor([3])},
        "p_0_0": {"opsd_coef": torch.zeros(0), "opsd_turn": torch.zeros(0, dtype=torch.int64)},
    }
    rows["a_0_0"]["rm_scores"], rows["b_0_0"]["rm_scores"] = torch.tensor([0.0, 0.5]), torch.tensor([1.0])
    fake = Queue(rows)
    monkeypatch.setattr(updates, "tq", fake)
    return fake


def test_threshold_at_collection_replaces_the_coefficients_row_by_row(queue: Queue) -> None:
    batch = Batch(keys=["b_0_0", "p_0_0", "a_0_0"], partition_id="train")
    loss = LossConfig(threshold=ThresholdConfig(0.05, "collection", "kept"))
    kl = [torch.tensor([0.06]), torch.zeros(0), torch.tensor([0.04, 0.07])]
    share = updates.mask_at_collection(batch, kl, [0, 0, 0], loss)
    assert share == pytest.approx(2 / 3)
    assert queue.rows["a_0_0"]["opsd_coef"].tolist() == pytest.approx([0, 1 / 3])
    assert queue.rows["b_0_0"]["opsd_coef"].tolist() == pytest.approx([2 / 3])
    assert queue.rows["p_0_0"]["opsd_coef"].numel() == 0


def test_rewards_are_those_of_real_rows(queue: Queue) -> None:
    tags = [{"is_padding": False}, {"is_padding": True}, {}]
    batch = Batch(keys=["a_0_0", "p_0_0", "b_0_0"], tags=tags, partition_id="train")
    assert updates.rewards_of(batch) == {"a_0": 0.5, "b_0": 1.0}
