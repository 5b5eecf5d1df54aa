"""Causal attention without a mask in memory: over packed sequences, and over keys that an earlier part of the same sequence left.

Suffixes: B batch, A heads, T query tokens, S key tokens, D head dimension.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_opsd.errors import OpsdError

#: ``attn_implementation`` of :func:`packed_sdpa`.
ATTENTION = "opsd_sdpa"
#: Output of an attention, and the log of each query's sum of exponentials.
Attended = tuple[Tensor, Tensor]


def causal(query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], scale: float | None, dropout: float) -> Tensor:
    """[B, A, T, D] from queries [B, A, T, D] and keys and values [B, A', S, D]; A is a multiple of A'.

    Args:
        bounds: where sequences begin, and T; with several of them S is T. With one, the queries are the last T of S tokens.
    """
    gqa = query.shape[1] != key.shape[1]
    if len(bounds) == 2 and query.shape[2] != key.shape[2]:
        if _cudnn_is_fastest(query, key, value):
            return in_two(query, key, value, lambda q, k, v, is_causal: _cudnn(q, k, v, is_causal, scale))
        bias: Any = causal_lower_right(query.shape[2], key.shape[2])
        if query.device.type == "cpu":  # math there: the mask is small, and this class knows no groups
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale, enable_gqa=gqa)
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, a:b],
            key[:, :, a:b],
            value[:, :, a:b],
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=gqa,
        )
        for a, b in itertools.pairwise(bounds)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def in_two(query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor, bool], Attended]) -> Tensor:
    """[B, A, T, D] of the last T queries over S > T keys: over all earlier keys, and causally over the last T, then weighed by the sums
    of their exponentials. cuDNN has no mask for queries that begin late, and is twice as fast as the kernel that has.

    Args:
        attend: output [B, A, T, D] and log sum of exponentials [B, A, T] of queries over keys, causally or over all.
    """
    start = key.shape[2] - query.shape[2]
    (early, early_sum), (late, late_sum) = (
        attend(query, key[:, :, part], value[:, :, part], is_causal)
        for part, is_causal in ((slice(0, start), False), (slice(start, None), True))
    )
    return join(early, early_sum, late, late_sum).to(query.dtype)


def join(early_BATD: Tensor, early_sum_BAT: Tensor, late_BATD: Tensor, late_sum_BAT: Tensor) -> Tensor:
    """[B, A, T, D] two attentions of the same queries over different keys as one; in float32, rounded once."""
    if uses_triton(late_BATD):
        from verl_opsd.models import scoring_triton

        return scoring_triton.join(early_BATD, early_sum_BAT, late_BATD, late_sum_BAT)
    share = torch.sigmoid(early_sum_BAT - late_sum_BAT)[..., None].to(torch.float32)
    return torch.lerp(late_BATD.float(), early_BATD.float(), share).to(late_BATD.dtype)


def uses_triton(x: Tensor) -> bool:
    """Whether kernels of ``models.scoring_triton`` take this input."""
    return x.is_cuda and importlib.util.find_spec("triton") is not None


def _cudnn_is_fastest(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not query.is_cuda or torch.is_grad_enabled() or torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    asked = SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    return bool(can_use_cudnn_attention(asked))


def _cudnn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Attended:
    rule = torch.ops.aten._scaled_dot_product_cudnn_attention
    found = rule(query, key, value, None, compute_log_sumexp=True, is_causal=is_causal, scale=scale)
    return found[0], found[1].reshape(query.shape[:3])


def packed_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface over :func:`causal`; packed sequences are told by ``cu_seq_lens_q`` or by the positions.

    Raises:
        OpsdError: a padding mask, a window or a cap, which this attention would ignore.
    """
    if attention_mask is not None:
        raise OpsdError(
            f"{ATTENTION} with an attention mask of shape {tuple(attention_mask.shape)}",
            "it is causal over whole or packed sequences and reads no mask",
            "pack the sequences (actor_rollout_ref.model.use_remove_padding=true), or use attn_implementation=sdpa",
        )
    if kwargs.get("sliding_window") is not None or kwargs.get("softcap") is not None:
        raise OpsdError(
            f"{ATTENTION} in a layer with sliding_window={kwargs.get('sliding_window')} softcap={kwargs.get('softcap')}",
            "it is plain causal attention",
            "use attn_implementation=sdpa or eager for this model",
        )
    cu, position_ids, tokens = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), query.shape[2]
    bounds = [0, tokens]
    if cu is not None:
        bounds = cu.tolist()
    elif position_ids is not None and tokens == key.shape[2]:
        bounds = bounds_of(position_ids)
    dropout = kwargs.get("dropout", 0.0) if module.training else 0.0
    return causal(query, key, value, bounds, kwargs.get("scaling"), dropout).transpose(1, 2), None


def bounds_of(position_ids: Tensor) -> list[int]:
    """Where packed sequences begin (their positions start again at 0), and the number of tokens."""
    position_T = position_ids.reshape(-1, position_ids.shape[-1])[0]
    return [0, *((position_T[1:] == 0).nonzero()[:, 0] + 1).tolist(), len(position_T)]


def register() -> None:
    """Makes :data:`ATTENTION` known to transformers; again does nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: kwargs.get("attention_mask"))
