"""Small random models of the three kinds that the embedded engine serves, and an independent reference for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

VOCAB = 512


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, initializer_range=0.1,
        )
    )  # fmt: skip


def _llama() -> PreTrainedModel:
    # SmolLM2-135M's ratios: nine query heads over three key-value heads.
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=72, intermediate_size=96, num_hidden_layers=3, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, initializer_range=0.1,
        )
    )  # fmt: skip


def _hybrid() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, initializer_range=0.05,
        )
    )  # fmt: skip


KINDS: dict[str, Callable[[], PreTrainedModel]] = {"qwen3": _qwen3, "llama": _llama, "hybrid": _hybrid}


@dataclass(frozen=True)
class Models:
    """The model to serve, and the same weights as transformers' stock uncached model."""

    kind: str
    served: PreTrainedModel
    stock: PreTrainedModel

    @property
    def flat(self) -> bool:
        return self.kind != "hybrid"

    def reference(self, prompt: list[int], reply: list[int], temperature: float = 1.0) -> torch.Tensor:
        """float32[R]: log-probability of each reply token, from one uncached pass over the whole sequence."""
        with torch.no_grad():
            logits = self.stock(torch.tensor([prompt + reply]), use_cache=False).logits[0].float() / temperature
        logp = torch.log_softmax(logits, -1)
        return logp[torch.arange(len(prompt) - 1, len(prompt) + len(reply) - 1), torch.tensor(reply)]


def build(kind: str) -> Models:
    from verl_opsd.verl_adapter.rollout import kv

    torch.manual_seed(0)
    stock = KINDS[kind]().eval().requires_grad_(False)
    stock.set_attn_implementation("sdpa")
    served = copy.deepcopy(stock)
    if kind != "hybrid":
        served.set_attn_implementation(kv.ATTENTION)
    return Models(kind, served, stock)


@pytest.fixture(scope="session", params=list(KINDS))
def models(request: pytest.FixtureRequest) -> Models:
    return build(request.param)


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def flat_models(request: pytest.FixtureRequest) -> Models:
    return build(request.param)


@pytest.fixture
def qwen3() -> Models:
    """A fresh copy: its weights may be changed."""
    return build("qwen3")
