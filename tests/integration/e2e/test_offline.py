"""Offline training on the corpus of the online run, on two ranks where that had one: several optimizer steps, another contract."""

from __future__ import annotations

import numpy as np
import pytest
from job import SHORT, Job, evidence, report, run_trainer, stages, table, telemetry

#: Four episodes in two groups, twice.
STEPS = ("opsd.loss.epochs=2", "opsd.loss.episodes_per_update=2")


@pytest.fixture(scope="module")
def job(online: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_trainer(
        tmp_path_factory.mktemp("offline"),
        "+recipe=opd_offline",
        f"corpus={online.directory}",
        "trainer.n_gpus_per_node=2",
        "opsd.varies=serving",
        *SHORT,
        *STEPS,
    )


def loss_of_step(job: Job, step: int) -> float:
    (values,) = telemetry(job.directory)
    here = values["step"] == step
    return float((values["coef"][here] * values["divergence"][here]).sum())


def test_ends_and_leaves_nothing(job):
    job.assert_done()


def test_several_epochs_are_several_optimizer_steps_over_the_whole_corpus(job, online):
    (values,) = telemetry(job.directory)
    sampled = {r: 0 for r in ("1", "2")}
    for turn in table(online.directory, "turns", "train"):
        sampled[turn["episode_id"].split("-")[1].lstrip("0")] += len(turn["response_ids"])
    sizes = [int((values["step"] == s).sum()) for s in range(4)]
    assert sizes == [sampled["1"], sampled["2"]] * 2 and sum(sizes) == values["step"].size
    for s in range(4):
        assert values["coef"][values["step"] == s].sum() == pytest.approx(1.0, rel=1e-5)
    (trained,) = [s for s in stages(job.directory) if s["stage"] == "train"]
    assert trained["outputs"]["loss_tokens"] == sum(sampled.values())
    assert table(job.directory, "turns", "train") == []


def test_two_ranks_give_the_loss_of_one(job, online):
    """The same seed gives the same fresh adapter, and the first two groups are the episodes of the online run's two rounds: the
    first two steps replay on two ranks what the online run did on one."""
    one = report(online.directory)["loss_by_round"]
    assert loss_of_step(job, 0) == pytest.approx(one[0], rel=1e-5)
    assert loss_of_step(job, 1) == pytest.approx(one[1], rel=1e-5)  # the same gradient and the same step
    (two,) = telemetry(job.directory)
    for step, values in enumerate(telemetry(online.directory)):
        a, b = np.sort(values["divergence"]), np.sort(two["divergence"][two["step"] == step])
        assert a == pytest.approx(b, abs=1e-5)


def test_the_adapter_moves_with_every_step(job):
    losses = [loss_of_step(job, s) for s in range(4)]
    assert losses[2] != pytest.approx(losses[0], rel=1e-4) and losses[3] != pytest.approx(losses[1], rel=1e-4)
    assert report(job.directory)["loss_by_round"] == pytest.approx([np.mean(losses)], rel=1e-4)


def test_controls_publication_and_evaluation(job):
    run = job.directory
    (identity,), (shifted,) = evidence(run, "identity"), evidence(run, "identity_shifted")
    assert identity["value"] <= 1e-6 and shifted["value"] > 1e-3
    published = evidence(run, "publish_kl")
    assert len(published) == 2 * 2  # one server a rank: at the start and after the update
    assert all(g["value"] <= 1e-6 for g in published)
    assert {r["model_version"] for r in table(run, "turns", "eval")} == {1}
    assert report(run)["standings"]["eval"]["scored"] == 1
