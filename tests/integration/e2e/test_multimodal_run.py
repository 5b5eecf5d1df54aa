"""A student that is stored inside a multimodal checkpoint, as published Qwen3.5 models are: two rounds, then its export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from job import SHORT, Job, run_trainer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from verl_opsd.models.export import export
from verl_opsd.models.tiny import make_tiny_hybrid

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("multimodal")
    text = AutoModelForCausalLM.from_pretrained(make_tiny_hybrid(root / "text"))
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": text.config.hidden_size,
    }
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=True)
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(root / "whole")
    AutoTokenizer.from_pretrained(root / "text").save_pretrained(root / "whole")
    return root / "whole"


@pytest.fixture(scope="module", params=[8, 0], ids=["adapter", "full parameters"])
def trained(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    full = () if request.param else ("actor_rollout_ref.model.lora_rank=0",)
    yield run_trainer(
        tmp_path_factory.mktemp("run"),
        *("+recipe=opd", f"actor_rollout_ref.model.path={checkpoint}", "trainer.save_freq=2", "data.train_batch_size=1"),
        *(*SHORT, *full),
    )


def test_what_is_served_is_what_was_trained_and_its_export_differs_in_the_text_model_alone(
    trained: Job, checkpoint: Path, tmp_path: Path
) -> None:
    assert trained.returncode == 0, trained.output[-4000:]
    lines = [json.loads(x) for x in (trained.directory / "evidence.jsonl").read_text().splitlines()]
    assert {x["verdict"] for x in lines} <= {"pass", "recorded"}
    published = [x for x in lines if x["gate"] == "publish_kl"]
    assert len(published) == 3 and all(x["value"] <= 1e-6 for x in published)
    export(trained.directory / "checkpoints" / "global_step_2", tmp_path / "out", "float32", wrapper=str(checkpoint))
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    assert before.keys() == after.keys()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(k.startswith("model.language_model.") for k in moved)
