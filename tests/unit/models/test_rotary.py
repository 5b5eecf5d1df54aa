"""Rotary frequencies after a cast of the whole model, and those that can't be made anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from verl_opsd.errors import OpsdError
from verl_opsd.models import rotary

SIZES = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_are_those_of_the_definition_and_weights_stay_cast(dtype: torch.dtype) -> None:
    hybrid = Qwen3_5TextConfig(
        **SIZES, num_key_value_heads=1, head_dim=32, rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    )
    scaled = LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    for config, want in ((hybrid, [1e7 ** (-i / 4) for i in range(4)]), (scaled, [1e4 ** (-i / 16) / 4 for i in range(16)])):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        exact = torch.tensor(want, dtype=torch.float64)
        found = model.get_decoder().rotary_emb
        assert float((found.inv_freq.double() / exact - 1).abs().max()) > 1e-4
        rotary.restore(model)
        for name in ("inv_freq", "original_inv_freq"):
            kept = getattr(found, name)
            assert kept.dtype == torch.float32 and float((kept.double() / exact - 1).abs().max()) < 1e-6
        assert {p.dtype for p in model.parameters()} == {dtype} and "rotary" not in " ".join(model.state_dict())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frequencies_of_every_kind_are_transformers_own(device: str) -> None:
    """Of several kinds of layers, scaled, and on a rank of a sharded model that has no weights yet."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    for config in (Gemma3TextConfig(**SIZES), LlamaConfig(**SIZES, rope_parameters=yarn)):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        want = {k: b for k, b in model.named_buffers() if k.endswith("inv_freq")}
        rotary.restore(model.bfloat16())
        found = {k: b for k, b in model.named_buffers() if k.endswith("inv_freq")}
        assert found.keys() == want.keys() and len(want) >= 2
        for k, b in want.items():
            assert (found[k].dtype, found[k].device) == (b.dtype, b.device)
            assert device == "meta" or torch.equal(found[k], b)


def test_rounded_frequencies_without_a_configuration_are_refused() -> None:
    model = nn.Sequential(nn.Module())
    model[0].register_buffer("inv_freq", torch.ones(3))
    rotary.restore(model)
    with pytest.raises(OpsdError, match=r"rotary frequencies were cast to torch\.bfloat16"):
        rotary.restore(model.bfloat16())
