"""Rows of a round on ranks: every rank's part of an optimizer step is whole micro-batches of rows of that step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_opsd.config import LossConfig
from verl_opsd.verl_adapter import trainer
from verl_opsd.verl_adapter.reduce import episode_of

#: Three episodes of 2, 3 and 1 rows; b's second row carries nothing.
KEYS = ["a_0", "a_1", "b_0", "b_1", "b_2", "c_0"]
CARRIES = [1, 1, 1, 0, 1, 1]


def balanced(
    monkeypatch: pytest.MonkeyPatch, dp: int, dynamic: bool, update: int, control: int
) -> tuple[KVBatchMeta, list[int]]:
    """The batch after balancing with an optimizer step for each episode, and the step of each row."""
    rows = [{"opsd_coef": torch.tensor([float(c)])} for c in CARRIES]
    monkeypatch.setattr(trainer, "rows_in_queue", lambda batch, names: rows)

    def pad(batch: KVBatchMeta, multiple: int, token: int) -> KVBatchMeta:  # verl's, without its queue
        more = -len(batch) % multiple
        tags = batch.tags + [{"seq_len": 2, "is_padding": True}] * more
        return KVBatchMeta(keys=batch.keys + [f"pad_{i}" for i in range(more)], tags=tags, partition_id="train", fields=None)

    monkeypatch.setattr(trainer, "upsample_batch_to_divisible_size", pad)
    sizes = {"actor": {"use_dynamic_bsz": dynamic, "ppo_micro_batch_size_per_gpu": update}}
    sizes |= {"rollout": {"log_prob_micro_batch_size_per_gpu": control}}
    this = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_query_dispatch_info=lambda role: list(range(dp)), _dispatch_info={}),
        opsd=SimpleNamespace(loss=LossConfig(episodes_per_update=1)),
        config=OmegaConf.create({"actor_rollout_ref": sizes}),
        tokenizer=SimpleNamespace(eos_token_id=0),
    )
    tags = [{"seq_len": 10 * i + 3, "is_padding": False} for i in range(len(KEYS))]
    batch = KVBatchMeta(keys=list(KEYS), tags=tags, partition_id="train", fields=None)
    batch = trainer.OpsdTrainer._balance_batch(this, batch, {})  # type: ignore[arg-type]
    return batch, this._group_of  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dp", "dynamic", "update", "control", "each"),
    [
        (1, False, 1, 1, 3),
        (2, False, 1, 1, 2),
        (1, False, 2, 1, 4),
        (2, False, 2, 3, 6),
        (2, False, 4, 2, 4),
        (2, True, 4, 3, 2),
    ],
)
def test_every_step_is_whole_micro_batches_on_every_rank(monkeypatch, dp, dynamic, update, control, each):
    """``each``: rows of a rank in a step; the largest episode has 3."""
    batch, step_of = balanced(monkeypatch, dp, dynamic, update, control)
    assert len(batch) == len(step_of) == 3 * dp * each
    for rank in range(dp):
        mine = range(rank * 3 * each, (rank + 1) * 3 * each)
        for step in range(3):  # verl cuts a rank's rows in order
            part = mine[step * each : (step + 1) * each]
            assert {step_of[i] for i in part} == {step}
    real = {key: step_of[i] for i, key in enumerate(batch.keys) if not batch.tags[i]["is_padding"]}
    assert sorted(real) == sorted(KEYS)
    assert all(real[key] == "abc".index(episode_of(key)) for key in KEYS)
