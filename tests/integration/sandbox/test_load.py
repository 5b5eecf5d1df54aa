"""Many sandboxes under load: no command is lost, and nothing is left on the host."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_opsd.cooperbench.sandbox.host import FIRST_UID, LAST_UID, STATE_ROOT, Owner, processes_of

SANDBOXES = 16


def left_on_host(uids: list[int]) -> dict[str, list]:
    """Processes, mounts, state directories, control groups and descriptors of this process' sandboxes."""
    label = Owner.current().label
    groups = [str(p) for root in Path("/sys/fs/cgroup").glob("**/opsd-*") for p in [root] if label in str(p)]
    return {
        "processes": [pid for uid in uids for pid in processes_of(uid)],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if f"opsd-sandbox/{label}" in line],
        "state": [path.name for path in STATE_ROOT.glob(f"{label}*")],
        "control groups": groups,
    }


@pytest.mark.parametrize("commands", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_sixteen_sandboxes_lose_no_command_and_leave_nothing(make, commands):
    """Each command leaves processes behind, writes a file, reads its input; one in fifty runs past its limit."""
    make().close()
    before = set(os.listdir("/proc/self/fd"))

    def work(number: int) -> tuple[list, int, int]:
        sandbox = make(
            limits={"memory_bytes": 128 << 20}
        )  # the default number of processes: the kernel counts the dead for a while
        wrong, killed = [], 0
        for i in range(commands):
            late = i % 50 == 3
            script = f"sleep 100 & setsid sleep 100 & read x; echo {number}.{i} >> log; echo {number}-{i}-$x"
            script += "; sleep 100" if late else ""
            done = sandbox.run(["bash", "-c", script], timeout_s=5.0 if late else 60, stdin=b"in\n")
            if (done.output, done.timed_out, done.returncode) != (f"{number}-{i}-in\n".encode(), late, 124 * late):
                wrong.append((i, done))
            killed += done.timed_out
        lines = (sandbox.spec.workspace / "repo" / "log").read_text().splitlines()
        assert lines == [f"{number}.{i}" for i in range(commands)]
        sandbox.close()
        return wrong, killed, sandbox.uid

    started = time.monotonic()
    with ThreadPoolExecutor(SANDBOXES) as pool:
        results = list(pool.map(work, range(SANDBOXES)))
    seconds = time.monotonic() - started
    rate = SANDBOXES * commands / seconds
    print(f"{SANDBOXES} sandboxes x {commands} commands: {seconds:.0f} s, {rate:.0f} commands a second")
    assert [wrong for wrong, _, _ in results if wrong] == []
    assert [killed for _, killed, _ in results] == [len(range(3, commands, 50))] * SANDBOXES
    uids = [uid for _, _, uid in results]
    assert len(set(uids)) == SANDBOXES and all(FIRST_UID <= uid <= LAST_UID for uid in uids)
    assert left_on_host(uids) == {"processes": [], "mounts": [], "state": [], "control groups": []}
    assert set(os.listdir("/proc/self/fd")) == before
