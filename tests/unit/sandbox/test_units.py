"""The sandboxes' parts that need no sandbox: bounded output, refusals, user ids, who is dead, limits' files."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.cooperbench.sandbox import (
    Limits,
    PlainProcessSandbox,
    SandboxSpec,
    cgroup,
    host,
    layout,
    make_sandbox,
    seccomp,
    spawn,
)
from verl_opsd.errors import InfraFault, OpsdError


@settings(max_examples=50, deadline=None)
@given(chunks=st.lists(st.binary(max_size=300), max_size=8), limit=st.integers(0, 900))
def test_bounded_output_is_a_prefix(chunks, limit):
    read_end, write_end = spawn.output_pipe()
    output = spawn.BoundedOutput(read_end, limit)
    for chunk in chunks:
        os.write(write_end, chunk)
        output.read_available()
    os.close(write_end)
    output.drain()
    os.close(read_end)
    whole = b"".join(chunks)
    assert output.value() == whole[:limit]
    assert output.truncated is (len(whole) > limit)
    assert output.eof


def test_drain_ends_while_another_writer_holds_the_pipe():
    read_end, write_end = spawn.output_pipe()
    os.write(write_end, b"left")
    output = spawn.BoundedOutput(read_end, 100)
    started = time.monotonic()
    output.drain()
    assert time.monotonic() - started < 10
    assert output.value() == b"left" and not output.eof
    os.close(write_end)
    os.close(read_end)


def test_a_child_outlives_the_thread_that_asked_for_it():
    """The kernel's parent-death signal follows the thread that started the child."""
    made = []
    command = [str(host.program("setpriv")), "--pdeathsig", "KILL", "sleep", "60"]

    def ask(start) -> None:
        made.append(start(command))
        time.sleep(0.3)  # past the child's own prctl

    for start in (spawn.spawn, subprocess.Popen):
        thread = threading.Thread(target=ask, args=(start,))
        thread.start()
        thread.join()
    time.sleep(0.3)
    kept, lost = made
    assert kept.poll() is None
    assert lost.poll() == -9, "the control: a child of the ended thread is gone"
    kept.kill()
    kept.wait()


def test_spawning_in_a_forked_child():
    spawn.spawn(["true"]).wait()
    pid = os.fork()
    if pid == 0:
        os._exit(spawn.spawn(["sh", "-c", "exit 7"]).wait())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_backends(tmp_path):
    spec = SandboxSpec("x", tmp_path)
    with pytest.raises(OpsdError) as error:
        make_sandbox("podman", spec)
    assert "bubblewrap, process, docker, modal" in str(error.value)
    with pytest.raises(OpsdError) as error:
        make_sandbox("process", spec)
    assert "data set" in str(error.value) and "allow_unsafe=True" in str(error.value)
    sandbox = make_sandbox("process", spec, allow_unsafe=True)
    assert isinstance(sandbox, PlainProcessSandbox)
    sandbox.close()


def test_plain_process_refuses_a_bind_it_cannot_show(tmp_path):
    for binds in ({"ro_binds": ((tmp_path, "/git"),)}, {"rw_binds": ((tmp_path, "/git"),)}):
        with pytest.raises(OpsdError):
            make_sandbox("process", SandboxSpec("x", tmp_path, **binds), allow_unsafe=True)
    make_sandbox("process", SandboxSpec("x", tmp_path, ro_binds=((tmp_path, str(tmp_path)),)), allow_unsafe=True).close()


def test_plain_process_memory_limit(tmp_path):
    sandbox = make_sandbox("process", SandboxSpec("x", tmp_path, limits=Limits(memory_bytes=256 << 20)), allow_unsafe=True)
    script = "x = bytearray(1 << 30)"
    assert sandbox.run(["python3", "-c", script], timeout_s=20, cwd="/workspace").returncode == 1
    sandbox.close()


def test_owner_is_told_from_a_later_process_with_its_id():
    me = host.Owner.current()
    assert me.pid == os.getpid() and not me.is_dead()
    assert host.Owner(me.namespace, me.pid, me.start - 1).is_dead()
    child = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert host.Owner(me.namespace, child.pid, 0).is_dead(), "a zombie is dead"
    child.wait()
    assert not host.Owner(me.namespace + 1, child.pid, 0).is_dead(), "not ours to judge"
    assert host.Owner.of_label(f"{me.label}-0-name-1") == me
    for text in ("", "uids", "1-2", "a-b-c-d", "1-2-3"):
        assert host.Owner.of_label(text) is None


def test_user_ids_are_leased_once_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "STATE_ROOT", tmp_path)
    monkeypatch.setattr(host, "LAST_UID", host.FIRST_UID + 1)
    first, second = host.UidLease(), host.UidLease()
    assert [first.uid, second.uid] == [60600, 60601]
    with pytest.raises(InfraFault):
        host.UidLease()
    first.release()
    first.release()
    assert host.UidLease().uid == 60600
    second.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_hand_over_follows_no_link_and_keeps_read_only_files(tmp_path):
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    (tree / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "f").write_text("x")
    for name, mode in (("plain", 0o644), ("object", 0o444), ("a/b/run", 0o755)):
        (tree / name).write_text("x")
        (tree / name).chmod(mode)
    (tree / "file-link").symlink_to(outside / "f")
    (tree / "dir-link").symlink_to(outside)
    os.mkfifo(tree / "fifo", 0o600)
    before = (outside.stat()[:6], (outside / "f").stat()[:6])
    host.hand_over(tree, 60601, 60599, shared=True)
    assert (outside.stat()[:6], (outside / "f").stat()[:6]) == before
    for path in (tree, tree / "a", tree / "a" / "b"):
        assert (path.stat().st_uid, path.stat().st_gid) == (60601, 60599)
        assert path.stat().st_mode & 0o2070 == 0o2070
    modes = {name: (tree / name).stat().st_mode & 0o7777 for name in ("plain", "object", "a/b/run")}
    assert modes == {"plain": 0o664, "object": 0o444, "a/b/run": 0o775}
    assert (tree / "fifo").lstat().st_uid == 60601


