"""vLLM's build for CPUs, and Qwen3.5 in vLLM: what they can't do and what they need is said before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import Qwen3_5Config, Qwen3_5TextConfig, Qwen3Config

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import requirements
from verl_opsd.verl_adapter.requirements import check_served

CONFIGS = {"text": Qwen3_5TextConfig, "multimodal": Qwen3_5Config, "plain": Qwen3Config}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("configs")
    for name, kind in CONFIGS.items():
        kind().save_pretrained(root / name)
    return {name: str(root / name) for name in CONFIGS}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``host(torchvision, accelerator)`` is what this host is taken for."""
    find = importlib.util.find_spec

    def of(torchvision: bool, accelerator: bool) -> None:
        there = {"torchvision": find("json") if torchvision else None}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: there[name] if name in there else find(name, *a))
        monkeypatch.setattr(requirements, "accelerator_present", lambda: accelerator)

    return of


def check(path: str, name: str = "vllm", dtype: str = "float32", rank: int = 8, adapter: str | None = None) -> None:
    model: DictConfig = OmegaConf.create({"path": path, "lora_rank": rank, "lora_adapter_path": adapter})
    check_served(model, OmegaConf.create({"name": name, "dtype": dtype}))


@pytest.mark.parametrize("kind", ["text", "multimodal"])
@pytest.mark.parametrize("accelerator", [True, False])
def test_a_missing_torchvision_is_refused(host: Any, paths: dict[str, str], kind: str, accelerator: bool) -> None:
    host(False, accelerator)
    with pytest.raises(OpsdError, match=r"torchvision is not installed"):
        check(paths[kind], dtype="bfloat16")


@pytest.mark.parametrize("kind", ["text", "multimodal"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_without_an_accelerator_it_is_served_in_bfloat16_alone(host: Any, paths: dict[str, str], kind: str, dtype: str) -> None:
    host(True, False)
    with pytest.raises(OpsdError, match=f"rollout.dtype={dtype} .*\n.*bfloat16 alone"):
        check(paths[kind], dtype=dtype)
    check(paths[kind], dtype="bfloat16")
    host(True, True)
    check(paths[kind], dtype=dtype)


@pytest.mark.parametrize("kind", ["plain", "multimodal"])
def test_without_an_accelerator_it_takes_adapters_alone(host: Any, paths: dict[str, str], kind: str) -> None:
    host(True, False)
    with pytest.raises(OpsdError, match=r"lora_rank=0 with rollout\.name=vllm without an accelerator"):
        check(paths[kind], dtype="bfloat16", rank=0)
    check(paths[kind], dtype="bfloat16", rank=0, adapter="somewhere")
    check(paths[kind], name="opsd_embedded", rank=0)
    host(True, True)
    check(paths[kind], dtype="bfloat16", rank=0)


@pytest.mark.parametrize(("name", "kind"), [("opsd_embedded", "multimodal"), ("opsd_scripted", "text"), ("vllm", "plain")])
def test_other_servers_and_other_models_need_neither(host: Any, paths: dict[str, str], name: str, kind: str) -> None:
    host(False, False)
    check(paths[kind], name)


def test_it_is_asked_for_among_the_checks_of_models(host: Any, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_opsd.verl_adapter import launch

    host(False, False)
    for other in ("ensure_student", "check_adapter", "check_support", "check_heads", "check_layers"):
        monkeypatch.setattr(launch, other, lambda *_: None)
    parts = {"model": {"path": paths["multimodal"], "lora_rank": 8}, "rollout": {"name": "vllm", "dtype": "bfloat16"}}
    parts["actor"] = {"ulysses_sequence_parallel_size": 1}
    config = OmegaConf.create({"actor_rollout_ref": parts})
    with pytest.raises(OpsdError, match="torchvision"):
        launch.check_models(config, None)  # type: ignore[arg-type]
