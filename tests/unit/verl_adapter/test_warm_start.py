"""The warm start before a model is loaded: configuration, refusals, schedules, and the rows that verl's loader gets."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer

from verl_opsd.corpus.curriculum import Phase, schedule
from verl_opsd.corpus.records import CORPUS_SCHEMA, MANIFEST_KEYS, CorpusRow, write_manifest, write_rows
from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import WARM
from verl_opsd.rundir import RunDir, file_hash, write_json
from verl_opsd.teachers.cache import tokenizer_hash
from verl_opsd.verl_adapter.sft_data import CorpusDataset


def row(i: int, length: int) -> CorpusRow:
    rng = np.random.default_rng(i)
    mask = np.zeros(length, np.int8)
    mask[length // 2 :] = 1
    return CorpusRow(
        source="run", episode_id=f"e{i}", agent_id="agent1", branch=0, origin="recorded", repo="r", task_id=1, feature_id=1,
        passed=True, pair_passed=True, actor_brief_kind="none", contract_hash="c", model_version=0,
        input_ids=rng.integers(3, 2000, length).astype(np.int32), loss_mask=mask,
        turn_index=np.where(mask, 0, -1).astype(np.int32), token_class=np.where(mask, 4, -1).astype(np.int8),
        logprobs=np.zeros(length, np.float32),
    ).hashed()  # fmt: skip


def make_corpus(path: Path, lengths: list[int], held: list[int], **changes: Any) -> Path:
    path.mkdir(parents=True)
    files = {}
    for split, sizes in (("train", lengths), ("validation", held)):
        if sizes:
            file = path / f"{split}.parquet"
            write_rows(file, [row(100 * len(split) + i, n) for i, n in enumerate(sizes)])
            files[split] = {"name": file.name, "rows": len(sizes), "sha256": file_hash(file)}
    manifest = {
        **dict.fromkeys(MANIFEST_KEYS),
        "schema": CORPUS_SCHEMA,
        "tokenizer": tokenizer_hash(AutoTokenizer.from_pretrained(WARM)),
        "files": files,
        "contract": {},
        "contract_hashes": [],
        "gates": [{"gate": "mask", "verdict": "pass"}],
        **changes,
    }
    write_manifest(path, manifest)
    return path


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    run = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=warm_start"])
        patch.setenv("OPSD_RUN_DIR", str(run))
        import verl  # noqa: F401

        with initialize_config_module("verl.trainer.config", version_base=None):
            yield lambda *overrides: hydra_compose("sft_trainer_engine", ["+recipe=warm_start", "sft_scale=local", *overrides])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path / "run"))
    return RunDir(tmp_path / "run")


def prepare(config: Any, run: RunDir, ranks: int = 1) -> dict[str, Any]:
    from verl_opsd.verl_adapter.sft_launch import prepare as function

    return function(config, run, ranks)


def test_the_preset_is_that_of_the_experiments(compose, run):
    config = compose("corpus=C")
    assert (config.optim.lr, config.optim.lr_scheduler_type, config.model.lora_rank) == (5e-6, "cosine", 0)
    assert config.opsd.phases.all.epochs == 3 and config.trainer.total_epochs == 1


def test_a_run_is_prepared(compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10, 20, 30], [12])
    found = prepare(compose(f"corpus={corpus}", "data.train_batch_size=2", "trainer.test_freq=1"), run)
    assert (found["rows"], found["padding_rows"], found["steps"], found["validation_rows"], found["longest"]) == (
        9,
        1,
        5,
        1,
        30,
    )
    train = json.loads((run.path / "data" / "train.json").read_text())
    assert len(train["entries"]) == 10 and train["shuffled"] is True
    held = json.loads((run.path / "data" / "validation.json").read_text())
    assert held["entries"] == [["all", 0], ["", -1]] and held["shuffled"] is False


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["+data.max_lenght=3"], "did you mean max_length"),
        (["+opsd.typo=1"], "opsd.typo"),
        (["opsd.sft.chunk=0"], "opsd.sft.chunk=0"),
        (["model.override_config.attn_implementation=banana"], "attn_implementation=banana"),
        (["trainer.seed=x"], "trainer.seed=x"),
        (["opsd.phases.all.buckets.all=0.1"], "weight 0.1 of bucket all of 3 rows"),
        (["opsd.sft.anchor=-1"], "opsd.sft.anchor=-1"),
        (["opsd.sft.anchor=0.1", "engine.ulysses_sequence_parallel_size=2"], "opsd.sft.anchor=0.1 with"),
        (["engine.strategy=fsdp"], "engine.strategy=fsdp"),
        (["engine._target_=verl.workers.config.FSDPEngineConfig", "~engine.sft"], "engine._target_"),
        (["data.train_files=/x.parquet"], "data.train_files"),
        (["data.custom_cls.name=Other"], "custom_cls"),
        (["trainer.total_epochs=2"], "total_epochs=2"),
        (["data.pad_mode=right"], "pad_mode"),
        (["data.train_max_samples=3"], "train_max_samples=3"),
        (["trainer.save_freq=after_each_epoch"], "after_each_epoch"),
        (["model.use_fused_kernels=true"], "use_fused_kernels"),
        (["data.train_batch_size=0"], "train_batch_size=0"),
        (["trainer.test_freq=5"], "without validation rows"),
        (["+opsd.phases.all.buckets.other=1.0"], "bucket 'other'"),
        (["data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=25"], "a row of 30 tokens"),
        (["model.path=/nowhere"], "model.path=/nowhere"),
    ],
)
def test_refusals_name_the_key(overrides, what, compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10, 20, 30], [])
    with pytest.raises(OpsdError, match=what):
        prepare(compose(f"corpus={corpus}", *overrides), run)
    assert not (run.path / "data").exists()


def test_two_buckets_in_two_phases(compose, run, tmp_path):
    a, b = make_corpus(tmp_path / "a", [10, 20], []), make_corpus(tmp_path / "b", [11, 12, 13], [])
    with pytest.raises(OpsdError, match="corpus_b not set"):
        prepare(compose("curriculum=two_phase", f"corpus={a}"), run)
    found = prepare(compose("curriculum=two_phase", f"corpus={a}", f"corpus_b={b}", "opsd.phases.second.epochs=2"), run)
    assert (found["rows"], found["padding_rows"]) == (3 + 4, 1)
    entries = json.loads((run.path / "data" / "train.json").read_text())["entries"]
    assert [e[0] for e in entries] == ["b", "b", "b", "", "a", "a", "a", "a"]
    mixed = prepare(compose("curriculum=mixed", f"corpus={a}", f"corpus_b={b}"), run)
    assert mixed["rows"] == 3 * 5


def test_batches_that_ranks_can_not_share(compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10, 20, 30], [])
    with pytest.raises(OpsdError, match="train_batch_size=2 on 4 ranks"):
        prepare(compose(f"corpus={corpus}"), run, ranks=4)
    assert prepare(compose(f"corpus={corpus}", "data.train_batch_size=4"), run, ranks=4)["steps"] == 3


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tokenizer": "0" * 64}, "of tokenizer 000000000000"),
        ({"gates": [{"gate": "mask", "verdict": "fail"}]}, "gates mask did not pass"),
        ({"schema": 99}, "schema 99"),
    ],
)
def test_corpora_that_are_refused(changes, what, compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10], [], **changes)
    with pytest.raises(OpsdError, match=what):
        prepare(compose(f"corpus={corpus}"), run)


def test_a_changed_file_is_caught_by_its_gate(compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10], [])
    write_rows(corpus / "train.parquet", [dataclasses.replace(row(1, 10), agent_id="agent2")])
    with pytest.raises(OpsdError, match="gate file_hash"):
        prepare(compose(f"corpus={corpus}"), run)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_batches_are_those_of_the_schedule_bit_for_bit(ranks, tmp_path):
    """Through verl's sampler and collator: each global batch holds the schedule's next rows, ids and masks as they are stored."""
    from verl.utils.dataset.dataset_utils import SFTTensorCollator

    corpus = make_corpus(tmp_path / "corpus", [10, 12, 14, 16, 18, 9, 7], [])
    stored = [row(500 + i, n) for i, n in enumerate([10, 12, 14, 16, 18, 9, 7])]
    entries = schedule({"all": 7}, [Phase({"all": 1.0}, 3)], batch=4, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(WARM)
    path = tmp_path / "train.json"
    files = {"all": str(corpus / "train.parquet")}
    write_json(
        path,
        {"tokenizer": tokenizer_hash(tokenizer), "files": files, "sha256": {k: file_hash(Path(v)) for k, v in files.items()}}
        | {"entries": [list(e) for e in entries], "shuffled": True},
    )
    data = CorpusDataset(str(path), tokenizer)
    steps: list[list[Any]] = [[] for _ in range(len(entries) // 4)]
    for rank in range(ranks):
        sampler = DistributedSampler(data, shuffle=True, num_replicas=ranks, rank=rank, drop_last=True)
        sampler.set_epoch(0)
        loader = DataLoader(
            data, batch_size=4 // ranks, sampler=sampler, collate_fn=SFTTensorCollator("no_padding"), drop_last=True
        )
        for s, batch in enumerate(loader):
            columns = [batch[k].unbind() for k in ("input_ids", "loss_mask", "position_ids")]
            steps[s] += list(zip(*columns, strict=True))
    assert sum(map(len, steps)) == len(entries)
    for s, got in enumerate(steps):
        wanted = []
        for _, i in entries[4 * s : 4 * s + 4]:
            ids = stored[i].input_ids.tolist() if i >= 0 else [tokenizer.eos_token_id] * 2
            wanted.append((ids, stored[i].loss_mask.tolist() if i >= 0 else [0, 0], list(range(len(ids)))))
        assert sorted(wanted) == sorted(tuple(x.tolist() for x in item) for item in got)
        assert all(x.dtype == torch.int64 for item in got for x in item)


def test_rows_of_another_tokenizer_and_samples_are_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(WARM)
    write_json(tmp_path / "s.json", {"tokenizer": "0" * 64, "files": {}, "entries": [], "shuffled": False})
    with pytest.raises(OpsdError, match="of tokenizer 000000000000"):
        CorpusDataset(str(tmp_path / "s.json"), tokenizer)
    write_json(tmp_path / "s.json", {"tokenizer": tokenizer_hash(tokenizer), "files": {}, "entries": [], "shuffled": False})
    assert len(CorpusDataset(str(tmp_path / "s.json"), tokenizer)) == 0
    with pytest.raises(OpsdError, match="max_samples=3"):
        CorpusDataset(str(tmp_path / "s.json"), tokenizer, max_samples=3)


def test_ranks_of_one_torchrun_share_their_start(monkeypatch):
    from verl_opsd import plugin

    assert "verl_opsd.plugin" in sys.modules
    for rank in ("0", "1"):
        plugin._start_time.cache_clear()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        first = plugin._start_time()
        assert first == plugin._start_time() and len(first) == 19
    plugin._start_time.cache_clear()
    plugin._port.cache_clear()
    monkeypatch.setenv("MASTER_PORT", "123")
    assert plugin._port() == "123"
    plugin._port.cache_clear()


def test_a_corpus_that_was_built_anew_is_another_schedule(compose, run, tmp_path):
    """Same folder, same number of rows: what a run was started with is told by the files' hashes."""
    texts = []
    for lengths in ([10, 20], [10, 21]):
        corpus = make_corpus(tmp_path / "corpus", lengths, [])
        prepare(compose(f"corpus={corpus}"), run)
        texts.append(json.loads((run.path / "data" / "train.json").read_text()))
        shutil.rmtree(corpus)
    assert texts[0]["entries"] == texts[1]["entries"] and texts[0]["sha256"] != texts[1]["sha256"]


