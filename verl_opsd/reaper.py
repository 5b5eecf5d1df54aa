"""Removes what a run leaves behind once its processes are gone, however the run ended (also after `kill -9`).

A small process of its own, without verl and Ray. It notices the end of the run by the end of its standard input. What is
left of a Ray cluster that lives in one of the directories is killed after a few seconds (Ray by itself takes up to a minute
when its driver was killed), sandboxes whose owners are gone are ended, and once no process names one of the directories on its
command line they are removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from verl_opsd.trees import remove_tree


def start(directories: list[str]) -> subprocess.Popen[bytes]:
    """Starts the reaper; it lives until the calling process has ended. The caller keeps the returned handle open."""
    return subprocess.Popen(
        [sys.executable, "-m", "verl_opsd.reaper", *directories],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


#: Seconds that a Ray cluster has to end by itself once its driver is gone.
GRACE_S = 3.0
#: Seconds between two looks at the processes of a running cluster.
LOOK_S = 3.0


def users(directories: list[str]) -> list[int]:
    """Processes, other than reapers, whose command line names one of the directories."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # the process ended while we looked
            continue
        if "verl_opsd.reaper" not in line and any(d in line for d in directories):
            found.append(int(entry.name))
    return found


def cluster(directories: list[str]) -> list[int]:
    """Processes of a Ray cluster whose session lies in one of the directories: its servers and everything they started."""
    parent: dict[int, int] = {}
    servers = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            parent[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process ended while we looked
            continue
        if "/ray/core/src/ray/" in line.split("\0")[0] and any(d in line for d in directories):
            servers.add(int(entry.name))
    found = set(servers)
    while grown := {pid for pid, of in parent.items() if of in found} - found:
        found |= grown
    return sorted(found)


def start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot: with its id it names a process for good. Empty: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def alive(processes: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those that still run."""
    return {(pid, start) for pid, start in processes if start and start_of(pid) == start}


def kill(processes: set[tuple[int, str]]) -> None:
    """Ends processes. Servers that die first leave their workers to init, so workers are known from earlier looks."""
    for pid, _ in alive(processes):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended meanwhile
            continue


def main(directories: list[str], patience_s: float = 180.0) -> None:
    """Waits for the end of standard input, ends what is left of the run, then removes the directories."""
    seen: set[tuple[int, str]] = set()
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:  # readable: the end of the run
        seen |= {(pid, start_of(pid)) for pid in cluster(directories)}
    ended = time.monotonic()
    try:
        while (users(directories) or alive(seen)) and time.monotonic() < ended + patience_s:
            if time.monotonic() > ended + GRACE_S:
                kill(seen | {(pid, start_of(pid)) for pid in cluster(directories)})
            end_sandboxes()
            time.sleep(0.5)
        end_sandboxes()
    finally:
        for d in directories:
            with contextlib.suppress(OSError):
                remove_tree(Path(d))


def end_sandboxes() -> None:
    """Ends sandboxes of dead owners and removes their state, where this host has any."""
    from verl_opsd.cooperbench.sandbox.host import STATE_ROOT, reap_stale

    if STATE_ROOT.is_dir():
        reap_stale()


if __name__ == "__main__":
    main(sys.argv[1:])
