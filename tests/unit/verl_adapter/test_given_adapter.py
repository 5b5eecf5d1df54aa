"""The adapter that training goes on from: verl ignores it at rank 0, and writes the configured alpha beside its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.verl_adapter.targets import check_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of rank 2 and alpha 6 on it."""
    root = tmp_path_factory.mktemp("given")
    model = make_tiny(root / "model")
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora).save_pretrained(root / "adapter")
    return model, root / "adapter"


def check(model: Path, adapter: Path, rank: int = 2, alpha: int = 6) -> None:
    section = OmegaConf.create({"lora_rank": rank, "lora_alpha": alpha, "lora_adapter_path": str(adapter)})
    check_adapter(section, "model", str(model))


def test_the_adapter_that_is_named_passes(folders: tuple[Path, Path]) -> None:
    check(*folders)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 16), (0, 6), (4, 6), (2, 16), (2, 3)])
def test_another_rank_or_alpha_is_refused(rank: int, alpha: int, folders: tuple[Path, Path]) -> None:
    with pytest.raises(OpsdError, match=rf"rank 2, alpha 6; model.lora_rank={rank} lora_alpha={alpha}") as refused:
        check(*folders, rank, alpha)
    assert refused.value.way_out == "set model.lora_rank=2 model.lora_alpha=6"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"alpha_pattern": {"q_proj": 12}}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "k_proj", "up_proj"]}, r"lacks \[.*k_proj"),
        ({"target_modules": ["q_proj"]}, "no place"),
        ({"r": 3}, "size mismatch"),
    ],
)
def test_more_than_two_matrices_or_another_model_is_refused(
    change: dict[str, Any], what: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[1], tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(OpsdError, match=what):
        check(folders[0], tmp_path / "a")


def test_names_of_a_multimodal_checkpoint_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """verl's trainer puts the adapter on the text model, where it would find none of these."""
    shutil.copytree(folders[1], tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    inner = "base_model.model.model.language_model."
    save_file({k.replace("base_model.model.model.", inner): v for k, v in load_file(file).items()}, file)
    with pytest.raises(OpsdError, match="language_model"):
        check(folders[0], tmp_path / "a")
