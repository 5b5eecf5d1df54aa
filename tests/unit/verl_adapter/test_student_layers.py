"""Code of others that the student's layers would run on: what is not there, or hides this project's kernels, is refused at launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils
from omegaconf import OmegaConf
from transformers import Qwen3_5TextConfig, Qwen3Config

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.requirements import check_layers


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("students")
    for name, config in (("hybrid", Qwen3_5TextConfig()), ("plain", Qwen3Config())):
        config.save_pretrained(root / name)
    return {name: str(root / name) for name in ("hybrid", "plain")}


def check(path: str, scale: str = "local", attention: str = "sdpa", liger: bool = False, address: str | None = None) -> None:
    model = {"override_config": {"attn_implementation": attention}, "use_liger": liger}
    config = OmegaConf.create({"actor_rollout_ref": {"model": model}, "ray_kwargs": {"ray_init": {"address": address}}})
    check_layers(config, SimpleNamespace(scale=scale), path)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention_that_is_not_there(students: dict[str, str], monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    here = dict.fromkeys((2, 3, 4), True) | {version: False}
    for n, there in here.items():
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{n}_available", lambda there=there: there)
    for n in (2, 3, 4):
        if n != version:
            check(students["plain"], attention=f"flash_attention_{n}")
    with pytest.raises(OpsdError, match=rf"attn_implementation=flash_attention_{version}, which can't run on this host"):
        check(students["plain"], attention=f"flash_attention_{version}")
    check(students["plain"], attention=f"flash_attention_{version}", address="10.0.0.1:6379")  # other hosts run it


@pytest.mark.parametrize("attention", ["sdpa", "eager", "ulysses_sdpa"])
def test_other_attentions_need_no_package(students: dict[str, str], attention: str) -> None:
    check(students["plain"], attention=attention)


@pytest.mark.parametrize("scale", ["local", "smollm", "cpu8"])
def test_flex_attention_has_no_gradient_on_the_host(students: dict[str, str], scale: str) -> None:
    with pytest.raises(OpsdError, match=f"attn_implementation=flex_attention with scale={scale}"):
        check(students["plain"], scale, attention="flex_attention")
    check(students["plain"], "gpu1", attention="flex_attention")


@pytest.mark.parametrize(
    ("student", "scale", "refused"),
    [("plain", "local", True), ("plain", "gpu1", False), ("hybrid", "cpu8", True), ("hybrid", "gpu8", True)],
)
def test_ligers_patches(students: dict[str, str], student: str, scale: str, refused: bool) -> None:
    check(students[student], scale)
    if not refused:
        check(students[student], scale, liger=True)
        return
    with pytest.raises(OpsdError, match="use_liger=true with scale"):
        check(students[student], scale, liger=True)


def test_it_is_among_the_checks_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_opsd.verl_adapter import launch

    asked: list[Any] = []
    for other in (
        "ensure_student",
        "check_adapter",
        "check_support",
        "check_heads",
        "check_served",
        "check_chat",
        "check_teachers",
    ):
        monkeypatch.setattr(launch, other, lambda *_: None)
    monkeypatch.setattr(launch, "check_layers", lambda *given: asked.append(given))
    actor = {"ulysses_sequence_parallel_size": 1}
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "somewhere"}, "rollout": {}, "actor": actor}})
    launch.check_models(config, None)  # type: ignore[arg-type]
    assert asked == [(config, None, "somewhere")]
