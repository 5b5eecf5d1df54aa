"""A round's rows in the queue: reading them, and what happens to them between scoring and the update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_opsd.config import LossConfig
from verl_opsd.verl_adapter.passes import jagged
from verl_opsd.verl_adapter.reduce import episode_of, with_threshold


def rows_in_queue(batch: KVBatchMeta, names: Sequence[str]) -> list[dict[str, Tensor]]:
    """Fields of every row, in the order of ``batch``."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))
    columns = {k: list(data[k].unbind()) for k in names}
    return [{k: columns[k][i] for k in names} for i in range(len(batch))]


def rewards_of(batch: KVBatchMeta) -> dict[str, float]:
    """The reward of each episode of a round; padding rows are copies and have none."""
    keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    scores = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])["rm_scores"]
    return {episode_of(key): float(score.sum()) for key, score in zip(keys, scores.unbind(), strict=True)}


def mask_at_collection(
    batch: KVBatchMeta, divergences: Sequence[torch.Tensor], groups: Sequence[int], loss: LossConfig
) -> float:
    """Puts into the rows their coefficients under the threshold; see :func:`reduce.with_threshold`.

    Returns:
        Share of the loss positions that is kept.
    """
    rows = rows_in_queue(batch, ("opsd_coef", "opsd_turn"))
    coefs, share = with_threshold(rows, divergences, batch.keys, groups, loss)
    fields = TensorDict({"opsd_coef": jagged(coefs)}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return share
