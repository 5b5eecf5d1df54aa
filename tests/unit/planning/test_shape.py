"""Counts from shapes against the models themselves."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from verl_opsd.planning.shape import TARGETS, ModelShape

STUDENT = Qwen3_5TextConfig()
TEACHER = Qwen3_5TextConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    linear_num_value_heads=48,
)
PLAIN = Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=3, vocab_size=200, tie_word_embeddings=True)


@pytest.mark.parametrize("config", [STUDENT, TEACHER, PLAIN], ids=["9B", "27B", "plain"])
def test_parameters_are_the_models(config: Qwen3_5TextConfig | Qwen3Config) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of(config)
    matrices = sum(p.numel() for k, p in model.named_parameters() if p.dim() > 1)
    assert shape.parameters == matrices
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=list(TARGETS)))
    assert shape.lora_parameters(8) == sum(p.numel() for k, p in adapted.named_parameters() if "lora_" in k)


def test_flop_of_a_token() -> None:
    shape = ModelShape.of(STUDENT)
    # 2 FLOP a weight; in each of 8 attention layers q.k and p.v over half the context, 16 heads of 256.
    products = shape.forward_flop(32768) - 2 * shape.body - 24 * shape.delta_flop()
    assert products == 8 * 2 * 2 * (32768 / 2) * 16 * 256
