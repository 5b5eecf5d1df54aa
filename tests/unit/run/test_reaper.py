"""The reaper removes a run's directories after the run, also after a kill, and not while a process still uses them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

OWNER = """
import sys, time
from verl_opsd import reaper
handle = reaper.start(sys.argv[1:])
print(handle.pid, flush=True)
time.sleep(60)
"""


def wait_until(condition, seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def start_owner(directories: list[Path]) -> subprocess.Popen:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *map(str, directories)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    return owner


def test_directories_go_after_the_owner_was_killed(tmp_path):
    folder = tmp_path / "opsd-work"
    (folder / "deep").mkdir(parents=True)
    owner = start_owner([folder])
    time.sleep(1.5)
    assert folder.is_dir()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not folder.exists())


def test_directories_stay_while_a_process_names_them(tmp_path):
    folder = tmp_path / "opsd-used"
    folder.mkdir()
    owner = start_owner([folder])
    user = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(folder)])
    try:
        owner.kill()
        owner.wait()
        time.sleep(3)
        assert folder.is_dir()
    finally:
        user.kill()
        user.wait()
    assert wait_until(lambda: not folder.exists())


def test_a_cluster_left_behind_is_killed_with_its_children(tmp_path):
    """A stand-in for Ray's servers: their path, their session directory on the command line, and a worker with another name."""
    folder = tmp_path / "opsd-ray"
    folder.mkdir()
    server = tmp_path / "site" / "ray" / "core" / "src" / "ray" / "raylet"
    server.parent.mkdir(parents=True)
    server.symlink_to(sys.executable)
    code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    raylet = subprocess.Popen([str(server), "-c", code, f"--session={folder}/s"], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    worker = int(raylet.stdout.readline())
    owner = start_owner([folder])
    time.sleep(1)
    assert raylet.poll() is None
    owner.kill()
    owner.wait()
    assert wait_until(lambda: raylet.poll() is not None)
    assert wait_until(lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text())
    assert wait_until(lambda: not folder.exists())
