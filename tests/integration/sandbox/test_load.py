"""Many sandboxes under load: no command is lost, and nothing is left on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_opsd.cooperbench.sandbox.host import FIRST_UID, LAST_UID

SANDBOXES = 16


@pytest.mark.parametrize("commands", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_sixteen_sandboxes_lose_no_command_and_leave_nothing(make, tmp_path, commands):
    make().close()  # skips where there is no bubblewrap
    program = [sys.executable, Path(__file__).with_name("load.py"), tmp_path / "load", SANDBOXES, commands]
    done = subprocess.run([str(part) for part in program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    print(f"{SANDBOXES} sandboxes x {commands} commands: {seen['seconds']:.0f} s")
    late = set(range(3, commands, 50))  # as load.py has it: one in fifty runs past its limit
    for number, found in enumerate(seen["found"]):
        wanted = [[f"{number}-{i}-in\n", i in late, 124 * (i in late)] for i in range(commands)]
        assert found["results"] == wanted
        assert found["log"] == [f"{number}.{i}" for i in range(commands)]
    uids = {found["uid"] for found in seen["found"]}
    assert len(uids) == SANDBOXES and all(FIRST_UID <= uid <= LAST_UID for uid in uids)
    assert seen["left"] == {"processes": [], "mounts": [], "state": [], "control groups": []}
    assert seen["after"] == seen["before"]
