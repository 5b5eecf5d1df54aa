"""Publishing: every tensor binds or nothing changes; what is served afterwards is what was trained."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore
from verl_opsd.verl_adapter.rollout.weights import load_adapter, load_full

IDS = list(range(5, 60))


def trained_adapter(stock, seed: int, r: int = 4) -> tuple[PeftModel, dict[str, torch.Tensor], dict]:
    """An adapter of all linear layers with random lora_B, as a trainer holds it after some steps."""
    config = LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(stock), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    tensors = {k: v.clone() for k, v in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    return model.eval(), tensors, model.peft_config["default"].to_dict()


def served_logprobs(model) -> np.ndarray:
    return EngineCore(model, {0}, 1024).score_logprobs([IDS], [[0, 20, 54]])[0]


def logprobs(model) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([IDS])).logits[0, [0, 20, 54]].float(), -1).numpy()


def test_adapter_is_served_and_a_second_one_replaces_it(qwen3):
    model = qwen3.served
    for seed, step in ((1, 1), (2, 2)):
        reference, tensors, config = trained_adapter(qwen3.stock, seed)
        model, report = load_adapter(model, tensors, config, step)
        np.testing.assert_allclose(served_logprobs(model), logprobs(reference), atol=1e-5)
        assert np.abs(logprobs(reference) - logprobs(qwen3.stock)).max() > 0.1
        # 7 linear layers in each of 2 blocks, two matrices each.
        assert (report.kind, report.step, report.bound, report.zero_B) == ("adapter", step, 28, ())
        assert report.changed == 28 and report.dtypes == ("torch.float32",)
    _, again = load_adapter(model, tensors, config, 3)
    assert again.changed == 0


def test_names_of_a_multimodal_checkpoint_bind_to_its_text_model(qwen3):
    reference, tensors, config = trained_adapter(qwen3.stock, 1)
    stored = {k.replace("model.model.", "model.model.language_model."): v for k, v in tensors.items()}
    assert stored.keys().isdisjoint(tensors)
    model, report = load_adapter(qwen3.served, stored, config, 1)
    assert report.bound == 28
    np.testing.assert_allclose(served_logprobs(model), logprobs(reference), atol=1e-5)
    full = {k.replace("model.", "model.language_model."): v for k, v in qwen3.stock.state_dict().items()}
    assert load_full(model, full, 2).bound == len(full)


def test_first_publish_with_zero_B_is_allowed_and_reported(qwen3):
    _, tensors, config = trained_adapter(qwen3.stock, 1)
    tensors = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in tensors.items()}
    before = served_logprobs(qwen3.served)
    model, report = load_adapter(qwen3.served, tensors, config, 0)
    assert len(report.zero_B) == 14 and report.changed == 14  # lora_A arrived, lora_B was zero already
    np.testing.assert_allclose(served_logprobs(model), before, atol=1e-6)
    dead = {k: torch.zeros_like(v) if "layers.1.mlp.up_proj.lora_B" in k else v + 0.1 for k, v in tensors.items()}
    _, report = load_adapter(model, dead, config, 1)
    assert report.zero_B == ("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight",)


def spoil(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    key = sorted(tensors)[3]
    out = dict(tensors)
    if how == "missing":
        del out[key]
    elif how == "unexpected":
        out["extra.weight"] = torch.zeros(2)
    elif how == "renamed":
        out[key.replace("layers", "blocks")] = out.pop(key)
    elif how == "another shape":
        out[key] = torch.zeros(3, 3)
    elif how == "not finite":
        out[key] = torch.full_like(out[key], float("nan"))
    return out


@pytest.mark.parametrize("how", ["missing", "unexpected", "renamed", "another shape", "not finite"])
@pytest.mark.parametrize("first", [True, False])
def test_adapter_that_does_not_fit_changes_nothing(qwen3, how, first):
    _, tensors, config = trained_adapter(qwen3.stock, 1)
    model = qwen3.served if first else load_adapter(qwen3.served, tensors, config, 1)[0]
    before = served_logprobs(model)
    _, other, _ = trained_adapter(qwen3.stock, 2)
    with pytest.raises(OpsdError, match="missing" if how == "renamed" else how):
        load_adapter(model, spoil(other, how), config, 2)
    np.testing.assert_array_equal(served_logprobs(model), before)
    assert not first or not any("lora" in name for name, _ in model.named_parameters())
    good, _ = load_adapter(model, other, config, 3)
    assert isinstance(good, PeftModel)


def test_another_adapter_config_is_refused(qwen3):
    _, tensors, config = trained_adapter(qwen3.stock, 1)
    model, _ = load_adapter(qwen3.served, tensors, config, 1)
    _, wider, wide_config = trained_adapter(qwen3.stock, 1, r=8)
    with pytest.raises(OpsdError, match="adapter config changed"):
        load_adapter(model, wider, wide_config, 2)


def new_weights(stock, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) * 0.1 for n, p in stock.named_parameters()}


@pytest.mark.parametrize("names", ["plain", "verl's base layer names", "with the tied head"])
def test_full_weights_are_served(qwen3, names):
    tensors = new_weights(qwen3.stock, 1)
    assert "lm_head.weight" not in tensors  # tied to the embedding
    qwen3.stock.load_state_dict(tensors, strict=False)
    if names == "verl's base layer names":
        tensors = {n.replace("_proj.weight", "_proj.base_layer.weight"): t for n, t in tensors.items()}
    elif names == "with the tied head":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    report = load_full(qwen3.served, tensors, 4)
    np.testing.assert_allclose(served_logprobs(qwen3.served), logprobs(qwen3.stock), atol=1e-5)
    assert (report.kind, report.step, report.bound) == ("full", 4, len(tensors))


@pytest.mark.parametrize("how", ["missing", "unexpected", "renamed", "another shape", "not finite"])
def test_full_weights_that_do_not_fit_change_nothing(qwen3, how):
    before = served_logprobs(qwen3.served)
    with pytest.raises(OpsdError, match="missing" if how == "renamed" else how):
        load_full(qwen3.served, spoil(new_weights(qwen3.stock, 1), how), 1)
    np.testing.assert_array_equal(served_logprobs(qwen3.served), before)


def test_full_weights_under_an_adapter_leave_the_adapter(qwen3):
    _, tensors, config = trained_adapter(qwen3.stock, 1)
    model, _ = load_adapter(qwen3.served, tensors, config, 1)
    base = new_weights(qwen3.stock, 2)
    load_full(model, base, 2)
    qwen3.stock.load_state_dict(base, strict=False)
    reference = get_peft_model(qwen3.stock, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    places = get_peft_model_state_dict(reference, save_embedding_layers=False)
    for name, t in tensors.items():
        places[name].copy_(t)
    np.testing.assert_allclose(served_logprobs(model), logprobs(reference.eval()), atol=1e-5)


def test_low_precision_base_keeps_a_full_precision_adapter(qwen3):
    _, tensors, config = trained_adapter(qwen3.stock, 1)
    model, report = load_adapter(qwen3.served.to(torch.bfloat16), tensors, config, 1)
    served = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert report.dtypes == ("torch.float32",)
    assert all(torch.equal(served[n], t) for n, t in tensors.items())
