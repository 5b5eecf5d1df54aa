"""Ulysses sequence parallelism: an attention that is right under it without flash attention, and the head's work split by position.

Each rank of a sequence-parallel group holds one slice of a packed sequence. Attention exchanges heads for positions, so every rank sees
whole sequences of some heads; the vocabulary head works on the loss positions of its own slice, whose teacher signal may come from
another rank's slice (student's and teacher's sequences differ in length), and per-position values are gathered again.

Suffixes: B batch, A heads, T tokens of the packed sequence, D head dimension, N loss positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

from verl_opsd.distill.head import HeadResult, HeadTask
from verl_opsd.errors import OpsdError
from verl_opsd.models.attention import bounds_of, causal

#: ``attn_implementation`` of :func:`ulysses_sdpa`.
ATTENTION = "ulysses_sdpa"


def ulysses_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal SDPA over packed sequences, [1, A, T / ranks, D] each; one call for each sequence, which begins where the position is 0.

    Raises:
        OpsdError: several rows, no position ids, or keys from a cache: where sequences begin would not be known.
    """
    position_ids = kwargs.get("position_ids")
    if position_ids is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise OpsdError(
            f"{ATTENTION} with {query.shape[0]} rows, {query.shape[2]} queries, {key.shape[2]} keys, "
            f"position ids {'given' if position_ids is not None else 'missing'}",
            "it is for packed sequences: one row, and positions that start again at 0",
            "set actor_rollout_ref.model.use_remove_padding=true, or use another attention",
        )
    ranks = get_ulysses_sequence_parallel_world_size()
    position_T = position_ids.reshape(-1, position_ids.shape[-1])[0]
    if ranks > 1:
        repeat = max(ranks // key.shape[1], 1)
        key, value = (t.repeat_interleave(repeat, dim=1) for t in (key, value))
        query, key, value = (gather_seq_scatter_heads(t, seq_dim=2, head_dim=1) for t in (query, key, value))
        slices = [torch.empty_like(position_T) for _ in range(ranks)]
        dist.all_gather(slices, position_T.contiguous(), group=get_ulysses_sequence_parallel_group())
        position_T = torch.cat(slices)
    dropout = kwargs.get("dropout", 0.0) if module.training else 0.0
    out = causal(query, key, value, bounds_of(position_T), kwargs.get("scaling"), dropout).transpose(
        1, 2
    )  # [1, T, A / ranks, D]
    return gather_heads_scatter_seq(out, head_dim=2, seq_dim=1) if ranks > 1 else out, None


def register() -> None:
    """Makes :data:`ATTENTION` known to transformers; again does nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, ulysses_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


def is_right(attention: str | None) -> bool:
    """Whether an attention sees whole sequences under sequence parallelism: verl's patched flash attention, and ours."""
    return str(attention).startswith("flash_attention") or attention == ATTENTION


def local_task(task: HeadTask, start: int, length: int) -> tuple[HeadTask, Tensor]:
    """The part of a task whose positions lie in ``start..start + length``, relative to it, and which ones these are, bool[N]."""
    mine_N = (task.index_N >= start) & (task.index_N < start + length)

    def rows(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[mine_N.to(value.device)]

    part = dataclasses.replace(
        task,
        index_N=task.index_N[mine_N] - start,
        labels_N=rows(task.labels_N),
        teacher=None if task.teacher is None else task.teacher.rows(mine_N),
        coef_N=rows(task.coef_N),
        anchor=None if task.anchor is None else task.anchor.rows(mine_N),
        anchor_coef_N=rows(task.anchor_coef_N),
        behaviour_logprob_N=rows(task.behaviour_logprob_N),
    )
    return part, mine_N


def gathered(value: Tensor, mine_N: Tensor, group: Any) -> Tensor:
    """[N, ...] from the parts [n, ...] of a group's ranks; each position is of one rank."""
    out = value.new_zeros(len(mine_N), *value.shape[1:])
    out[mine_N] = value.detach()
    dist.all_reduce(out, group=group)
    return out


def gathered_result(result: HeadResult, mine_N: Tensor, group: Any) -> HeadResult:
    """The values of all positions, on every rank of the group."""
    return HeadResult(**{k: gathered(v, mine_N, group) for k, v in result.__dict__.items()})


def gathered_logits(logits_1TV: Tensor, tokens: int, group: Any) -> Tensor:
    """[1, tokens, V] of the whole packed sequence, without its padding; for checks on a few tokens."""
    parts = [torch.empty_like(logits_1TV) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits_1TV.contiguous(), group=group)
    return torch.cat(parts, dim=1)[:, :tokens]