@pytest.fixture
def started(compose, run, tmp_path, monkeypatch) -> Callable[..., None]:
    """Starts a run as the callback does; afterwards it holds a checkpoint."""
    from verl_opsd.verl_adapter.sft_launch import WarmStartCallback

    corpus = make_corpus(tmp_path / "corpus", [10, 20, 30, 40], [12])
    monkeypatch.setenv("OPSD_START", "then")

    def start(*overrides: str, ranks: int = 1) -> None:
        WarmStartCallback()._start(compose(f"corpus={corpus}", "trainer.save_freq=2", *overrides), run, ranks)
        (run.path / "checkpoints" / "global_step_2").mkdir(parents=True, exist_ok=True)

    return start


@pytest.mark.parametrize(
    ("overrides", "ranks", "what"),
    [
        (["optim.lr=1e-4"], 1, "optim.lr=5e-06 and not 0.0001"),
        (["data.train_batch_size=4"], 1, "data.train_batch_size=2 and not 4"),  # the order of rows is the same
        (["opsd.sft.anchor=0.1"], 1, "opsd.sft.anchor=0.0 and not 0.1"),
        (["opsd.sft.gate={kappa: 1.0, gamma: -2.0}"], 1, "opsd.sft.gate"),
        (["model.lora_rank=4"], 1, "model.lora_rank=0 and not 4"),
        (["opsd.phases.all.epochs=2"], 1, "opsd.phases.all.epochs=3 and not 2"),
        ([], 2, "checkpoints of 1 ranks, this start has 2"),
    ],
)
def test_checkpoints_are_continued_under_the_configuration_that_made_them(started, run, overrides, ranks, what):
    started()
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with pytest.raises(OpsdError, match=what):
        started(*overrides, ranks=ranks)
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    started("trainer.save_freq=1", "trainer.test_freq=1", "trainer.logger=[console]")


