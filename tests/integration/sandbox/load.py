"""Run as a program, where no other test's threads open descriptors: sandboxes under load; prints what was seen as JSON.

Usage: ``python load.py FOLDER SANDBOXES COMMANDS``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_opsd.cooperbench.sandbox import Limits, Sandbox, SandboxSpec, make_sandbox
from verl_opsd.cooperbench.sandbox.host import STATE_ROOT, Owner, processes_of


def is_late(number: int) -> bool:
    """Whether a sandbox's command of this number runs past its limit: one in fifty."""
    return number % 50 == 3


def left_on_host(uids: list[int]) -> dict[str, list]:
    """Processes, mounts, state directories and control groups of this process' sandboxes."""
    label = Owner.current().label
    groups = [str(p) for root in Path("/sys/fs/cgroup").glob("**/opsd-*") for p in [root] if label in str(p)]
    return {
        "processes": [pid for uid in uids for pid in processes_of(uid)],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if f"opsd-sandbox/{label}" in line],
        "state": [path.name for path in STATE_ROOT.glob(f"{label}*")],
        "control groups": groups,
    }


def descriptors() -> dict[str, str]:
    """What each open descriptor of this process points at, but for the one that lists them."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


def main(folder: str, sandboxes: int, commands: int) -> None:
    def make(number: int) -> Sandbox:
        workspace = Path(folder, f"workspace{number}")
        (workspace / "repo").mkdir(parents=True)
        # the default number of processes: the kernel counts the dead for a while
        return make_sandbox("bubblewrap", SandboxSpec(f"load-{number}", workspace, limits=Limits(memory_bytes=128 << 20)))

    def work(number: int) -> dict:
        """Each command leaves processes behind, writes a file, reads its input."""
        sandbox = make(number)
        results = []
        for i in range(commands):
            script = f"sleep 100 & setsid sleep 100 & read x; echo {number}.{i} >> log; echo {number}-{i}-$x"
            script += "; sleep 100" if is_late(i) else ""
            done = sandbox.run(["bash", "-c", script], timeout_s=5.0 if is_late(i) else 60, stdin=b"in\n")
            results.append((done.output.decode(), done.timed_out, done.returncode))
        lines = (sandbox.spec.workspace / "repo" / "log").read_text().splitlines()
        sandbox.close()
        return {"results": results, "log": lines, "uid": sandbox.uid}

    make(sandboxes).close()
    before = descriptors()
    started = time.monotonic()
    with ThreadPoolExecutor(sandboxes) as pool:
        found = list(pool.map(work, range(sandboxes)))
    seconds = time.monotonic() - started
    left = left_on_host([each["uid"] for each in found])
    print(json.dumps({"found": found, "left": left, "before": before, "after": descriptors(), "seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
