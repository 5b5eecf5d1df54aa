"""Qwen3.5 in vLLM: what its class and its kernels for CPUs need is asked for before anything starts."""

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


def rollout(name: str = "vllm", dtype: str = "float32") -> DictConfig:
    return OmegaConf.create({"name": name, "dtype": dtype})


@pytest.mark.parametrize("kind", ["text", "multimodal"])
@pytest.mark.parametrize("accelerator", [True, False])
def test_a_missing_torchvision_is_refused(host: Any, paths: dict[str, str], kind: str, accelerator: bool) -> None:
    host(False, accelerator)
    with pytest.raises(OpsdError, match=r"torchvision is not installed"):
        check_served(rollout(dtype="bfloat16"), paths[kind])


@pytest.mark.parametrize("kind", ["text", "multimodal"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_without_an_accelerator_it_is_served_in_bfloat16_alone(host: Any, paths: dict[str, str], kind: str, dtype: str) -> None:
    host(True, False)
    with pytest.raises(OpsdError, match=f"rollout.dtype={dtype} .*\n.*bfloat16 alone"):
        check_served(rollout(dtype=dtype), paths[kind])
    check_served(rollout(dtype="bfloat16"), paths[kind])
    host(True, True)
    check_served(rollout(dtype=dtype), paths[kind])


@pytest.mark.parametrize(("name", "kind"), [("opsd_embedded", "multimodal"), ("opsd_scripted", "text"), ("vllm", "plain")])
def test_other_servers_and_other_models_need_neither(host: Any, paths: dict[str, str], name: str, kind: str) -> None:
    host(False, False)
    check_served(rollout(name), paths[kind])


def test_it_is_asked_for_among_the_checks_of_models(host: Any, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_opsd.verl_adapter import launch

    host(False, False)
    for check in ("ensure_student", "check_adapter", "check_support", "check_heads"):
        monkeypatch.setattr(launch, check, lambda *_: None)
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": paths["multimodal"]}, "rollout": rollout()}})
    with pytest.raises(OpsdError, match="torchvision"):
        launch.check_models(config, None)  # type: ignore[arg-type]
