"""A dry run checks everything, says what the episodes will take, starts nothing and leaves nothing; a budget refuses."""

from __future__ import annotations

import pytest
from leftovers import leavings


def test_a_dry_run_prints_its_estimate_and_leaves_nothing(compose, tmp_path, capsys):
    import ray

    from verl_opsd.verl_adapter.callback import OpsdCallback

    words = ["opsd.dry_run=true", "opsd.budget.minutes_per_pair=12", "opsd.budget.max_gpu_hours=200"]
    config = compose("+recipe=opd", *words)
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)  # as Hydra does before it calls callbacks
    before = leavings()
    with pytest.raises(SystemExit) as stop:
        OpsdCallback().on_job_start(config)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "dry run, nothing was started" in out and "about 12.0 minutes each" in out and "GPU-hours: about 0.00" in out
    assert not run.exists() and leavings() <= before and not ray.is_initialized()


def test_an_estimate_above_a_limit_is_refused(refused):
    text = refused("opsd.budget.max_hours=0.01")
    assert "opsd.budget.max_hours=0.01" in text and "at most" in text
    assert "wrong_key" in refused("+opsd.budget.wrong_key=1")
