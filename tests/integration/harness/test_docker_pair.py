"""A whole pair whose sandboxes are containers, of Docker's adapter over namespaces."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from scripted_pair import PR, Script, until
from test_harness_pair import ONE

from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.sandbox import unavailable

STAND_IN = Path(__file__).parents[1] / "sandbox" / "namespace_docker.py"


@pytest.mark.slow
def test_a_pair_in_containers(play, pair, prepared, tmp_path, monkeypatch):
    if os.geteuid() or unavailable("bubblewrap"):
        pytest.skip("a docker of namespaces needs root and a host that permits them")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} -SE {STAND_IN} "$@"\n')
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "containers").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("NAMESPACE_DOCKER", str(tmp_path / "containers"))
    first = Script(["send_message agent2 'one.txt is mine'", "echo one > one.txt", "sleep 300 & setsid sleep 300 &", PR])
    second = Script([until(lambda: len(first.seen) > 4, "git fetch -q; git show origin/agent1:one.txt"), "ls / /home"])
    run = play(first, second, sandbox_backend="docker", contract={"sandbox": "docker"})
    assert run.agents[0].patch == ONE and run.agents[0].opened_pr
    assert "[Message from agent1]: one.txt is mine" in str(second.seen)
    assert '"output": "one\\n"' in second.observations()[0] and str(pair.dataset_dir) not in second.observations()[1]
    assert list((tmp_path / "containers").iterdir()) == []
    gold = [(pair.task_dir / f"feature{f}" / "feature.patch").read_text() for f in pair.features]
    grade = grade_pair(pair, prepared, *gold, backend="docker")
    assert (grade.merge, grade.reward) == ("clean", 1.0)
    assert list((tmp_path / "containers").iterdir()) == []
