"""Key-value caches that outlive a request: one a session, so that a turn costs its new tokens.

`FlatCache` holds the keys and values of a model whose layers all attend to the whole past. Several sessions run in one
forward pass as segments of one flat row (no padding, no mask between them): linear layers see all tokens at once,
attention runs segment by segment against each session's own cache. It can be cropped and its prefix copied.

`RecurrentCache` wraps transformers' cache for every other model (recurrent, hybrid, sliding), one session a forward
pass. Its state cannot be rolled back (cropping a hybrid cache is silently wrong), so it is only ever extended or
rebuilt.

Legend: L layers, G key-value heads, H query heads, T tokens of the forward pass, S cached tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PretrainedConfig

from verl_opsd.errors import OpsdError

ATTENTION = "opsd_flat"
#: Capacity is allocated in blocks of this many tokens.
BLOCK = 64
#: A shared prefix shorter than this is computed again rather than copied.
MIN_COPY = 32


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@dataclass(frozen=True)
class CacheShape:
    """What a cache costs: so much a token, and ``state_bytes`` whatever its length (recurrent states)."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    state_bytes: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, state_bytes: int = 0) -> CacheShape:
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(sum("attention" in t and t != "linear_attention" for t in types), kv_heads, head_dim, dtype, state_bytes)

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class SessionCache:
    """What the store needs to know of a cache: whose it is, which ids it holds, what it costs."""

    croppable = False

    def __init__(self, shape: CacheShape, session: str | None):
        self.shape, self.session = shape, session
        self.ids = np.zeros(0, np.int32)
        self.capacity = 0
        self.busy = False
        self.last_used = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes held or reserved."""
        return self.capacity * self.shape.token_bytes + self.shape.state_bytes

    def reserve(self, capacity: int) -> None:
        """Makes room for ``capacity`` tokens in all."""
        self.capacity = max(self.capacity, capacity)


class FlatCache(SessionCache):
    """Preallocated keys and values, ``data`` of shape (L, 2, G, capacity, D)."""

    croppable = True

    def __init__(self, shape: CacheShape, session: str | None):
        super().__init__(shape, session)
        self.data = torch.empty(shape.layers, 2, shape.kv_heads, 0, shape.head_dim, dtype=shape.dtype)

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        grown = torch.empty(*self.data.shape[:3], capacity, self.shape.head_dim, dtype=self.shape.dtype)
        grown[:, :, :, : len(self)] = self.data[:, :, :, : len(self)]
        self.data, self.capacity = grown, capacity

    def crop(self, length: int) -> None:
        """Forgets everything from ``length`` on."""
        self.ids = self.ids[:length]

    def copy_prefix(self, other: FlatCache, length: int) -> None:
        """Takes the first ``length`` tokens of another session's cache into this empty one."""
        self.data[:, :, :, :length] = other.data[:, :, :, :length]
        self.ids = other.ids[:length].copy()

    def write(self, layer: int, key_GTD: Tensor, value_GTD: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one layer's new tokens behind the cached ones and returns views of all of them, (G, S, D) each."""
        start, end = len(self), len(self) + key_GTD.shape[1]
        self.data[layer, 0, :, start:end] = key_GTD
        self.data[layer, 1, :, start:end] = value_GTD
        return self.data[layer, 0, :, :end], self.data[layer, 1, :, :end]


class RecurrentCache(SessionCache):
    """transformers' own cache of one session; extended or rebuilt, never cropped."""

    def __init__(self, shape: CacheShape, session: str | None, config: PretrainedConfig):
        super().__init__(shape, session)
        self.past = DynamicCache(config=config)


def recurrent_state_bytes(model: nn.Module, config: PretrainedConfig) -> int:
    """Bytes of one session's recurrent states, from a pass over one token."""
    past = DynamicCache(config=config)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=past, use_cache=True)
    states = [t for layer in past.layers for name, t in vars(layer).items() if name not in ("keys", "values")]
    return sum(t.nbytes for t in states if isinstance(t, Tensor))


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, end)`` of the flat row belong to this cache."""

    cache: FlatCache
    start: int
    end: int


def flat_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: list[Segment] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment over its own cache; without segments, over the row itself.

    Shapes: query (1, H, T, D), key and value (1, G, T, D); returns (1, T, H, D).
    """
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise OpsdError(
            "attention with a mask or a sliding window",
            f"{ATTENTION} serves models whose layers all attend to the whole past, as segments without padding",
            "report the model: it should have been given a RecurrentCache",
        )
    if segments is None:
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    out = torch.empty_like(query)
    heads, groups, layer = query.shape[1], key.shape[1], int(module.layer_idx)  # type: ignore[arg-type]
    for s in segments:
        k, v = s.cache.write(layer, key[0, :, s.start : s.end], value[0, :, s.start : s.end])
        q, n, total = query[:, :, s.start : s.end], s.end - s.start, k.shape[1]
        if n == 1:
            # The query heads of a group become query positions: no copy of the keys for each head.
            q = q.reshape(1, groups, heads // groups, -1)
            out[:, :, s.start : s.end] = F.scaled_dot_product_attention(q, k[None], v[None], scale=scaling).reshape(
                1, heads, 1, -1
            )
            continue
        mask = None if n == total else torch.ones(n, total, dtype=torch.bool).tril(total - n)
        out[:, :, s.start : s.end] = F.scaled_dot_product_attention(
            q, k[None], v[None], attn_mask=mask, scale=scaling, is_causal=mask is None, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, flat_attention)


def attends_to_whole_past(config: PretrainedConfig) -> bool:
    """Whether every layer is plain full attention, so that `FlatCache` serves the model."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return all(t == "full_attention" for t in types)
    return getattr(config, "sliding_window", None) is None and config.model_type in ("llama", "qwen2", "qwen3")


class CacheStore:
    """All kept caches under a byte budget; idle ones are evicted least recently used first.

    Args:
        model: the model to be served.
        budget_bytes: caches of all sessions together.
        max_tokens: context length; a cache never grows beyond it.
    """

    def __init__(self, model: nn.Module, budget_bytes: int, max_tokens: int):
        self.config: PretrainedConfig = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.budget_bytes, self.max_tokens = budget_bytes, max_tokens
        self.flat = attends_to_whole_past(self.config)
        state_bytes = 0 if self.flat else recurrent_state_bytes(model, self.config)
        self.shape = CacheShape.of(self.config, model.dtype, state_bytes)  # type: ignore[arg-type]
        self.caches: list[SessionCache] = []
        self.evictions = 0
        self.copied_tokens = 0
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes held or reserved by all caches."""
        return sum(c.nbytes for c in self.caches)

    def acquire(self, session: str | None, prompt: NDArray[np.int32], need: int) -> SessionCache | None:
        """A busy cache with room for ``need`` tokens that holds as much of the prompt's prefix as is known.

        At least the last prompt token is left to compute: its logits are needed. Returns None when other requests hold
        the budget at the moment.

        Raises:
            OpsdError: the request alone exceeds the budget.
        """
        capacity = -(-need // BLOCK) * BLOCK
        if self._bytes(capacity) > self.budget_bytes:
            raise OpsdError(
                f"a request of {need} tokens needs {self._bytes(capacity)} bytes of key-value cache",
                f"the budget is {self.budget_bytes} bytes",
                "raise rollout.engine_kwargs.opsd.kv_cache_bytes or lower max_tokens",
            )
        own, keep = self._own(session, prompt)
        if own is None and session is not None:  # a recurrent cache that the prompt left behind: it is rebuilt
            self.caches = [c for c in self.caches if c.busy or c.session != session]
        if own is not None and capacity > own.capacity:
            # Growing copies the cache, so it grows by half where there is room anyway: all copies stay linear.
            roomy = max(capacity, min(own.capacity * 3 // 2, self.max_tokens))
            if self.nbytes - own.nbytes + self._bytes(roomy) <= self.budget_bytes:
                capacity = roomy
        if not self._make_room(capacity, own):
            return None
        if own is None:
            own = FlatCache(self.shape, session) if self.flat else RecurrentCache(self.shape, session, self.config)
            source, shared = self._best_prefix(prompt)  # before the new cache joins the store
            self.caches.append(own)
            own.reserve(capacity)
            if isinstance(own, FlatCache) and source is not None:
                own.copy_prefix(source, shared)
                self.copied_tokens += shared
        else:
            if isinstance(own, FlatCache):
                own.crop(keep)
            own.reserve(capacity)
        own.busy = True
        return own

    def release(self, cache: SessionCache) -> None:
        """The request is over; the cache stays until it is evicted."""
        self._clock += 1
        cache.busy, cache.last_used = False, self._clock

    def clear(self) -> None:
        """Drops every idle cache: other weights, or memory wanted elsewhere."""
        self.caches = [c for c in self.caches if c.busy]

    def _own(self, session: str | None, prompt: NDArray[np.int32]) -> tuple[SessionCache | None, int]:
        """(the idle cache to go on with, tokens of it that stay). A cache without a session is only ever extended."""
        best: tuple[SessionCache | None, int] = (None, 0)
        for c in self.caches:
            if c.busy or c.session != session:
                continue
            keep = min(common_prefix(c.ids, prompt), len(prompt) - 1)
            extends = keep == len(c)
            if (extends or (c.croppable and session is not None)) and (best[0] is None or keep > best[1]):
                best = (c, keep)
        return best

    def _best_prefix(self, prompt: NDArray[np.int32]) -> tuple[FlatCache | None, int]:
        best: tuple[FlatCache | None, int] = (None, MIN_COPY - 1)
        for c in self.caches:
            if isinstance(c, FlatCache):
                shared = min(common_prefix(c.ids, prompt), len(prompt) - 1)
                if shared > best[1]:
                    best = (c, shared)
        return best

    def _bytes(self, capacity: int) -> int:
        return capacity * self.shape.token_bytes + self.shape.state_bytes

    def _make_room(self, capacity: int, own: SessionCache | None) -> bool:
        """Evicts idle caches, oldest first, until a cache of ``capacity`` tokens fits beside those that stay.

        ``own`` is the cache that will grow to it. False, and nothing evicted, when running requests hold the room.
        """
        others = [c for c in self.caches if c is not own]
        held, wanted = sum(c.nbytes for c in others), self._bytes(capacity)
        busy = sum(c.nbytes for c in others if c.busy)
        if busy and busy + wanted > self.budget_bytes:
            return False
        for c in sorted((c for c in others if not c.busy), key=lambda c: c.last_used):
            if held + wanted <= self.budget_bytes:
                break
            self.caches.remove(c)
            self.evictions += 1
            held -= c.nbytes
        return True
