"""A run whose policy is outside its canary's limits ends before its first update."""

import pytest
from job import SHORT, evidence, run_trainer

pytestmark = pytest.mark.slow


def test_a_policy_outside_its_limits_is_not_trained_on(tmp_path):
    job = run_trainer(tmp_path, "+recipe=opd", *SHORT, "opsd.canary.every=1")
    assert job.returncode != 0 and "gate canary" in job.output, job.output[-4000:]
    (limits,), (verdict,) = evidence(job.directory, "canary_limits"), evidence(job.directory, "canary")
    assert limits["time"] < verdict["time"] and verdict["verdict"] == "fail"
    assert not list((job.directory / "telemetry").glob("*.npz"))  # nothing was trained
