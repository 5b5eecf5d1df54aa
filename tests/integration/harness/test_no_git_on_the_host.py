"""An agent owns its repository: its hooks, filters and settings would run as the host's user if git ran there."""

from __future__ import annotations

import os
from pathlib import Path

from scripted_pair import PR, SUBMIT, Script
from test_harness_pair import ONE

from verl_opsd.cooperbench.grading import grade_pair

PLANT = (
    "for hook in post-checkout pre-commit post-index-change reference-transaction; do"
    " printf '#!/bin/sh\\ntouch /workspace/ran-on-$(id -u)\\n' > .git/hooks/$hook; chmod +x .git/hooks/$hook; done;"
    " git config core.hooksPath .git/hooks; git config core.fsmonitor 'touch /workspace/ran-on-$(id -u); true';"
    " git config diff.external 'touch /workspace/ran-on-$(id -u); true'"
)


def test_a_pair_and_its_grade_start_no_git_on_the_host(play, pair, prepared, tmp_path, monkeypatch):
    log = tmp_path / "host-git"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f'#!/bin/sh\necho "$PWD: $*" >> {log}\nexit 1\n')
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    run = play(Script(["echo one > one.txt", PR, PLANT, "git status; git diff", SUBMIT]), Script([]), keep=True)
    assert run.agents[0].patch == ONE
    ran = [path.name for path in (tmp_path / "work").glob("pair-*/**/ran-on-*")]
    assert ran and f"ran-on-{os.getuid()}" not in ran, "planted programs run, and only as the sandbox's user"
    gold = [(pair.task_dir / f"feature{f}" / "feature.patch").read_text() for f in pair.features]
    assert grade_pair(pair, prepared, *gold).reward == 1.0
    assert not Path(log).exists(), log.read_text()
