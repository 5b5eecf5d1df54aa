"""Layers that only score give what the layers they replace give, bit for bit, whole and in parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from verl_opsd.errors import OpsdError
from verl_opsd.models import kernels, scoring
from verl_opsd.models.attention import ATTENTION
from verl_opsd.models.gated_delta import CarriedState

CONFIG = Qwen3_5TextConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
IDS = torch.randint(97, (1, 90), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model with the kernels that training takes, and the same for scoring."""
    kernels.attention.register()
    torch.manual_seed(0)
    plain = qwen3_5.Qwen3_5ForCausalLM._from_config(CONFIG, attn_implementation=ATTENTION, dtype=request.param).eval()
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_(0.0, 0.3 if p.dim() == 1 else p[0].numel() ** -0.5)
    kernels.install(plain, kernels.choose(kernels.Facts(False, False, None, None, None, False)))
    ours = copy.deepcopy(plain)
    scoring.install(ours)
    kinds = [type(m) for m in ours.modules()]
    assert [kinds.count(k) for k in (scoring.ScoringLayer, scoring.ScoringAttention, scoring.LastNorm)] == [8, 2, 1]
    assert list(ours.state_dict()) == list(plain.state_dict())
    return plain, ours


@pytest.mark.parametrize("sizes", [(90,), (45, 45), (1, 2, 40, 47)])
@torch.no_grad()
def test_scoring_is_bit_for_bit_the_model(pair: tuple[Any, Any], sizes: tuple[int, ...]) -> None:
    outs = []
    for model in pair:
        state, at, out = CarriedState(), 0, []
        for n in sizes:
            places = torch.arange(at, at + n)[None]
            out.append(model(IDS[:, at : at + n], position_ids=places, past_key_values=state, use_cache=True).logits)
            at += n
        outs.append(torch.cat(out, dim=1))
    assert torch.equal(*outs)


@torch.no_grad()
def test_several_rows_and_packed_ones_are_the_models(pair: tuple[Any, Any]) -> None:
    rows = IDS.reshape(3, 30)
    packed = {
        "position_ids": torch.arange(30).repeat(3)[None],
        "cu_seq_lens_q": kernels.cumulative([30] * 3, "cpu"),
        "use_cache": False,
    }
    for ids, given in ((rows, {"use_cache": False}), (IDS, packed)):
        plain, ours = (model(ids, **given).logits for model in pair)
        assert torch.equal(plain, ours)


@torch.no_grad()
def test_a_mask_is_refused_as_before(pair: tuple[Any, Any]) -> None:
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    with pytest.raises(OpsdError, match="reads no mask"):
        pair[1](IDS, attention_mask=mask, use_cache=False)
