"""A hybrid on the host of an accelerator, where transformers gives its layers kernels that read no memory of the host; adapters put on whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from verl_opsd.errors import OpsdError
from verl_opsd.models.adapter import put_on
from verl_opsd.models.kernels import on_host
from verl_opsd.models.tiny import make_tiny_hybrid
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.verl_adapter.model_checks import _trainer_logprobs
from verl_opsd.verl_adapter.rollout.server import EmbeddedServer

IDS = [5, 90, 300, 7, 1200, 44]


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


class FusedNorm(nn.Module):
    def __init__(self, size: int, eps: float, activation: str, device: Any, dtype: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    forward = refuse


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers finds with flash-linear-attention and causal-conv1d beside an accelerator."""
    for name in ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        monkeypatch.setattr(qwen3_5, name, refuse)
    monkeypatch.setattr(qwen3_5, "FusedRMSNormGated", FusedNorm)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hybrid(tmp_path_factory.mktemp("host") / "text")


@pytest.fixture(scope="module")
def published(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multimodal checkpoint whose head is its embedding, as the outer configuration alone says."""
    folder = tmp_path_factory.mktemp("published")
    inner = AutoConfig.from_pretrained(text).to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": inner["hidden_size"]}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=inner, vision_config=vision | {"num_position_embeddings": 16}, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(text).save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())
    del stated["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.fixture(scope="module")
def adapter(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rank 2 on two kinds of modules, with effect."""
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    net = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["in_proj_z", "up_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    net.save_pretrained(folder)
    return folder


def renamed(adapter: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    save_file({change(k): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def stored(name: str) -> str:
    return name.replace("base_model.model.model.", "base_model.model.model.language_model.")


@torch.no_grad()
def by_hand(model: nn.Module) -> list[float]:
    logp_TV = model(input_ids=torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return [float(row[i]) for row, i in zip(logp_TV, IDS[1:], strict=True)]


def test_layers_on_the_host_run_in_torch(text: Path, accelerator: None) -> None:
    model = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="Triton"):
        by_hand(model)
    on_host(model)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            patch.setattr(qwen3_5, name, None)
        patch.setattr(qwen3_5, "FusedRMSNormGated", None)
        plain = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32).eval()
    assert by_hand(model) == by_hand(plain)
    ids = torch.tensor([IDS])  # a prefill, then single tokens out of the cache
    grown = [m.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4) for m in (model, plain)]
    assert grown[0].tolist() == grown[1].tolist() and model.state_dict().keys() == plain.state_dict().keys()


def test_the_embedded_server_serves_there(text: Path, accelerator: None) -> None:
    config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(text), local_path=text, trust_remote_code=False)
    held: Any = SimpleNamespace(model_config=config, config=SimpleNamespace(dtype="float32"))
    assert len(by_hand(EmbeddedServer._load_model(held))) == 5


@pytest.mark.parametrize("names", ["text", "published"])
def test_a_published_checkpoint_and_its_adapter(
    names: str, published: Path, adapter: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(published, dtype=torch.float32).eval()
    base = by_hand(whole)
    weights = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, up in weights.items():
            if "lora_B" in name:
                module = stored(name).removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                whole.get_submodule(module).weight += 3.0 * up @ weights[name.replace("lora_B", "lora_A")]
    trained = by_hand(whole)
    given = adapter if names == "text" else renamed(adapter, tmp_path / "a", stored)
    request.getfixturevalue("accelerator")
    found = _trainer_logprobs(str(published), str(given), IDS)
    assert found[0] == pytest.approx(base, abs=1e-5) and found[1] == pytest.approx(trained, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(base, trained, strict=True)) > 1e-3


def test_a_teacher_on_the_host_with_an_adapter(text: Path, adapter: Path, tmp_path: Path, accelerator: None) -> None:
    assert DeviceTeacher(str(text), torch.float32, "cpu", "t", str(adapter)).head_error < 1e-5
    other = renamed(adapter, tmp_path / "a", lambda k: k.replace("layers.3.", "layers.4."))
    with pytest.raises(OpsdError, match=r"lacks \['base_model.model.model.layers.3.*layers.4.*no place"):
        DeviceTeacher(str(text), torch.float32, "cpu", "t", str(other))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("r", 4, "size mismatch"), ("target_modules", ["nothing"], "nothing"), ("target_modules", ["up_proj"], "no place")],
)
def test_an_adapter_of_another_form_is_refused(
    key: str, value: Any, what: str, text: Path, adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(OpsdError, match=what):
        put_on(AutoModelForCausalLM.from_pretrained(text), str(tmp_path / "a"))


def test_a_broken_adapter_is_refused(text: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(OpsdError, match=r"adapter .*a"):
        put_on(AutoModelForCausalLM.from_pretrained(text), str(tmp_path / "a"))
