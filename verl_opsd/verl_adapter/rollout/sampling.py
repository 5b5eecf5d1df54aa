"""How a token is drawn from logits, and which log-probability is reported for it.

Same meaning as vLLM's ``processed_logprobs``: log-softmax after temperature, top-k and top-p. At temperature 1 without
limits this is the plain log-softmax. Greedy decoding (temperature 0) reports the plain log-softmax too.
Legend: V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class SamplingParams:
    """One request. ``temperature=0``: greedy; ``top_k=-1``: no limit; ``max_tokens`` counts the stop token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    logprobs: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise OpsdError(
                f"max_tokens={self.max_tokens}",
                "a request asks for at least one new token",
                "shorten the prompt or raise max_tokens / the model's context length",
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1 or (self.top_k != -1 and self.top_k < 1):
            raise OpsdError(
                f"sampling temperature={self.temperature} top_p={self.top_p} top_k={self.top_k}",
                "temperature >= 0, 0 < top_p <= 1, top_k = -1 (no limit) or >= 1",
                "correct the request's sampling parameters",
            )

    @classmethod
    def parse(cls, given: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
        """Reads the dict that verl's client sends to a rollout server.

        Raises:
            OpsdError: a key that this engine does not implement, or a value out of range.
        """
        values = dict(given)
        if values.pop("repetition_penalty", 1.0) != 1.0:
            raise OpsdError(
                f"repetition_penalty={given['repetition_penalty']}",
                "the embedded engine samples from the model's own distribution only",
                "set actor_rollout_ref.rollout.repetition_penalty=1.0",
            )
        if "max_new_tokens" in values and "max_tokens" not in values:
            values["max_tokens"] = values.pop("max_new_tokens")
        values.setdefault("max_tokens", default_max_tokens)
        logprobs = values.pop("logprobs", False)
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise OpsdError(
                f"sampling parameters {unknown}",
                f"the embedded engine knows {sorted([*cls.__dataclass_fields__, 'repetition_penalty'])}",
                "remove them, or use rollout.name=vllm",
            )
        # verl sends True; vLLM's own form is the number of extra candidates, where 0 means the sampled token only.
        return cls(**values, logprobs=logprobs is not None and logprobs is not False)


def request_generator(seed: int, session: str, turn: int) -> torch.Generator:
    """A generator that depends on nothing but its arguments, so that a turn can be replayed exactly."""
    digest = hashlib.sha256(f"{seed}|{session}|{turn}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def processed_logprobs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """float32[V]: log-softmax after temperature, top-k, top-p; -inf outside the kept set."""
    z_V = logits_V.float()
    if params.temperature == 0:
        return torch.log_softmax(z_V, -1)
    if params.temperature != 1:
        z_V = z_V / params.temperature
    if 0 < params.top_k < z_V.numel():
        z_V = z_V.masked_fill(z_V < z_V.topk(params.top_k).values[-1], float("-inf"))
    if params.top_p < 1:
        sorted_V, order_V = z_V.sort(descending=True, stable=True)
        p_V = sorted_V.softmax(-1)
        # A token is kept when the mass before it is below top_p: the smallest set that reaches top_p.
        drop_V = p_V.cumsum(-1) - p_V >= params.top_p
        z_V = z_V.masked_fill(torch.zeros_like(drop_V).scatter(0, order_V, drop_V), float("-inf"))
    return torch.log_softmax(z_V, -1)


def sample(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """(token id, its log-probability in nats under the processed distribution)."""
    logp_V = processed_logprobs(logits_V, params)
    if params.temperature == 0:
        token = int(logp_V.argmax())
    else:
        token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
    return token, float(logp_V[token])