def test_checkpoints_are_continued_on_the_rows_that_made_them(started, run, tmp_path):
    started()
    before = (run.path / "data" / "train.json").read_text()
    shutil.rmtree(tmp_path / "corpus")
    make_corpus(tmp_path / "corpus", [10, 20, 30, 41], [12])
    with pytest.raises(OpsdError, match=r"checkpoints of another schedule \(\['train'\]\)"):
        started()
    assert (run.path / "data" / "train.json").read_text() == before


def test_losses_of_every_start_are_kept(started, run):
    """verl's logger empties the file that it opens; a kill may cut the last line."""
    from hydra.core.utils import JobReturn, JobStatus

    from verl_opsd.verl_adapter.sft_launch import WarmStartCallback

    file, lines = run.path / "metrics.jsonl", [json.dumps({"step": i, "data": {"val/loss": 1.0 / i}}) + "\n" for i in (1, 2, 3)]
    started()
    file.write_text(lines[0] + lines[1] + '{"step": 3, "da')
    started()
    assert not file.exists()
    file.write_text(lines[1])
    started()  # killed again
    file.write_text(lines[2])
    done = JobReturn()
    done.status = JobStatus.COMPLETED
    WarmStartCallback().on_job_end(None, done)  # type: ignore[arg-type]
    assert file.read_text() == "".join((lines[0], lines[1], lines[1], lines[2]))
    assert not (run.path / "metrics.earlier.jsonl").exists()
