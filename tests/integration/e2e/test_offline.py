"""Offline training on the corpus of the online run: one and two ranks, several optimizer steps, another contract."""

from __future__ import annotations

import numpy as np
import pytest
from job import SHORT, Job, evidence, report, run_trainer, stages, table, telemetry

#: Four episodes in two groups, twice.
STEPS = ("opsd.loss.epochs=2", "opsd.loss.episodes_per_update=2")


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def jobs(online: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    return {
        n: run_trainer(
            tmp_path_factory.mktemp(f"offline{n}"),
            "+recipe=opd_offline",
            f"corpus={online.directory}",
            f"trainer.n_gpus_per_node={n}",
            *SHORT,
            *STEPS,
        )
        for n in (1, 2)
    }


def loss_of_step(job: Job, step: int) -> float:
    (values,) = telemetry(job.directory)
    here = values["step"] == step
    return float((values["coef"][here] * values["divergence"][here]).sum())


def test_ends_and_leaves_nothing(jobs, ranks):
    jobs[ranks].assert_done()


def test_several_epochs_are_several_optimizer_steps_over_the_whole_corpus(jobs, ranks, online):
    (values,) = telemetry(jobs[ranks].directory)
    sampled = {r: 0 for r in ("1", "2")}
    for turn in table(online.directory, "turns", "train"):
        sampled[turn["episode_id"].split("-")[1].lstrip("0")] += len(turn["response_ids"])
    sizes = [int((values["step"] == s).sum()) for s in range(4)]
    assert sizes == [sampled["1"], sampled["2"]] * 2 and sum(sizes) == values["step"].size
    for s in range(4):
        assert values["coef"][values["step"] == s].sum() == pytest.approx(1.0, rel=1e-5)
    (trained,) = [s for s in stages(jobs[ranks].directory) if s["stage"] == "train"]
    assert trained["outputs"]["loss_tokens"] == sum(sampled.values())
    assert table(jobs[ranks].directory, "turns", "train") == []


def test_the_adapter_is_fresh_and_moves_with_every_step(jobs, ranks, online):
    """The same seed gives the same adapter, and the first two groups are the episodes of the online run's two rounds: the
    first two steps replay them."""
    first, second = report(online.directory)["loss_by_round"]
    assert loss_of_step(jobs[ranks], 0) == pytest.approx(first, rel=1e-5)
    assert loss_of_step(jobs[ranks], 1) == pytest.approx(second, rel=1e-4)
    assert loss_of_step(jobs[ranks], 2) != pytest.approx(first, rel=1e-4)
    mean = sum(loss_of_step(jobs[ranks], s) for s in range(4)) / 4
    assert report(jobs[ranks].directory)["loss_by_round"] == pytest.approx([mean], rel=1e-4)


def test_two_ranks_give_the_loss_of_one(jobs):
    one, two = (telemetry(jobs[n].directory)[0] for n in (1, 2))
    assert loss_of_step(jobs[1], 0) == pytest.approx(loss_of_step(jobs[2], 0), rel=1e-5)
    for s, atol in ((0, 1e-5), (3, 1e-4)):
        a, b = (np.sort(t["divergence"][t["step"] == s]) for t in (one, two))
        assert a == pytest.approx(b, abs=atol)
    for s in (1, 2, 3):  # the same gradient and the same steps
        assert loss_of_step(jobs[1], s) == pytest.approx(loss_of_step(jobs[2], s), rel=1e-4)


def test_controls_publication_and_evaluation(jobs, ranks):
    run = jobs[ranks].directory
    (identity,), (shifted,) = evidence(run, "identity"), evidence(run, "identity_shifted")
    assert identity["value"] <= 1e-6 and shifted["value"] > 1e-3
    published = evidence(run, "publish_kl")
    assert len(published) == 2 * ranks  # one server a rank: at the start and after the update
    assert all(g["value"] <= 1e-6 for g in published)
    assert {r["model_version"] for r in table(run, "turns", "eval")} == {1}
    assert report(run)["eval"]["episodes"]["scored"] == 1


def test_a_corpus_of_another_contract_is_refused_field_by_field(online, tmp_path):
    job = run_trainer(tmp_path, "+recipe=opd_offline", f"corpus={online.directory}", *SHORT[1:], "opsd.contract.top_p=0.9")
    assert job.returncode == 2 and job.all_left == []
    assert "was made under another contract (step_limit: 4 != 2; top_p: 0.9 != 1.0)" in job.output
    assert not (job.directory / "meta.json").exists() and "ray init" not in job.output
