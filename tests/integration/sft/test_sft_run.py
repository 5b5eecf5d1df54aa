"""Whole runs of verl's SFT trainer on a small corpus: one rank and two, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from verl_opsd.corpus.records import CORPUS_SCHEMA, MANIFEST_KEYS, CorpusRow, read_rows, write_manifest, write_rows
from verl_opsd.models.export import whole_weights
from verl_opsd.models.tiny import WARM
from verl_opsd.rundir import file_hash
from verl_opsd.teachers.cache import tokenizer_hash

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[3]


def row(i: int) -> CorpusRow:
    rng = np.random.default_rng(i)
    length = int(rng.integers(20, 60))
    mask = np.zeros(length, np.int8)
    mask[length // 2 : length // 2 + 8] = 1
    return CorpusRow(
        source="run", episode_id=f"e{i}", agent_id="agent1", branch=0, origin="recorded", repo="r", task_id=1, feature_id=1,
        passed=True, pair_passed=True, actor_brief_kind="none", contract_hash="c", model_version=0,
        input_ids=rng.integers(3, 2000, length).astype(np.int32), loss_mask=mask,
        turn_index=np.where(mask, 0, -1).astype(np.int32), token_class=np.where(mask, 4, -1).astype(np.int8),
        logprobs=np.zeros(length, np.float32),
    ).hashed()  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    files = {}
    for split, start, n in (("train", 0, 7), ("validation", 50, 3)):
        write_rows(path / f"{split}.parquet", [row(start + i) for i in range(n)])
        files[split] = {"name": f"{split}.parquet", "rows": n, "sha256": file_hash(path / f"{split}.parquet")}
    write_manifest(
        path,
        {
            **dict.fromkeys(MANIFEST_KEYS),
            "schema": CORPUS_SCHEMA,
            "tokenizer": tokenizer_hash(AutoTokenizer.from_pretrained(WARM)),
            "files": files,
            "contract": {},
            "contract_hashes": [],
            "gates": [{"gate": "mask", "verdict": "pass"}],
        },
    )
    return path


def command(corpus: Path, run: Path, ranks: int = 1) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    overrides = [
        "opsd.phases.all.epochs=2",
        "optim.lr=1e-3",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        f"hydra.run.dir={run}",
    ]
    return [
        sys.executable,
        *torchrun,
        "-m",
        "verl.trainer.sft_trainer",
        "+recipe=warm_start",
        "sft_scale=local",
        f"corpus={corpus}",
        *overrides,
    ]


def finish(corpus: Path, run: Path, ranks: int = 1) -> str:
    done = subprocess.run(command(corpus, run, ranks), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def losses(run: Path, name: str) -> dict[int, float]:
    entries: list[dict[str, Any]] = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return {e["step"]: e["data"][name] for e in entries if name in e["data"]}


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert "14 rows in 7 steps, 3 rows held out" in finish(corpus, run)
    return run


def test_the_first_loss_is_cross_entropy_by_hand(whole, corpus):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(json.loads((whole / "meta.json").read_text())["student"], dtype=torch.float32)
    entries = json.loads((whole / "data" / "train.json").read_text())["entries"][:2]
    rows = read_rows(corpus / "train.parquet")
    total, count = 0.0, 0
    for _, i in entries:
        ids = torch.from_numpy(rows[i].input_ids.astype(np.int64))
        target = torch.from_numpy(np.flatnonzero(rows[i].loss_mask))
        with torch.no_grad():
            logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total -= float(logp[target - 1, ids[target]].sum())
        count += len(target)
    found = losses(whole, "train/loss")
    assert sorted(found) == list(range(1, 8)) and found[1] == pytest.approx(total / count, rel=1e-5)
    assert sorted(losses(whole, "val/loss")) == [2, 4, 6, 7] and found[7] < found[1]


def test_two_ranks_train_the_same(whole, corpus, tmp_path):
    finish(corpus, tmp_path / "run", ranks=2)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        one, two = losses(whole, name), losses(tmp_path / "run", name)
        assert one.keys() == two.keys() and all(two[k] == pytest.approx(one[k], rel=2e-5) for k in one), name
    a, b = (whole_weights(r / "checkpoints" / "global_step_7") for r in (whole, tmp_path / "run"))
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 2e-5


def test_killed_and_started_again_it_ends_with_the_same_bits(whole, corpus, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(corpus, run),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    mark, until = run / "checkpoints" / "latest_checkpointed_iteration.txt", time.monotonic() + 300
    while not (mark.is_file() and mark.read_text() in ("2", "4")) and time.monotonic() < until:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (run / "checkpoints" / "global_step_7").exists()
    finish(corpus, run)
    a, b = (whole_weights(r / "checkpoints" / "global_step_7") for r in (whole, run))
    assert all(torch.equal(a[k], b[k]) for k in a) and a.keys() == b.keys()
    assert losses(run, "train/loss") == losses(whole, "train/loss") and losses(run, "val/loss") == losses(whole, "val/loss")


def test_a_run_is_not_continued_under_other_settings(whole, corpus):
    words = [w.replace("epochs=2", "epochs=3") for w in command(corpus, whole)]
    before = (whole / "data" / "train.json").read_text()
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "opsd.phases.all.epochs=2 and not 3" in done.stderr, done.stdout + done.stderr
    assert (whole / "data" / "train.json").read_text() == before