def test_version_2_limits_are_written_where_the_kernel_reads_them(tmp_path):
    (tmp_path / "memory.swap.max").write_text("max")
    cgroup._limit(tmp_path, "memory", 2, 12345, 6)
    cgroup._limit(tmp_path, "pids", 2, 12345, 6)
    values = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert values == {"memory.max": "12345", "memory.swap.max": "0", "pids.max": "6"}


def test_version_2_looks_above_its_own_group(tmp_path, monkeypatch):
    """A version 2 group that holds processes can't have limited children, so the one above it is tried too."""
    own = tmp_path / "above" / "own"
    own.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    monkeypatch.setattr(cgroup, "_mounts", lambda: [("cgroup2", tmp_path, set())])
    monkeypatch.setattr(cgroup, "_own_path", lambda controller: "above/own")
    assert cgroup._candidates("memory") == [(2, own), (2, own.parent), (2, tmp_path)]
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    assert cgroup._candidates("memory") == []


def test_no_hierarchy_gives_reasons(monkeypatch):
    monkeypatch.setattr(cgroup, "_mounts", lambda: [])
    cgroup.find_cgroups.cache_clear()
    found = cgroup.find_cgroups()
    cgroup.find_cgroups.cache_clear()
    assert found.parents == {} and set(found.reasons) == {"memory", "pids"}


def test_a_parent_that_cannot_be_written_is_a_reason(tmp_path):
    problem = cgroup._probe("pids", 1, tmp_path / "absent")
    assert str(tmp_path / "absent") in problem


def test_covers_follow_every_bind_that_shows_a_hidden_path(tmp_path):
    (tmp_path / "venv" / "data").mkdir(parents=True)
    (tmp_path / "venv" / "key").write_text("x")
    hidden = [tmp_path / "venv" / "data", tmp_path / "venv" / "key", tmp_path / "elsewhere"]
    binds = [(str(tmp_path), "/one"), (str(tmp_path / "venv"), "/two"), ("/usr", "/usr")]
    args = layout._covers(hidden, binds)
    covered = {args[index + 1] for index, arg in enumerate(args) if arg == "--tmpfs"}
    assert covered == {"/one/venv/data", "/two/data"}
    emptied = {args[index + 2] for index, arg in enumerate(args) if arg == "--ro-bind"}
    assert emptied == {"/one/venv/key", "/two/key"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_system_call_filter_decides_as_written_down(monkeypatch, machine):
    """The filter is run by an interpreter of the BPF subset, over the kernel's own numbers for each machine."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    code = [struct.unpack("=HBBI", part) for part in zip_eight(seccomp.call_filter())]
    clone, unshare, setns, clone3, arch, other = {
        "x86_64": (56, 272, 308, 435, 0xC000003E, 0xC00000B7),
        "aarch64": (220, 97, 268, 435, 0xC00000B7, 0x40000028),
    }[machine]
    allow, denied, absent = 0x7FFF0000, 0x00050001, 0x00050026
    new_user, threads = 0x10000000, 0x3D0F00
    assert run_bpf(code, clone, arch, threads) == allow
    assert run_bpf(code, clone, arch, threads | new_user) == denied
    assert run_bpf(code, unshare, arch, 0x20000) == allow
    assert run_bpf(code, unshare, arch, 0x20000 | new_user) == denied
    assert run_bpf(code, clone3, arch, 0) == absent
    assert run_bpf(code, setns, arch, 3) == denied
    assert run_bpf(code, clone, other, threads) == denied
    assert run_bpf(code, 0x40000000 + clone, arch, threads) == denied
    sockets, keys = {"x86_64": ((41, 53), (248, 249, 250)), "aarch64": ((198, 199), (217, 218, 219))}[machine]
    for family in range(64):  # unix, inet, inet6 and netlink
        assert {run_bpf(code, call, arch, family) for call in sockets} == {allow if family in (1, 2, 10, 16) else 0x00050061}
    assert {run_bpf(code, call, arch, 0) for call in keys} == {denied}
    for number in set(range(460)) - {clone, unshare, setns, clone3, 425, *sockets, *keys}:
        assert run_bpf(code, number, arch, new_user) == allow


def zip_eight(data: bytes) -> list[bytes]:
    assert len(data) % 8 == 0
    return [data[start : start + 8] for start in range(0, len(data), 8)]


def run_bpf(code: list[tuple[int, int, int, int]], number: int, arch: int, argument: int) -> int:
    data = struct.pack("<IIQQ", number, arch, 0, argument)
    accumulator = position = 0
    while True:
        operation, when_true, when_false, operand = code[position]
        if operation == 0x06:
            return operand
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, operand)[0]
            position += 1
            continue
        true = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[operation]
        position += 1 + (when_true if true else when_false)


def test_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OpsdError) as error:
        seccomp.call_filter()
    assert "riscv64" in str(error.value)
