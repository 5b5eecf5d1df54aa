"""``opsd export`` before it loads a weight: the corpus, its tokenizer, and where the folder goes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from verl_opsd.cli.main import main
from verl_opsd.corpus.records import CORPUS_SCHEMA, MANIFEST_KEYS, CorpusRow, write_manifest, write_rows
from verl_opsd.models.tiny import WARM
from verl_opsd.rundir import file_hash
from verl_opsd.teachers.cache import tokenizer_hash


def make_corpus(folder: Path, tokenizer: str) -> Path:
    folder.mkdir()
    mask = np.array([0, 0, 1, 1], np.int8)
    row = CorpusRow(
        source="run", episode_id="e", agent_id="agent1", branch=0, origin="recorded", repo="r", task_id=1, feature_id=1, passed=True,
        pair_passed=True, actor_brief_kind="none", contract_hash="c", model_version=0, input_ids=np.array([5, 6, 7, 8], np.int32),
        loss_mask=mask, turn_index=np.where(mask, 0, -1).astype(np.int32), token_class=np.where(mask, 4, -1).astype(np.int8),
        logprobs=np.zeros(4, np.float32),
    ).hashed()  # fmt: skip
    write_rows(folder / "train.parquet", [row])
    files = {"train": {"name": "train.parquet", "rows": 1, "sha256": file_hash(folder / "train.parquet")}}
    manifest = {**dict.fromkeys(MANIFEST_KEYS), "schema": CORPUS_SCHEMA, "tokenizer": tokenizer, "files": files, "gates": []}
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Without weights: what reads them fails by another name."""
    folder = tmp_path / "global_step_3" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(WARM)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text((WARM / "config.json").read_text())
    return folder.parent


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", *words]) == 2
    return capsys.readouterr().err


def test_prompts_of_another_tokenizer_are_refused(checkpoint, tmp_path, capsys):
    own = tokenizer_hash(AutoTokenizer.from_pretrained(WARM))
    words = [str(checkpoint), "--out", str(tmp_path / "out"), "--prompts", "1", "--corpus"]
    text = refusal(capsys, *words, str(make_corpus(tmp_path / "other", "0" * 64)))
    assert "of tokenizer 000000000000" in text and own[:12] in text and "way out" in text
    # the same tokenizer goes on to the weights, which are not there
    assert "fsdp_config.json: FileNotFoundError" in refusal(capsys, *words, str(make_corpus(tmp_path / "own", own)))


def test_a_tokenizer_whose_template_alone_differs_is_another(checkpoint, tmp_path, capsys):
    own = tokenizer_hash(AutoTokenizer.from_pretrained(WARM))
    corpus = make_corpus(tmp_path / "corpus", own)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "huggingface")
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(checkpoint / "huggingface")
    assert "of tokenizer" in refusal(capsys, str(checkpoint), "--out", str(tmp_path / "out"), "--corpus", str(corpus))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--prompts", "2"], "--prompts 2 of a corpus of 1 rows"),
        (["--prompts", "0"], "--prompts 0"),
        (["--max-new", "0"], "--max-new 0"),
        (["--parser", "bogus"], "tool parser 'bogus'"),
        (["--out", "{file}/model"], "--out="),
    ],
)
def test_words_that_can_not_be_are_refused_before_a_weight_is_read(words, what, checkpoint, tmp_path, capsys):
    corpus = make_corpus(tmp_path / "corpus", tokenizer_hash(AutoTokenizer.from_pretrained(WARM)))
    (tmp_path / "file").write_text("")
    given = [w.format(file=tmp_path / "file") for w in words]
    rest = ["--out", str(tmp_path / "out"), "--prompts", "1", "--corpus", str(corpus)]
    assert what in refusal(capsys, str(checkpoint), *rest, *given)
    assert not (tmp_path / "out").exists()


def test_a_corpus_that_was_changed_gives_no_prompts(checkpoint, tmp_path, capsys):
    corpus = make_corpus(tmp_path / "corpus", tokenizer_hash(AutoTokenizer.from_pretrained(WARM)))
    words = [str(checkpoint), "--out", str(tmp_path / "out"), "--prompts", "1", "--corpus", str(corpus)]
    rows = (corpus / "train.parquet").read_bytes()
    (corpus / "train.parquet").write_bytes(rows[:-9])
    assert "gate file_hash" in refusal(capsys, *words)
    (corpus / "train.parquet").write_bytes(rows)
    manifest = json.loads((corpus / "corpus.json").read_text())
    manifest["files"]["train"]["rows"] = 2
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    assert "gate manifest" in refusal(capsys, *words)
