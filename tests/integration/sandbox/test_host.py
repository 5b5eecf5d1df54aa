"""What stays on the host when the owner dies, what is refused where the host lacks something, the report."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_opsd.cooperbench.sandbox import BubblewrapSandbox, SandboxSpec, make_sandbox, sandbox_report
from verl_opsd.cooperbench.sandbox import host as host_module
from verl_opsd.cooperbench.sandbox.host import STATE_ROOT, processes_of
from verl_opsd.errors import InfraFault, OpsdError

OWNER = """
import sys, threading
from pathlib import Path
from verl_opsd.cooperbench.sandbox import make_sandbox, SandboxSpec
sandbox = make_sandbox("bubblewrap", SandboxSpec("owner", Path(sys.argv[1])))
print(sandbox.uid, sandbox.label, *sandbox._cgroup.paths, flush=True)
script = "trap '' TERM; setsid bash -c 'while :; do sleep 1; done' & while :; do sleep 1; done"
thread = threading.Thread(target=sandbox.run, args=(["bash", "-c", script],), kwargs={"timeout_s": 600, "cwd": "/"})
thread.start()
thread.join()
"""


def start_owner(workspace: Path) -> tuple[subprocess.Popen, int, str, list[Path]]:
    """A Python process with an endless command in its sandbox: (process, user id, label, control groups)."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, workspace], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    uid, label, *groups = owner.stdout.readline().split()
    deadline = time.monotonic() + 20
    while len(processes_of(int(uid))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return owner, int(uid), label, [Path(group) for group in groups]


@contextlib.contextmanager
def nobody_reaps() -> Iterator[None]:
    """Every start of a sandbox on this host, of other tests too, removes what a dead owner left; here it waits."""
    with open(STATE_ROOT / "reap", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_kill_9_of_the_owner_ends_everything(make, tmp_path):
    make()  # skips where no sandbox is possible
    (tmp_path / "owned").mkdir()
    owner, uid, label, groups = start_owner(tmp_path / "owned")
    assert groups and all(group.is_dir() for group in groups)
    with nobody_reaps():
        started = time.monotonic()
        owner.kill()
        owner.wait()
        while processes_of(uid):
            assert time.monotonic() - started < 10
            time.sleep(0.02)
        assert (STATE_ROOT / label).is_dir(), "nobody was there to remove it"
    make()  # the next start does
    assert not any(group.exists() for group in groups)
    assert not (STATE_ROOT / label).exists()
    assert label not in Path("/proc/mounts").read_text()


def test_reaping_ends_processes_that_outlived_their_owner_and_spares_the_living(make, tmp_path):
    living = make()
    dead = subprocess.Popen(["true"])
    dead.wait()
    label = f"{living._owner.namespace}-{dead.pid}-1-0-orphan"
    groups = [path.parent / host_module.cgroup_name(label) for path in living._cgroup.paths]
    orphan = subprocess.Popen([f"opsd-sandbox:{label}", "600"], executable="/usr/bin/sleep")
    other = subprocess.Popen([f"opsd-sandbox:1-{dead.pid}-1-0-orphan", "600"], executable="/usr/bin/sleep")
    member = subprocess.Popen(["sleep", "600"])
    try:
        with nobody_reaps():
            state = STATE_ROOT / label
            state.mkdir()
            for group in groups:
                group.mkdir()
                (group / "cgroup.procs").write_text(str(member.pid))
            foreign = groups[0].parent / "opsd-test-foreign" if groups else tmp_path / "foreign"
            foreign.mkdir()
            (state / "cgroups").write_text("\n".join(map(str, [*groups, foreign])))
            assert label in host_module._reap()
        assert orphan.wait(5) == -9
        assert not groups or member.wait(5) == -9
        assert not state.exists() and not any(group.exists() for group in groups)
        assert foreign.is_dir(), "only names of our own are removed"
        assert other.poll() is None, "another process namespace's owner can't be judged from here"
        foreign.rmdir()
        assert living.run(["true"], timeout_s=5, cwd="/").returncode == 0
    finally:
        for process in (orphan, other, member):
            process.kill()
            process.wait()


def test_an_exiting_owner_closes_what_it_left_open(make, tmp_path):
    make()
    code = "import sys; from pathlib import Path; from verl_opsd.cooperbench.sandbox import *\n"
    code += "s = make_sandbox('bubblewrap', SandboxSpec('x', Path(sys.argv[1]))); print(s.label)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert not (STATE_ROOT / done.stdout.strip()).exists()


@pytest.fixture
def fresh_host():
    """The check of the host is done once a process; here it is done again."""
    host_module.require_host.cache_clear()
    yield
    host_module.require_host.cache_clear()


def refusal(tmp_path: Path) -> str:
    with pytest.raises(OpsdError) as error:
        make_sandbox("bubblewrap", SandboxSpec("x", tmp_path))
    assert not [path for path in STATE_ROOT.glob("*") if path.name.startswith(host_module.Owner.current().label)]
    return str(error.value)


@pytest.mark.parametrize("missing", sorted(host_module.PROGRAMS))
def test_a_missing_program_is_refused_with_its_package(tmp_path, monkeypatch, fresh_host, missing):
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in host_module.PROGRAMS:
        if name != missing:
            (directory / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setattr(host_module, "SYSTEM_DIRECTORIES", (str(directory),))
    text = refusal(tmp_path)
    assert f"no `{missing}`" in text and f"apt-get install {host_module.PROGRAMS[missing]}" in text
    assert [ok for _, ok, _ in sandbox_report()] == [False]


@pytest.mark.parametrize(
    ("script", "mode", "named"),
    [
        ("echo bubblewrap 0.6.1", 0o755, ["0.6.1", "0.7"]),
        ("exit 3", 0o755, ["bwrap does not run", "exit status 3", "--reinstall bubblewrap"]),
        ("echo bubblewrap 0.8.0", 0o644, ["bwrap does not run", "Permission denied"]),
    ],
)
def test_an_old_or_broken_bubblewrap_is_refused(tmp_path, monkeypatch, fresh_host, script, mode, named):
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in host_module.PROGRAMS:
        (directory / name).symlink_to(f"/usr/bin/{name}")
    (directory / "bwrap").unlink()
    (directory / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "bwrap").chmod(mode)
    monkeypatch.setattr(host_module, "SYSTEM_DIRECTORIES", (str(directory),))
    text = refusal(tmp_path)
    assert [word for word in named if word not in text] == []
    assert [ok for _, ok, _ in sandbox_report()] == [False]


def test_without_root_it_is_refused(tmp_path, monkeypatch, fresh_host):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run as root" in refusal(tmp_path)


@pytest.mark.parametrize("lost", ["sys_admin", "setuid", "setgid"])
def test_root_without_a_needed_capability_is_refused(make, tmp_path, lost):
    make()
    code = "import sys; from pathlib import Path; from verl_opsd.cooperbench.sandbox import *\n"
    code += "try: make_sandbox('bubblewrap', SandboxSpec('incapable', Path(sys.argv[1])))\n"
    code += "except OpsdError as e: print('refused:', e)"
    code = code.replace("import *\n", "import *; from verl_opsd.errors import InfraFault, OpsdError\n")
    command = ["setpriv", f"--bounding-set=-{lost}", f"--inh-caps=-{lost}", sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr
    assert "way out" in done.stdout
    assert not [path for path in STATE_ROOT.iterdir() if path.name.endswith("-incapable")]


def test_paths_are_checked_before_anything_is_made(make, tmp_path):
    make()
    (tmp_path / "w").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "w")
    good = tmp_path / "w"
    for spec in (
        SandboxSpec("x", tmp_path / "absent"),
        SandboxSpec("x", tmp_path / "link"),
        SandboxSpec("x", good, ro_binds=((tmp_path / "absent", "/a"),)),
        SandboxSpec("x", good, rw_binds=((tmp_path / "link", "/a"),)),
        SandboxSpec("x", good, ro_binds=((good, "relative"),)),
        SandboxSpec("x", good, ro_binds=((good, "/a/../etc"),)),
        SandboxSpec("x", good, ro_binds=((good, "/etc"),)),
        SandboxSpec("x", good, ro_binds=((good, "/"),)),
        SandboxSpec("x", good, rw_binds=((good, "/workspace"),)),
        SandboxSpec("x", good, ro_binds=((good, "/a"),), rw_binds=((good, "/a"),)),
    ):
        with pytest.raises(OpsdError) as error:
            BubblewrapSandbox(spec)
        assert "rule:" in str(error.value)
    assert good.stat().st_uid == os.getuid(), "nothing was handed over"


def test_report_of_this_host(make):
    make()
    report = sandbox_report()
    assert [name for name, _, _ in report] == [
        "bubblewrap",
        "cgroup memory",
        "cgroup pids",
        "sandbox starts",
        "own user id",
        "no network",
        "git inside",
    ]
    assert all(ok for _, ok, _ in report), report


def test_processes_that_start_together_reap_one_rest(make, tmp_path):
    """As the workers of a run do that starts after a killed one."""
    make()
    (tmp_path / "owned").mkdir()
    owner, _, label, groups = start_owner(tmp_path / "owned")
    owner.kill()
    owner.wait()
    code = "from verl_opsd.cooperbench.sandbox import reap_stale; reap_stale()"
    starters = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(4)]
    assert [starter.wait(60) for starter in starters] == [0] * 4, [starter.stderr.read() for starter in starters]
    assert not (STATE_ROOT / label).exists() and not any(group.exists() for group in groups)


def test_a_failing_set_up_is_a_fault_and_leaves_nothing(make, tmp_path, monkeypatch):
    make()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_opsd.cooperbench.sandbox.layout.write_state", fail)
    (tmp_path / "w").mkdir()
    with pytest.raises(InfraFault) as fault:
        make_sandbox("bubblewrap", SandboxSpec("failing-setup", tmp_path / "w"))
    assert fault.value.kind == "sandbox_unreachable" and "No space left" in str(fault.value)
    assert not list(STATE_ROOT.glob("*failing-setup"))
    assert "failing-setup" not in Path("/proc/mounts").read_text()
