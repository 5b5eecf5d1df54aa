"""Ulysses sequence parallelism: an attention that is right under it without flash attention, and the head's work split by position.

Each rank of a sequence-parallel group holds one slice of a packed sequence. Attention exchanges heads for positions, so every rank sees
whole sequences of some heads; a layer of gated linear attention, whose state runs along the sequence, sees all of it on every rank and
keeps the rank's slice; the vocabulary head works on the loss positions of its own slice, whose teacher signal may come from
another rank's slice (student's and teacher's sequences differ in length), and per-position values are gathered again.

Suffixes: B batch, A heads, T tokens of the packed sequence, D head dimension, N loss positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from verl_opsd.models.gated_delta import GatedDeltaNet

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


class _Whole(torch.autograd.Function):
    """[1, T, H] from the slices [1, T / ranks, H] of a group's ranks, each of which uses the whole for its own part of the loss: a slice's
    gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.length = group, part.shape[1]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.narrow(1, dist.get_rank(ctx.group) * ctx.length, ctx.length), None


class SharedDeltaNet(GatedDeltaNet):
    """Gated linear attention over the whole sequence on every rank of a group, which keeps its slice: right for any number of heads; its
    products are not shared between the ranks. By a class swap (:func:`share_sequences`)."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[1, T / ranks, H]; where packed sequences begin is told for the whole, as :class:`GatedDeltaNet` is."""
        if get_ulysses_sequence_parallel_world_size() == 1:
            return super().forward(hidden_states, cache_params, attention_mask, **kwargs)
        group, length = get_ulysses_sequence_parallel_group(), hidden_states.shape[1]
        whole_1TH = _Whole.apply(hidden_states, group)
        out_1TH = super().forward(whole_1TH, cache_params, attention_mask, **kwargs)
        return out_1TH.narrow(1, dist.get_rank(group) * length, length)


def share_sequences(model: nn.Module) -> None:
    """Makes a model's layers of gated linear attention right under sequence parallelism; after their kernels are chosen."""
    for m in model.modules():
        if type(m) is GatedDeltaNet:
            m.__class__ = SharedDeltaNet


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
