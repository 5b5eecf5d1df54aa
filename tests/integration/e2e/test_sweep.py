"""A Hydra multirun over the anchor, with checkpoints and wandb: two whole runs in one command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from job import Job, report, run_trainer, stages, telemetry

from verl_opsd.cli.main import main

pytestmark = pytest.mark.slow
ANCHORS = (0.0, 0.5)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_trainer(
        tmp_path_factory.mktemp("sweep"),
        "-m",
        "+recipe=opd",
        "+sweep=anchor",
        "opsd.loss.epochs=2",
        "opsd.contract.step_limit=1",
        "opsd.contract.max_tokens=16",
        "opsd.tasks.max_train=1",
        "opsd.tasks.max_eval=1",
        "data.train_batch_size=1",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.logger=[console,wandb]",
    )


def test_ends_and_leaves_nothing(job):
    job.assert_done()
    assert len(set(job.temporary())) == 4  # two directories a job, none shared


def test_each_job_runs_to_its_end_in_its_own_directory(job):
    assert [d.name for d in job.directories] == ["0", "1"]
    assert len({d.parent for d in job.directories}) == 1
    for anchor, run in zip(ANCHORS, job.directories, strict=True):
        assert report(run)["loss_spec"]["anchor"] == anchor
        found = [(s["step"], s["stage"]) for s in stages(run)]
        assert found == [
            (0, "start"),
            *((1, s) for s in ("collect", "control", "evaluate", "publish", "score", "train")),
        ]
        assert json.loads((run / "meta.json").read_text())["opsd"]["loss"]["anchor"] == anchor
        # the second job did not resume the first one's checkpoint: it collected and trained step 1 itself
        assert [p.name for p in (run / "checkpoints").glob("global_step_*")] == ["global_step_1"]
        (values,) = telemetry(run)
        assert sorted(set(values["step"])) == [0.0, 1.0]
    assert "Resuming from" not in job.output


def test_the_jobs_are_joined_into_one_table_and_plot(job, capsys):
    folder = job.directories[0].parent
    assert main(["sweep", str(folder)]) == 0
    assert "one for all jobs" in capsys.readouterr().out and "<svg" in (folder / "sweep.html").read_text()
    rows = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [(r["swept"], r["standing"]["scored"]) for r in rows] == [({"opsd.loss.anchor": str(a)}, 1) for a in ANCHORS]
    for row, run in zip(rows, job.directories, strict=True):
        assert row["standing"]["features"] == report(run)["standings"]["eval"]["features"]


def test_wandb_logs_offline(job):
    runs = [list(run.glob("wandb/offline-run-*/run-*.wandb")) for run in job.directories]
    assert [len(r) for r in runs] == [1] * len(ANCHORS) and all(p.stat().st_size > 0 for (p,) in runs)
    assert not (job.cwd / "wandb").exists()


def test_the_anchor_starts_at_zero_and_is_part_of_the_loss(job):
    for weight, run in zip(ANCHORS, job.directories, strict=True):
        (t,) = telemetry(run)
        losses = []
        for step in (0, 1):
            here = t["step"] == step
            anchor = t["anchor"][here]
            if weight:
                assert np.isfinite(anchor).all() and (anchor >= 0).all()
                if step == 0:  # the student is its base
                    assert anchor.max() <= 1e-6
                else:
                    assert anchor.mean() > 1e-6
            # token mean of either term; without an anchor nothing is measured
            losses.append(t["divergence"][here].mean() + (weight * anchor.mean() if weight else 0.0))
        assert report(run)["loss_by_round"] == pytest.approx([np.mean(losses)], rel=1e-4)
        assert ("drift_by_quarter" in report(run)["distillation"]) == (weight > 0)
