"""The main job with the seeds' threshold taken at collection weights, drift measured, and a policy-gradient term beside it."""

from __future__ import annotations

import numpy as np
import pytest
from job import SHORT, Job, report, run_trainer, telemetry

pytestmark = pytest.mark.slow
ABOVE = 0.05


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_trainer(
        tmp_path_factory.mktemp("masked"),
        *("+recipe=opd", "loss=masked_005", "opsd.loss.threshold.taken=collection", "opsd.loss.drift=true"),
        *("opsd.loss.task_reward_coef=0.1", "opsd.loss.epochs=2", *SHORT),
    )


def test_ends_and_leaves_nothing(job):
    job.assert_done()


def test_the_positions_above_the_threshold_before_the_first_step_train_in_both_epochs(job):
    kept = []
    for values in telemetry(job.directory):
        first, second = (values["step"] == s for s in np.unique(values["step"]))
        assert first.sum() == second.sum() > 0
        used = values["coef"] > 0
        assert (used[first] == (values["divergence"][first] > ABOVE)).all()
        assert used[second].sum() == used[first].sum()
        assert values["coef"][used] == pytest.approx(1 / first.sum(), rel=1e-5)  # denominator: all positions
        kept.append(used[first].mean())
    assert max(kept) > 0
    assert report(job.directory)["kept_share_by_round"] == pytest.approx(kept)


def test_the_loss_is_the_masked_mean_where_every_reward_is_the_same(job):
    """No pair passes anything, so every advantage is 0 and the policy-gradient term adds nothing."""
    said = report(job.directory)
    assert said["standings"]["train"]["features"]["passed"] == 0
    for values, loss in zip(telemetry(job.directory), said["loss_by_round"], strict=True):
        steps = [values["step"] == s for s in np.unique(values["step"])]
        assert loss == pytest.approx(np.mean([(values["coef"] * values["divergence"])[s].sum() for s in steps]), rel=1e-4)


def test_drift_is_measured_at_every_position_and_starts_at_zero(job):
    first, second = telemetry(job.directory)
    assert np.isfinite(first["anchor"]).all() and np.isfinite(second["anchor"]).all()
    assert first["anchor"][first["step"] == 0].max() <= 1e-6 < second["anchor"].mean()
