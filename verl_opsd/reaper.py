"""Removes what a run leaves behind once its processes are gone, however the run ended (also after `kill -9`).

A small process of its own, without verl and Ray. It notices the end of the run by the end of its standard input, ends
sandboxes whose owners are gone, waits until no process names one of the directories on its command line, and removes them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path


def start(directories: list[str]) -> subprocess.Popen[bytes]:
    """Starts the reaper; it lives until the calling process has ended. The caller keeps the returned handle open."""
    return subprocess.Popen(
        [sys.executable, "-m", "verl_opsd.reaper", *directories],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


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


def main(directories: list[str], patience_s: float = 180.0) -> None:
    """Waits for the end of standard input, then for the users of the directories, then removes them."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + patience_s
    try:
        while users(directories) and time.monotonic() < deadline:
            end_sandboxes()
            time.sleep(1.0)
        end_sandboxes()
    finally:
        for d in directories:
            shutil.rmtree(d, ignore_errors=True)


def end_sandboxes() -> None:
    """Ends sandboxes of dead owners and removes their state, where this host has any."""
    from verl_opsd.cooperbench.sandbox.host import STATE_ROOT, reap_stale

    if STATE_ROOT.is_dir():
        reap_stale()


if __name__ == "__main__":
    main(sys.argv[1:])
