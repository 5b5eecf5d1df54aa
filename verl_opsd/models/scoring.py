"""Layers of a Qwen3.5 model that only scores: one sequence, no gradient, what lies between products and attention in one kernel each.

A layer hands its last sum on unmade (:class:`Sum`), and the next norm makes it. With Triton and a CUDA device the operations are
those of ``models.scoring_triton``; elsewhere the definitions below run, which are transformers' own.

Suffixes: B batch, T tokens, A heads, D head dimension, R its rotated part, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from verl_opsd.models import attention, kernels
from verl_opsd.models.gated_delta import FlaKernels, GatedDeltaNet


class Sum(NamedTuple):
    """Hidden states: what a residual stream holds, and what its last layer adds."""

    x_BTH: Tensor
    branch_BTH: Tensor | None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm with weight 1 + w, in float32."""
    value = x.float()
    return (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)


def add_norm(x: Tensor, branch: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch (x itself where there is none), and its norm."""
    if attention.uses_triton(x):
        from verl_opsd.models import scoring_triton

        return scoring_triton.add_norm(x, branch, weight_H, eps)
    total = x if branch is None else x + branch
    return total, rms_norm(total, weight_H, eps)


def rope_norm(x_BTAD: Tensor, weight_D: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, eps: float) -> Tensor:
    """[B, A, T, D] norm of each head, its first R numbers rotated by the token's angles."""
    if attention.uses_triton(x_BTAD):
        from verl_opsd.models import scoring_triton

        return scoring_triton.rope_norm(x_BTAD, weight_D, cos_BTR, sin_BTR, eps)
    y_BATD = rms_norm(x_BTAD, weight_D, eps).transpose(1, 2)
    turned, rest = y_BATD.split([cos_BTR.shape[-1], y_BATD.shape[-1] - cos_BTR.shape[-1]], dim=-1)
    along = turned * cos_BTR[:, None] + qwen3_5.rotate_half(turned) * sin_BTR[:, None]
    return torch.cat([along, rest], dim=-1)


def gate_heads(x_BATD: Tensor, gate_BTAD: Tensor) -> Tensor:
    """[B, T, A D] x times the sigmoid of its gate."""
    if attention.uses_triton(x_BATD):
        from verl_opsd.models import scoring_triton

        return scoring_triton.gate_heads(x_BATD, gate_BTAD)
    return x_BATD.transpose(1, 2).flatten(2) * torch.sigmoid(gate_BTAD.flatten(2))


class ScoringKernels(FlaKernels):
    """flash-linear-attention's, with the gated norm in one kernel that has no gradient."""

    def gated_norm(self, x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        """See :class:`~verl_opsd.models.gated_delta.Kernels`."""
        from verl_opsd.models import scoring_triton

        return scoring_triton.gated_norm(x_MV, gate_MV, weight_V, eps)


class ScoringAttention(qwen3_5.Qwen3_5Attention):
    """transformers' attention of one sequence; a mask or packed sequences take transformers' path."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers'."""
        if attention_mask is not None or kwargs.get("cu_seq_lens_q") is not None:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)  # type: ignore[no-any-return]
        shape = *hidden_states.shape[:2], -1
        query, gate = self.q_proj(hidden_states).view(*shape, 2 * self.head_dim).chunk(2, dim=-1)
        key, value = (p(hidden_states).view(*shape, self.head_dim) for p in (self.k_proj, self.v_proj))
        query = rope_norm(query, self.q_norm.weight, *position_embeddings, self.q_norm.eps)
        key, value = rope_norm(key, self.k_norm.weight, *position_embeddings, self.k_norm.eps), value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attended = attention.causal(query, key, value, [0, query.shape[2]], self.scaling, 0.0)
        return self.o_proj(gate_heads(attended, gate)), None


class ScoringLayer(qwen3_5.Qwen3_5DecoderLayer):
    """transformers' layer, from and to a :class:`Sum`; the first one gets a tensor."""

    def forward(
        self,
        hidden_states: Tensor | Sum,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Sum:
        """As transformers', with the last sum left to whoever is next."""
        given = hidden_states if isinstance(hidden_states, Sum) else Sum(hidden_states, None)
        x, normed = add_norm(*given, self.input_layernorm.weight, self.input_layernorm.eps)
        if hasattr(self, "linear_attn"):
            mixed = self.linear_attn(normed, cache_params=past_key_values, attention_mask=attention_mask, **kwargs)
        else:
            mixed, _ = self.self_attn(
                normed,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
        x, normed = add_norm(x, mixed, self.post_attention_layernorm.weight, self.post_attention_layernorm.eps)
        return Sum(x, self.mlp(normed))


class LastNorm(qwen3_5.Qwen3_5RMSNorm):
    """The norm behind the last layer."""

    def forward(self, x: Tensor | Sum) -> Tensor:
        """Of a :class:`Sum`."""
        given = x if isinstance(x, Sum) else Sum(x, None)
        return add_norm(*given, self.weight, self.eps)[1]


def install(model: nn.Module) -> None:
    """Swaps the classes of a frozen Qwen3.5 model's layers for these; after :func:`verl_opsd.models.kernels.install`."""
    swaps: dict[type, type] = {qwen3_5.Qwen3_5DecoderLayer: ScoringLayer}
    swaps |= dict.fromkeys((qwen3_5.Qwen3_5Attention, kernels.GatedAttention), ScoringAttention)
    fla: ScoringKernels | None = None
    for m in model.modules():
        m.__class__ = swaps.get(type(m), type(m))
        if isinstance(m, qwen3_5.Qwen3_5TextModel):
            m.norm.__class__ = LastNorm
        if isinstance(m, GatedDeltaNet) and type(m.kernels) is FlaKernels:
            fla = m.kernels = fla or ScoringKernels()
