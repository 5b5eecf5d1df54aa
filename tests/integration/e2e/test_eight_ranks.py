"""The layout of the production recipe on gloo: four student ranks, four teacher workers, four rollout replicas; and eight student ranks.
The loss is that of one rank on the same rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from job import Job, report, run_trainer
from transformers import AutoTokenizer

from verl_opsd.models.tiny import WARM, make_tiny

pytestmark = pytest.mark.slow
LIMITS = ("opsd.contract.step_limit=2", "opsd.contract.max_tokens=32", "opsd.contract.concurrency=4", "opsd.tasks.max_eval=1")
SHARED = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.model.override_config.attn_implementation=ulysses_sdpa",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = make_tiny(
        tmp_path_factory.mktemp("teacher") / "model", seed=5, hidden_size=64, tokenizer=AutoTokenizer.from_pretrained(WARM)
    )
    return ("teacher=device", f"opsd.teacher.path={path}", "opsd.teacher.cache=false")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher: tuple[str, ...]) -> Job:
    """One round of four pairs."""
    keys = ("opsd.tasks.max_train=4", "data.train_batch_size=4", "trainer.test_freq=-1")
    job = run_trainer(tmp_path_factory.mktemp("whole"), "+recipe=opd", "scale=cpu8", *teacher, *LIMITS, *keys, timeout_s=1500)
    job.assert_done()
    return job


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, whole: Job) -> Any:
    """One update on the rows of ``whole``, in another layout."""

    def run(name: str, *overrides: str) -> Job:
        keys = (f"corpus={whole.directory}", "opsd.varies=serving", "opsd.loss.epochs=1", "trainer.test_freq=-1")
        job = run_trainer(tmp_path_factory.mktemp(name), "+recipe=opd_offline", *keys, *LIMITS, *overrides, timeout_s=1500)
        assert job.returncode == 0, job.output[-6000:]
        return job

    return run


def values(job: Job) -> np.ndarray:
    """Divergence at every loss position, in an order that no layout changes."""
    stored = np.load(job.directory / "telemetry" / "00001.npz")
    return np.sort(stored["divergence"].astype(np.float64))


def same(a: Job, b: Job) -> None:
    assert values(a).size == values(b).size > 0
    assert np.abs(values(a) - values(b)).max() < 1e-5
    (one,), (other,) = report(a.directory)["loss_by_round"], report(b.directory)["loss_by_round"]
    assert one == pytest.approx(other, abs=1e-5) and one > 1e-3


def test_one_rank_has_the_loss_of_the_whole_layout(whole: Job, again: Any, teacher: tuple[str, ...]) -> None:
    same(whole, again("one", "scale=local", *teacher))


def test_ranks_that_share_sequences_have_it_too(whole: Job, again: Any, teacher: tuple[str, ...]) -> None:
    same(whole, again("shared", "scale=cpu8", *teacher, *SHARED))


def test_eight_student_ranks_have_the_loss_of_one(again: Any) -> None:
    eight = again("eight", "scale=cpu8")
    same(eight, again("alone", "scale=local"))
    assert {f"student {n}" for n in range(8)} == set(report(eight.directory)["devices"]["peak_bytes"])


def test_the_report_says_what_each_device_did(whole: Job) -> None:
    found = report(whole.directory)
    names = {f"{side} {n}" for side in ("student", "teacher") for n in range(4)}
    assert set(found["devices"]["peak_bytes"]) == names
    assert all(2e8 < v < 4e9 for v in found["devices"]["peak_bytes"].values())
    assert {"collect", "train"} <= set(found["devices"]["idle"])
    for row in found["devices"]["idle"].values():
        assert set(row) <= names and all(0 <= v <= 1 for v in row.values())
    assert found["tokens_a_second"]["train"] > 0
    meta = json.loads((whole.directory / "meta.json").read_text())
    assert meta["opsd"]["teacher"]["devices"] == 4
