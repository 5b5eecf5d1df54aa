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
