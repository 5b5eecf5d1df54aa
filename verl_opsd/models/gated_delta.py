"""Qwen3.5's gated linear attention over packed sequences and over carried state, with kernels that can be exchanged.

transformers' layer runs one sequence, or ignores where packed ones begin in its convolution; this one respects the boundaries in both
the convolution and the delta rule, and hands its state on from one part of a sequence to the next. Weights are the layer's own.

Suffixes: B batch, T tokens, C channels of the convolution, W its width, H key heads, G value heads, K key dimension, V value dimension.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

from verl_opsd.errors import OpsdError


class LayerState(NamedTuple):
    """What one layer leaves for the rest of its sequence: the last inputs of the convolution, and the recurrent state."""

    tail_BWC: Tensor
    memory_BGKV: Tensor


class CarriedState(DynamicCache):
    """State of a sequence after its first tokens: keys and values of attention layers, :class:`LayerState` of the others.

    No tensor is changed in place, so a fork shares what it starts from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear: dict[int, LayerState] = {}

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Whether something has been carried."""
        return bool(self.linear)

    def fork(self) -> CarriedState:
        """An independent continuation from here."""
        out = copy(self)
        out.linear, out.layers = dict(self.linear), [copy(layer) for layer in self.layers]
        return out


class Kernels(Protocol):
    """The operations of the layer that have no matrix product of weights."""

    name: str

    def conv(self, x_BTC: Tensor, weight_CW: Tensor, tail_BWC: Tensor | None, cu: Tensor | None) -> Tensor:
        """[B, T, C] causal depthwise convolution and SiLU; ``tail`` are the W inputs before ``x``, ``cu`` where sequences begin."""

    def delta(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTGV: Tensor,
        decay_BTG: Tensor,
        beta_BTG: Tensor,
        memory_BGKV: Tensor | None,
        cu: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, G, V] of the gated delta rule on l2-normalised queries and keys, and with ``keep`` the final state [B, G, K, V]."""

    def gated_norm(self, x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        """[M, V] RMS norm times the weight times SiLU of the gate."""


def segments(cu: Tensor | None, tokens: int) -> list[tuple[int, int]]:
    """First and last + 1 token of each sequence."""
    return [(0, tokens)] if cu is None else list(itertools.pairwise(cu.tolist()))


def torch_conv(x_BTC: Tensor, weight_CW: Tensor, tail_BWC: Tensor | None, cu: Tensor | None) -> Tensor:
    """:meth:`Kernels.conv` in torch."""
    width, out = weight_CW.shape[1], []
    for a, b in segments(cu, x_BTC.shape[1]):
        part = x_BTC[:, a:b].transpose(1, 2)
        if tail_BWC is None:
            part = F.pad(part, (width - 1, 0))
        else:
            part = torch.cat([tail_BWC[:, 1:].transpose(1, 2), part], dim=2)
        out.append(F.silu(F.conv1d(part, weight_CW[:, None].to(part.dtype), groups=weight_CW.shape[0])).transpose(1, 2))
    return torch.cat(out, dim=1)


def recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTGV: Tensor, decay_BTG: Tensor, beta_BTG: Tensor, memory_BGKV: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule by its definition, token by token; the reference of every kernel.

    S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(K), with q and k of length 1.
    """
    groups = v_BTGV.shape[2] // k_BTHK.shape[2]
    q, k = (F.normalize(t, dim=-1, eps=1e-6).repeat_interleave(groups, dim=2) for t in (q_BTHK, k_BTHK))
    out, memory = [], memory_BGKV
    for t in range(q.shape[1]):
        memory = memory * decay_BTG[:, t, :, None, None].exp()
        read_BGV = (memory * k[:, t, :, :, None]).sum(-2)
        change_BGV = beta_BTG[:, t, :, None] * (v_BTGV[:, t] - read_BGV)
        memory = memory + k[:, t, :, :, None] * change_BGV[:, :, None]
        out.append((memory * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1), memory


class _TorchKernels:
    """Convolution and norm in torch; the delta rule is that of a subclass."""

    conv = staticmethod(torch_conv)

    @staticmethod
    def gated_norm(x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        """See :class:`Kernels`."""
        x = x_MV.float()
        normed_MV = weight_V * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(x_MV.dtype)
        return (normed_MV * F.silu(gate_MV.float())).to(x_MV.dtype)

    def _one(self, parts: list[Tensor], memory: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def delta(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTGV: Tensor,
        decay_BTG: Tensor,
        beta_BTG: Tensor,
        memory_BGKV: Tensor | None,
        cu: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`Kernels`."""
        out, final = [], None
        for a, b in segments(cu, q_BTHK.shape[1]):
            parts = [t[:, a:b] for t in (q_BTHK, k_BTHK, v_BTGV, decay_BTG, beta_BTG)]
            part, final = self._one(parts, memory_BGKV, keep)
            out.append(part)
        return torch.cat(out, dim=1), final


class TorchKernels(_TorchKernels):
    """transformers' chunked form; correct anywhere, slow on an accelerator."""

    name = "torch"

    def _one(self, parts: list[Tensor], memory: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, decay, beta = parts
        groups = v.shape[2] // k.shape[2]
        q, k = (t.repeat_interleave(groups, dim=2) for t in (q, k))
        # transformers' name may stand for an installed kernel; this is the torch code below it.
        rule: Callable[..., Any] = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
        return rule(  # type: ignore[no-any-return]
            q, k, v, g=decay, beta=beta, initial_state=memory, output_final_state=keep, use_qk_l2norm_in_kernel=True
        )


class ReferenceKernels(_TorchKernels):
    """:func:`recurrence`; for checks."""

    name = "reference"

    def _one(self, parts: list[Tensor], memory: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, decay, beta = parts
        start = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if memory is None else memory
        return recurrence(q, k, v, decay, beta, start)


def use_tuned() -> None:
    """Block sizes measured on Hopper (benchmarks/tune.py) instead of Triton's search, which takes minutes at every start, tunes for
    whichever length comes first, and may choose differently on each rank. A user's own FLA_CACHE_MODE is left alone."""
    from fla.ops.utils import cache

    if "FLA_CACHE_MODE" in os.environ or torch.cuda.get_device_capability() != (9, 0):
        return
    os.environ["FLA_CONFIG_DIR"] = str(Path(__file__).parent / "fla_configs/hopper")
    cache.FLA_CACHE_MODE = cache.FlaCacheMode.FULL


class FlaKernels:
    """flash-linear-attention's Triton kernels, and our own for the gated norm: fla's is compiled and searched anew for every 2,048
    tokens of length."""

    name = "fla"

    def __init__(self) -> None:
        use_tuned()
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        self._conv, self._rule = causal_conv1d, chunk_gated_delta_rule

    def conv(self, x_BTC: Tensor, weight_CW: Tensor, tail_BWC: Tensor | None, cu: Tensor | None) -> Tensor:
        """See :class:`Kernels`."""
        state = None if tail_BWC is None else tail_BWC.transpose(1, 2).contiguous()
        y_BTC: Tensor = self._conv(x_BTC, weight_CW.to(x_BTC.dtype), initial_state=state, activation="silu", cu_seqlens=cu)[0]
        return y_BTC

    def delta(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTGV: Tensor,
        decay_BTG: Tensor,
        beta_BTG: Tensor,
        memory_BGKV: Tensor | None,
        cu: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`Kernels`."""
        return self._rule(  # type: ignore[no-any-return]
            q_BTHK,
            k_BTHK,
            v_BTGV,
            g=decay_BTG,
            beta=beta_BTG,
            initial_state=memory_BGKV,
            output_final_state=keep,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu,
        )

    def gated_norm(self, x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        """See :class:`Kernels`."""
        from verl_opsd.models import gates_triton

        return gates_triton.GatedNorm.apply(x_MV, gate_MV, weight_V, eps)  # type: ignore[no-any-return]


class GatedDeltaNet(modeling_qwen3_5.Qwen3_5GatedDeltaNet):
    """transformers' layer by a class swap (:func:`verl_opsd.models.kernels.install`); ``kernels`` is set on each instance."""

    kernels: Kernels

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """[B, T, hidden]. Packed sequences begin at ``cu_seq_lens_q`` (transformers' name) or ``cu_seqlens`` (verl's).

        A padding mask, a cache of transformers, and a slice of a longer sequence (verl's sequence parallelism) take the path below.

        Raises:
            OpsdError: carried state and several packed sequences.
        """
        cu = kwargs.get("cu_seq_lens_q", kwargs.get("cu_seqlens"))
        foreign = cache_params is not None and not isinstance(cache_params, CarriedState)
        if attention_mask is not None or foreign or (cu is not None and int(cu[-1]) != hidden_states.shape[1]):
            kwargs |= {"cache_params": cache_params, "attention_mask": attention_mask}
            return super().forward(hidden_states, **kwargs)  # type: ignore[no-any-return]
        if cache_params is not None and cu is not None:
            raise OpsdError(
                f"carried state with {len(cu) - 1} packed sequences",
                "state is carried for one sequence at a time",
                "score the parts of one sequence in forwards of their own",
            )
        before = None if cache_params is None else cache_params.linear.get(self.layer_idx)
        batch, tokens, _ = hidden_states.shape
        mixed_BTC = self.in_proj_qkv(hidden_states)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        weights = self.conv1d.weight.squeeze(1).split(sizes)
        tails = [None] * 3 if before is None else before.tail_BWC.split(sizes, dim=2)
        parts = zip(mixed_BTC.split(sizes, dim=2), weights, tails, strict=True)
        q, k, v = (self.kernels.conv(x, w, tail, cu) for x, w, tail in parts)
        beta = self.in_proj_b(hidden_states).float().sigmoid()
        rate = F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        out, memory = self.kernels.delta(
            q.reshape(batch, tokens, -1, self.head_k_dim),
            k.reshape(batch, tokens, -1, self.head_k_dim),
            v.reshape(batch, tokens, -1, self.head_v_dim),
            -self.A_log.float().exp() * rate,
            beta,
            None if before is None else before.memory_BGKV,
            cu,
            cache_params is not None,
        )
        if cache_params is not None:
            assert memory is not None
            width = self.conv_kernel_size
            tail = mixed_BTC[:, -width:]
            if before is not None:
                tail = torch.cat([before.tail_BWC, tail], dim=1)[:, -width:]
            tail = F.pad(tail, (0, 0, width - tail.shape[1], 0))  # a copy
            cache_params.linear[self.layer_idx] = LayerState(tail, memory)
        normed = self.kernels.gated_norm(out.reshape(-1, self.head_v_dim), gate, self.norm.weight, self.layer_norm_epsilon)
        return self.out_proj(normed.reshape(batch, tokens, -1))  # type: ignore[no-any-return]
