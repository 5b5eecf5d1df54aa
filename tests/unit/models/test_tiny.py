"""The tiny student: deterministic, complete or absent; its tokenizer survives saving; its template is append-only."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_opsd.errors import OpsdError
from verl_opsd.models import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny(tmp_path_factory.mktemp("tiny") / "model")


def test_same_seed_same_bytes_other_seed_other_weights(path: Path, tmp_path: Path):
    again, other = tiny.make_tiny(tmp_path / "again"), tiny.make_tiny(tmp_path / "other", seed=1)
    for file in path.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert (other / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (path / "model.safetensors").read_bytes()


def test_weights_are_numpys_random_numbers(path: Path):
    """Independent of torch's kernels: the first embedding row follows from numpy alone."""
    import numpy as np

    model = AutoModelForCausalLM.from_pretrained(path)
    first = min(name for name, p in model.named_parameters() if p.dim() >= 2)
    p = dict(model.named_parameters())[first]
    std = 0.1 if "embed_tokens" in first else p.shape[1] ** -0.5
    expected = np.random.default_rng(0).standard_normal(tuple(p.shape)) * std
    assert torch.equal(p, torch.from_numpy(expected).float())
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 16384 and model.config.model_type == "qwen3"


def test_context_moves_the_logits(path: Path):
    """A student whose predictions ignore the past would make every distillation signal zero."""
    model = AutoModelForCausalLM.from_pretrained(path)
    a, b = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[50, 60, 7, 8, 9, 10]])
    with torch.no_grad():
        p, q = (torch.log_softmax(model(x).logits[0, -1], -1) for x in (a, b))
    assert float((p.exp() * (p - q)).sum()) > 1e-3


@pytest.mark.parametrize(
    "text",
    [
        "plain text, two  spaces\tand a tab\n\n",
        "def f(x):\n    return {'a': [1, 2]}  # comment",
        "é☃ 漢字 \x00\x7f",
        '<|im_start|>assistant\n<think>\nx\n</think>\n<tool_call>\n{"name": "bash"}\n</tool_call><|im_end|>\n',
        "<tool_response>\n<unknown>\n</tool_response><|endoftext|>",
    ],
)
def test_saved_tokenizer_is_the_trained_one_and_loses_nothing(path: Path, text: str):
    loaded, trained = AutoTokenizer.from_pretrained(path), tiny.make_tokenizer()
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == trained.encode(text, add_special_tokens=False)
    assert loaded.decode(ids) == text


def test_special_and_markup_tokens_are_single_ids(path: Path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == tiny.VOCAB == 2048
    for token in (tiny.PAD, tiny.TURN_START, tiny.TURN_END, *tiny.MARKUP):
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    # Tool markup must survive decoding without special tokens: the tool parser looks for it.
    text = "<|im_start|><tool_call>x</tool_call><|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_chat_template_is_append_only(path: Path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "<think>\nt\n</think>\nok", "tool_calls": [call]},
        {"role": "tool", "content": "out"},
        {"role": "user", "content": "peer message"},
        {"role": "assistant", "content": "done"},
    ]

    def render(n: int) -> str:
        return tokenizer.apply_chat_template(messages[:n], tokenize=False)

    for n in range(1, len(messages)):
        assert render(n + 1).startswith(render(n))


def test_ensure_is_idempotent_and_refuses_a_changed_folder(tmp_path: Path):
    path = tiny.ensure_tiny(tmp_path)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert tiny.ensure_tiny(tmp_path) == path and (path / "model.safetensors").stat().st_mtime_ns == stamp
    with (path / "config.json").open("a") as f:
        f.write(" ")
    with pytest.raises(OpsdError, match=f"delete {path}"):
        tiny.ensure_tiny(tmp_path)


def test_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_fill", stop)
    with pytest.raises(KeyboardInterrupt):
        tiny.make_tiny(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_target_that_is_something_else_is_refused(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(OpsdError, match="must not exist"):
        tiny.make_tiny(tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


def test_concurrent_callers_share_one_folder(tmp_path: Path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.map(tiny.ensure_tiny, [tmp_path] * 2)
    assert paths[0] == paths[1]
    tiny.check_content(paths[0])
    assert [p.name for p in tmp_path.iterdir()] == [paths[0].name]


def test_hybrid_has_recurrent_layers_and_finite_logits(tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny.make_tiny_hybrid(tmp_path / "hybrid"))
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 200)[None]).logits).all()


def test_the_warm_student_is_whole_small_and_speaks_the_projects_format():
    tokenizer, model = AutoTokenizer.from_pretrained(tiny.WARM), AutoModelForCausalLM.from_pretrained(tiny.WARM)
    assert tokenizer.chat_template == tiny.chat_template()
    assert len(tokenizer) == model.config.vocab_size and tokenizer.eos_token == tiny.TURN_END
    assert all(len(tokenizer.encode(t)) == 1 for t in (tiny.PAD, tiny.TURN_START, tiny.TURN_END, *tiny.MARKUP))
    text = 'é☃ 漢字 \x00\n  def f(x): return {\'a\': [1, 2]}\n<tool_call>\n{"name": "bash"}\n</tool_call>'
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert sum(f.stat().st_size for f in tiny.WARM.iterdir()) < 4e6
    assert json.loads((tiny.WARM / "config.json").read_text())["max_position_embeddings"] == 16384


def test_tokens_may_hold_phrases():
    texts = ["the quick brown fox jumps over the lazy dog. " * 3] * 20 + [chr(c) * 2 for c in range(300, 420)]
    words, phrases = (tiny.make_tokenizer(texts, 320, phrase=p) for p in (None, 12))
    assert len(words) == len(phrases) == 320
    for tokenizer, most in ((words, 7), (phrases, 12)):
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(texts[0])]
        assert "".join(pieces) == texts[0] and max(map(len, pieces)) <= most
    assert len(phrases.encode(texts[0])) < len(words.encode(texts[0]))
    with pytest.raises(OpsdError, match="it has exactly 5000"):
        tiny.make_tokenizer(texts, 5000)
