# ruff: noqa: F811
"""The border of each rule of a warm start: keys, several corpora, lengths, ranks, and what continues a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from test_classified_keys import WARM_START
from test_warm_start import compose, make_corpus, prepare, row, run  # noqa: F401
from transformers import AutoTokenizer
from verl.utils.config import omega_conf_to_dataclass

from verl_opsd.contract import EvalContract
from verl_opsd.corpus.records import write_manifest, write_rows
from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import WARM
from verl_opsd.rundir import RunDir, file_hash, write_json
from verl_opsd.teachers.cache import tokenizer_hash
from verl_opsd.verl_adapter.sft import SftEngine
from verl_opsd.verl_adapter.sft_config import parse
from verl_opsd.verl_adapter.sft_data import CorpusDataset
from verl_opsd.verl_adapter.sft_launch import WarmStartCallback

TRACKER = "latest_checkpointed_iteration.txt"
SHARED = "model.override_config.attn_implementation=ulysses_sdpa"


@pytest.fixture(scope="module")
def plain(compose) -> Any:
    return compose("corpus=C", "trainer.save_freq=2")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("trainer.save_freq", 0, "save_freq, test_freq = "),
        ("trainer.test_freq", 0, "save_freq, test_freq = "),
        ("trainer.test_freq", True, "trainer.test_freq=True"),
        ("trainer.test_freq", "after_each_epoch", "trainer.test_freq=after_each_epoch"),
        ("trainer.total_training_steps", 5, "total_training_steps=5"),
        ("data.val_files", "/x.json", "val_files=/x.json"),
        ("data.val_max_samples", 2, "val_max_samples=2"),
        ("data.custom_cls.path", "pkg://mine", "pkg://mine"),
        ("opsd.sft.anchor", float("inf"), "opsd.sft.anchor=inf"),
        ("opsd.sft.anchor", float("nan"), "opsd.sft.anchor=nan"),
        ("model.lora.rank", 8, r"model.lora.rank=8\n(.|\n)*set lora_rank"),
        ("model.lora.adapter_path", "/x", "model.lora.adapter_path=/x"),
        ("optim.total_training_steps", 3, "optim.total_training_steps=3"),
        ("optim.lr", 0.0, "optim.lr=0.0"),
        ("optim.lr", -1e-5, "optim.lr=-1e-05"),
        ("optim.clip_grad", 0.0, "optim.clip_grad=0.0"),
        ("optim.min_lr_ratio", 2.0, "optim.min_lr_ratio=2.0"),
        ("optim.lr_warmup_steps_ratio", 3.0, "optim.lr_warmup_steps_ratio=3.0"),
        ("optim.lr_scheduler_type", "cosin", "constant or cosine"),
        ("model.lora_rank", -1, "model.lora_rank=-1"),
        ("model.lora_alpha", 0, "model.lora_alpha=0"),
        ("model.lora_alpha", 1.5, "model.lora_alpha=1.5"),  # beside a checkpoint it would be 1
        ("model.external_lib", "no.such.module", "model.external_lib=no.such.module"),
        ("engine.mixed_precision.param_dtype", None, "mixed_precision.param_dtype=null"),
        ("engine.reshard_after_forward", 1, "reshard_after_forward=1"),
        ("engine.ulysses_sequence_parallel_size", 2, "ulysses_sequence_parallel_size=2 with attn_implementation=sdpa"),
        ("engine.max_token_len_per_gpu", 7, "engine.use_dynamic_bsz=False, engine.max_token_len_per_gpu=7"),
        ("checkpoint.save_contents", [], r"save_contents"),
        ("trainer.logger", ["console", "banana"], "leave out banana"),
        ("trainer.device", "cuda", "trainer.device=cuda with sft_scale=local"),
        ("trainer.n_gpus_per_node", 4, "nproc_per_node"),
        ("trainer.profile_interval", [3, 1], "profile_interval"),
        ("optim.optimizer", "Foo", "optim.optimizer=Foo"),
        ("engine.qat.enable", True, r"engine.qat.enable=True\n(.|\n)*exports or servers would not"),
        ("model.tokenizer_path", "/x", r"model.tokenizer_path=/x\n(.|\n)*launch checks"),
        ("model.tiled_mlp.enabled", True, r"model.tiled_mlp.enabled=True\n(.|\n)*ignored in silence"),
        ("data.cache_dir", "/x", "data.cache_dir"),  # of verl's PPO trainer alone
        ("data.micro_batch_size_per_gpu", 0, "micro_batch_size_per_gpu=0"),
        ("trainer.max_ckpt_to_keep", 0, "max_ckpt_to_keep=0"),
        ("engine.forward_only", True, "forward_only=True"),
        ("engine.model_dtype", "fp31", "engine.model_dtype=fp31"),
        ("engine.model_dtype", "bf16", "lora_rank=0 with engine.model_dtype=bf16"),
        ("engine.mixed_precision.param_dtype", "fp16", "param_dtype=fp16"),
        ("engine.dtype", "float16", "engine.dtype=float16"),
        ("opsd.sft.gate", {"kappa": -1.0, "gamma": -2.0}, "gate kappa=-1.0"),
        ("opsd.sft.gate", {"kappa": 1.0, "gamma": float("nan")}, "gamma=nan"),
        ("engine.sft", {"chunk": 256, "gate": None, "anchor": 0.5}, "the loss is opsd.sft"),
        ("trainer.resume_mode", "disable", "resume_mode=disable"),
        ("trainer.resume_mode", "bogus", "resume_mode=bogus"),
        ("trainer.resume_from_path", "/other/global_step_2", "resume_from_path=/other/global_step_2"),
        ("trainer.default_local_dir", "/elsewhere", "default_local_dir=/elsewhere"),
        ("checkpoint.load_contents", ["model", "optimizer"], "without extra"),
        ("trainer.seed", 7, r"trainer.seed=7\n(.|\n)*set opsd.seed"),
        ("trainer.balance_batch", False, "trainer.balance_batch=False"),
        ("data.max_length", 512, r"data.max_length=512\n(.|\n)*trained on whole"),
        ("data.truncation", "right", "data.truncation=right"),
        ("data.messages_key", "chat", "data.messages_key=chat"),
        ("data.tools_key", "functions", "data.tools_key=functions"),
        ("data.enable_thinking_key", "think", "data.enable_thinking_key=think"),
        ("data.enable_thinking_default", True, "data.enable_thinking_default=True"),
        ("data.apply_chat_template_kwargs", {"enable_thinking": False}, "apply_chat_template_kwargs.enable_thinking=False"),
        ("data.ignore_input_ids_mismatch", True, "data.ignore_input_ids_mismatch=True"),
        ("data.use_shm", True, "data.use_shm=True"),
        ("data.balance_dp_token", True, "data.balance_dp_token=True"),
    ],
)
def test_a_key_that_nothing_reads_or_that_cannot_be_is_refused(key, value, what, plain, monkeypatch):
    monkeypatch.setenv("OPSD_RUN_DIR", str(plain.data.train_files).removesuffix("/data/train.json"))
    config = plain.copy()
    OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(OpsdError, match=what):
        parse(config)
    parse(plain)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["opsd.recipe=mine"], r"opsd.recipe=mine on the command line\n(.|\n)*\+recipe="),
        (["opsd.scale=local"], r"opsd.scale=local on the command line\n(.|\n)*sft_scale="),
        (["opsd.student=tiny"], "opsd.student=tiny on the command line"),
        (["model.lora_alpha=32"], "model.lora_alpha=32 with model.lora_rank=0"),
        (["model.target_modules=[q_proj]"], "model.target_modules="),
        (["model.exclude_modules=lm_head", "model.lora_rank=4", "model.lora_adapter_path=/x"], "model.exclude_modules=lm_head"),
    ],
)
def test_labels_and_keys_of_an_adapter_that_is_not_made_are_refused_on_the_command_line(words, what, compose):
    config = compose("corpus=C", *words)
    OmegaConf.update(config, "hydra.overrides.task", words, force_add=True)
    with pytest.raises(OpsdError, match=what):
        parse(config)


@pytest.mark.parametrize("value", ["banana", 1.5, [], {}])
def test_values_of_another_kind_and_groups_that_are_none_have_errors_of_their_own(value, plain, monkeypatch):
    monkeypatch.setenv("OPSD_RUN_DIR", str(plain.data.train_files).removesuffix("/data/train.json"))
    sections = [
        "model",
        "engine",
        "optim",
        "data",
        "trainer",
        "checkpoint",
        "model.override_config",
        "opsd.sft.gate",
    ]
    text: Any = {
        "model.path",
        "model.target_modules",
        "model.exclude_modules",
        "trainer.project_name",
        "trainer.experiment_name",
    }
    text |= {
        "trainer.default_hdfs_dir",
        "model.lora_adapter_path",
        "model.external_lib",
        "trainer.logger",
        "checkpoint.load_contents",
    }
    for key in {*WARM_START, *sections} - text - {"engine.fsdp_size"}:  # that one against the ranks, when a run is prepared
        config = plain.copy()
        OmegaConf.update(config, key, value, force_add=True, merge=False)
        number = value == 1.5 and key in {"optim.lr", "optim.clip_grad", "optim.weight_decay", "optim.num_cycles"}
        empty = value == {} and key in {"optim.override_optimizer_config", "model.override_config"}
        if number or empty:
            parse(config)
            continue
        with pytest.raises(OpsdError):
            parse(config)
            pytest.fail(f"{key}={value}")


@pytest.mark.parametrize(
    "error", [RuntimeError("failed finding central directory"), FileNotFoundError("gone"), EOFError("end")]
)
def test_a_checkpoint_that_cannot_be_read_is_named(error, monkeypatch):
    def load(self, local_path, *args, **kwargs):
        raise error

    monkeypatch.setattr(SftEngine.__mro__[1], "load_checkpoint", load)
    engine = SftEngine.__new__(SftEngine)
    engine.engine_config = OmegaConf.create({"loss": {"anchor": 0.0}})
    engine.get_data_parallel_rank = lambda: 0  # type: ignore[method-assign]
    with pytest.raises(OpsdError, match=rf"/run/global_step_4: {error}\n(.|\n)*latest_checkpointed_iteration"):
        engine.load_checkpoint("/run/global_step_4")


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_checkpoint_whose_place_in_the_rows_is_lost_is_named(damage, tmp_path, monkeypatch):
    """verl would go on at the first row, with a warning."""
    monkeypatch.setattr(SftEngine.__mro__[1], "load_checkpoint", lambda *args, **kwargs: None)
    engine = SftEngine.__new__(SftEngine)
    engine.engine_config = OmegaConf.create({"loss": {"anchor": 0.0}})
    engine.get_data_parallel_rank = lambda: 1  # type: ignore[method-assign]
    torch.save({"_snapshot": 3}, tmp_path / "data_1.pt")
    engine.load_checkpoint(str(tmp_path))
    if damage == "gone":
        (tmp_path / "data_1.pt").unlink()
    else:
        (tmp_path / "data_1.pt").write_bytes((tmp_path / "data_1.pt").read_bytes()[:-30])
    with pytest.raises(OpsdError, match="latest_checkpointed_iteration"):
        engine.load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("stated", [1, 3])
def test_rows_that_the_manifest_does_not_count_are_no_corpus(stated, compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "a", [10, 20], [])
    manifest = json.loads((corpus / "corpus.json").read_text())
    manifest["files"]["train"]["rows"] = stated
    write_manifest(corpus, manifest)
    with pytest.raises(OpsdError, match=f"of 2 rows, its manifest says {stated}"):
        prepare(compose(f"corpus={corpus}", "trainer.test_freq=-1"), run, 1)


def test_checkpoints_that_a_run_goes_on_from_hold_all_of_its_state(compose, run):
    words = ["corpus=C", "checkpoint.save_contents=[model]"]
    with pytest.raises(OpsdError, match="without optimizer, extra"):
        parse(compose(*words, "trainer.save_freq=2"))
    parse(compose(*words, "trainer.save_freq=-1"))


def test_every_corpus_gives_its_held_out_rows_and_the_longest_counts(compose, run, tmp_path):
    a, b = make_corpus(tmp_path / "a", [10, 20], [12]), make_corpus(tmp_path / "b", [11, 12, 13], [50, 15])
    words = ["curriculum=two_phase", f"corpus={a}", f"corpus_b={b}", "data.use_dynamic_bsz=true"]
    found = prepare(compose(*words, "data.max_token_len_per_gpu=50"), run)
    held = json.loads((run.path / "data" / "validation.json").read_text())
    assert held["entries"] == [["a", 0], ["b", 0], ["b", 1], ["", -1]]
    assert (found["validation_rows"], found["longest"]) == (3, 50)
    with pytest.raises(OpsdError, match="a row of 50 tokens"):
        prepare(compose(*words, "data.max_token_len_per_gpu=49"), run)
    split = ["engine.ulysses_sequence_parallel_size=2", SHARED]  # two ranks hold half of a sequence each
    assert prepare(compose(*words, "data.max_token_len_per_gpu=25", *split), run, ranks=2)["longest"] == 50


def test_a_row_that_the_model_has_no_positions_for_is_refused(compose, run, tmp_path):
    most = json.loads((WARM / "config.json").read_text())["max_position_embeddings"]
    fits, over = (make_corpus(tmp_path / str(n), [n], []) for n in (most, most + 1))
    assert prepare(compose(f"corpus={fits}"), run)["longest"] == most
    with pytest.raises(OpsdError, match=f"a row of {most + 1} tokens; the model has {most} positions"):
        prepare(compose(f"corpus={over}"), run)


def test_ranks_that_share_a_sequence_share_a_row(compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10, 20, 30], [])
    split = ["engine.ulysses_sequence_parallel_size=2", SHARED]
    assert prepare(compose(f"corpus={corpus}", *split), run, ranks=4)["steps"] == 5  # 9 rows, 2 a step
    with pytest.raises(OpsdError, match="train_batch_size=1 on 4 ranks, 2 of which"):
        prepare(compose(f"corpus={corpus}", *split, "data.train_batch_size=1"), run, ranks=4)


def test_corpora_of_two_contracts_are_refused(compose, run, tmp_path):
    """Which tasks a corpus is of may differ; nothing else."""
    made = {
        name: make_corpus(tmp_path / name, [10], [], contract=contract.as_dict(), contract_hashes=[contract.hash])
        for name, contract in {
            "a": EvalContract(),
            "b": EvalContract(subset_hash="other", dataset_hash="other"),
            "c": EvalContract(step_limit=7),
        }.items()
    }
    words = ["curriculum=two_phase", f"corpus={made['a']}"]
    assert prepare(compose(*words, f"corpus_b={made['b']}"), run)["rows"] == 4
    with pytest.raises(OpsdError, match="step_limit"):
        prepare(compose(*words, f"corpus_b={made['c']}"), run)


def test_the_seed_is_that_of_the_order(compose, run, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [10 + i for i in range(12)], [])
    orders = []
    for seed in (0, 0, 1):
        prepare(compose(f"corpus={corpus}", f"opsd.seed={seed}"), run)
        orders.append(json.loads((run.path / "data" / "train.json").read_text())["entries"])
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2])


def test_rows_that_verl_does_not_shuffle_come_in_order_each_from_its_own_bucket(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(WARM)
    folders = {"a": make_corpus(tmp_path / "a", [10, 20], []), "b": make_corpus(tmp_path / "b", [11, 12, 13], [])}
    entries = [["b", 2], ["a", 1], ["", -1], ["b", 0], ["a", 0]]
    files = {k: str(v / "train.parquet") for k, v in folders.items()}
    write_json(
        tmp_path / "s.json",
        {"tokenizer": tokenizer_hash(tokenizer), "files": files, "sha256": {k: file_hash(Path(v)) for k, v in files.items()}}
        | {"entries": entries, "shuffled": False},
    )
    data = CorpusDataset(str(tmp_path / "s.json"), tokenizer)
    got = [data[i]["input_ids"].tolist() for i in range(len(data))]
    ids = [row(500 + i, n).input_ids.tolist() for i, n in ((2, 13), (1, 20), (0, 11), (0, 10))]
    assert got == [*ids[:2], [tokenizer.eos_token_id] * 2, *ids[2:]]
    write_rows(folders["b"] / "train.parquet", [row(i, 9) for i in range(3)])  # another host has other rows
    with pytest.raises(OpsdError, match=r"b/train.parquet has SHA-256 [0-9a-f]{12}, the schedule"):
        CorpusDataset(str(tmp_path / "s.json"), tokenizer)


def start(config: Any, run: RunDir) -> None:
    WarmStartCallback()._start(config, run, 1)


def test_a_start_that_left_no_checkpoint_binds_nothing(compose, run, tmp_path, monkeypatch):
    """Other settings and other rows are a run from step 1, and losses of the earlier start are no part of it."""
    monkeypatch.setenv("OPSD_START", "then")
    words = [f"corpus={make_corpus(tmp_path / 'corpus', [10, 20, 30, 40], [])}"]
    start(compose(*words), run)
    for name in ("metrics.jsonl", "metrics.earlier.jsonl"):
        (run.path / name).write_text('{"step":9,"data":{"train/loss":9.0}}\n')
    start(compose(*words, "optim.lr=1e-4", "opsd.seed=3"), run)
    assert not list(run.path.glob("metrics*"))
    assert json.loads((run.path / "meta.json").read_text())["config"]["optim"]["lr"] == 1e-4


def test_checkpoints_are_continued_on_the_rows_that_were_held_out(compose, run, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_START", "then")
    a = make_corpus(tmp_path / "corpus", [10, 20], [12])
    start(compose(f"corpus={a}"), run)
    (run.path / "checkpoints" / "global_step_2").mkdir(parents=True)
    a.rename(tmp_path / "old")
    make_corpus(a, [10, 20], [13])
    with pytest.raises(OpsdError, match=r"another schedule \(\['validation'\]\)"):
        start(compose(f"corpus={a}"), run)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda p: (p / "meta.json").unlink(), "no meta.json that says what made them"),
        (lambda p: (p / "meta.json").write_text("{}"), "no meta.json that says what made them"),
        (lambda p: (p / "meta.json").write_text("{"), "meta.json"),
        (lambda p: (p / "data" / "train.json").unlink(), r"another schedule \(\['train', 'validation'\]\)"),
        (lambda p: (p / "checkpoints" / TRACKER).unlink(), "is gone, and there are checkpoints of the steps 2, 4"),
        (lambda p: (p / "checkpoints" / TRACKER).write_text("3"), "says '3', and there are checkpoints of the steps 2, 4"),
        (lambda p: (p / "checkpoints" / TRACKER).write_text("four"), "says 'four'"),
        (lambda p: (p / "checkpoints" / TRACKER).write_bytes(b"\xff"), "says "),
    ],
)
def test_checkpoints_whose_run_is_not_known_any_more_are_not_continued(damage, what, compose, run, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_START", "then")
    config = compose(f"corpus={make_corpus(tmp_path / 'corpus', [10, 20], [12])}")
    start(config, run)
    for step in (2, 4):
        (run.path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    for step in ("2\n", "4"):  # either may be named
        (run.path / "checkpoints" / TRACKER).write_text(step)
        start(config, run)
    damage(run.path)
    for _ in range(2):  # a refused start leaves nothing that the next one would go on from
        with pytest.raises(OpsdError, match=what):
            start(config, run)


def test_a_run_that_was_killed_while_it_wrote_its_first_checkpoint_starts_over(compose, run, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_START", "then")
    config = compose(f"corpus={make_corpus(tmp_path / 'corpus', [10, 20], [12])}")
    start(config, run)
    (run.path / "checkpoints" / "global_step_2").mkdir(parents=True)
    start(config, run)


@pytest.mark.parametrize(("dynamic", "limits"), [(True, (77, float("inf"))), (False, (float("inf"), 3))])
def test_the_anchors_forwards_hold_as_much_as_those_of_a_step(compose, dynamic, limits):
    """The limits are verl's own keys of the data; the engine reads them from its configuration."""
    config = compose(
        "corpus=C", f"data.use_dynamic_bsz={dynamic}", "data.max_token_len_per_gpu=77", "data.micro_batch_size_per_gpu=3"
    )
    engine = SftEngine.__new__(SftEngine)
    engine.engine_config = omega_conf_to_dataclass(config.engine)
    engine.shares_forwards, engine.use_remove_padding = lambda: True, True  # type: ignore[method-assign]
    assert engine._scoring_limits() == limits
