"""Attempts to get out of the sandbox. Each asserts on the host that nothing happened, not only what was printed."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
from shells import bash, python

import verl_opsd
from verl_opsd.cooperbench.sandbox.host import processes_of
from verl_opsd.trees import remove_tree

READS = {
    "its path": "cat {path}",
    "search": "find / -name gold.patch -not -path '/proc/*' -exec cat {{}} +",
    "first process's root": "cat /proc/1/root{path}; cat /proc/1/cwd{path}",
    "any process's root": "for p in /proc/[0-9]*; do cat $p/root{path}; chroot $p/root cat {path}; done",
    "parent directories": "cat ../../../../../../..{path}; cat /proc/self/cwd/../../../..{path}",
    "host namespaces": "nsenter -t 1 -m cat {path}; nsenter -t 1 -a cat {path}; unshare -Ur nsenter -t 1 -m cat {path}",
    "symbolic link": "ln -s {path} link; cat link; ln -s / root; cat root{path}; cp -L link copy; cat copy",
    "open descriptors": "for f in /proc/*/fd/*; do cat $f{path}; cat $f/..{path}; done",
    "mount": "mkdir m; mount --bind / m; mount /dev/vda m; cat m{path}",
    "unmount": "umount -l /tmp /usr; unshare -Urm sh -c 'umount -l /tmp /workspace /usr; cat {path}'; cat {path}",
    "own user namespace": "unshare -Ur cat {path}; unshare -Urmpf --mount-proc cat /proc/1/root{path}",
}


@pytest.mark.parametrize("attempt", READS)
def test_dataset_cannot_be_read(make, secret, attempt):
    script = READS[attempt].format(path=secret)
    sandbox = make()
    result = bash(sandbox, script + "; true", timeout_s=60)
    assert not result.timed_out
    assert secret.read_text() not in result.text
    control = subprocess.run(["bash", "-c", f"cat {secret}"], capture_output=True, text=True)
    assert control.stdout == secret.read_text(), "the attempt must be able to succeed on the host"


def test_own_package_and_hidden_paths_are_covered(make, secret):
    """An installed package (with tasks, gold patches and tests) below something visible."""
    package = Path(verl_opsd.__file__).parent
    dataset = secret.parents[2]
    sandbox = make(ro_binds=((package.parent, "/venv"), (dataset.parent, "/data")), hidden=(dataset,))
    result = bash(
        sandbox, f"ls -A /venv/verl_opsd /data/dataset; cat /venv/verl_opsd/errors.py; cat /data/dataset/{secret.name}"
    )
    assert "OpsdError(" not in result.text and "task1" not in result.text and secret.read_text() not in result.text
    assert "tests" in bash(sandbox, "ls /venv").text, "the rest is visible"


def test_host_home_holds_the_interpreter_only(make):
    home = Path.home()
    marker = home / f".opsd-test-{secrets.token_hex(4)}"
    marker.write_text("home secret")
    try:
        result = bash(make(), f"ls -A {home} /home /root; cat {marker}")
        prefix = Path(sys.base_prefix)
        homes = (home, Path("/home"), Path("/root"))
        allowed = {prefix.relative_to(folder).parts[0] for folder in homes if prefix.is_relative_to(folder)}
        listed = {line for line in result.text.splitlines() if line and not line.endswith(":") and "No such file" not in line}
        assert listed <= allowed | {"agent"}
        assert "home secret" not in result.text
    finally:
        marker.unlink()


def test_libraries_of_the_host_are_not_read(make):
    """A later release of the library that a task is about would show what its features ask for."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix}))
    python3 = f"{sys.base_prefix}/bin/python3"
    assert (packages / "pip").is_dir() and subprocess.run([python3, "-c", "import pip"]).returncode == 0
    result = bash(make(), f"ls -A {packages}; ls -A /usr/lib/python3/dist-packages /usr/local/lib/python3*/*-packages 2>&-")
    assert not [line for line in result.text.splitlines() if line and not line.endswith(":")]
    assert "No module named 'pip'" in bash(make(), f"{python3} -c 'import json, pip'").text


def test_shadow_and_host_users(make):
    result = bash(make(), "cat /etc/shadow /etc/gshadow /etc/sudoers; cut -d: -f1 /etc/passwd; ls -A /etc")
    assert "$" not in result.text.replace("$HOME", "") and ":*:" not in result.text
    names = [line for line in result.text.splitlines() if line in ("root", "agent")]
    assert names == ["root", "agent"]
    assert not {"shadow", "ssh", "ssl", "hostname", "machine-id"} & set(result.text.split())


def test_user_namespaces_are_closed_and_threads_are_not(make):
    script = """
import ctypes, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
import platform
clone3, unshare, setns, clone = {"x86_64": (435, 272, 308, 56), "aarch64": (435, 97, 268, 220)}[platform.machine()]
NEWUSER, NEWNS = 0x10000000, 0x20000
def call(*args):
    ctypes.set_errno(0)
    return (libc.syscall(*args), ctypes.get_errno())
print(call(unshare, NEWUSER), call(unshare, NEWUSER | NEWNS), call(clone, NEWUSER | 17, 0, 0, 0, 0))
print(call(clone3, ctypes.create_string_buffer(88), 88), call(setns, 0, 0), call(unshare, 0))
done = []
threads = [threading.Thread(target=done.append, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(done), subprocess.run(["echo", "child"], capture_output=True).stdout)
"""
    lines = python(make(), script).text.splitlines()
    assert lines[0] == "(-1, 1) (-1, 1) (-1, 1)"  # EPERM
    assert lines[1] == "(-1, 38) (-1, 1) (0, 0)"  # ENOSYS, EPERM, allowed
    assert lines[2] == "[0, 1, 2, 3, 4, 5, 6, 7] b'child\\n'"


@pytest.mark.parametrize("family", ["loopback", "own address", "abstract", "path"])
def test_no_socket_of_the_host_is_reached(make, tmp_path, family):
    if family in ("loopback", "own address"):
        listener = socket.create_server(("0.0.0.0", 0))
        port = listener.getsockname()[1]
        host = "127.0.0.1" if family == "loopback" else socket.gethostbyname(socket.gethostname())
        connect = f"s = socket.create_connection(({host!r}, {port}), 2)"
    else:
        listener = socket.socket(socket.AF_UNIX)
        address = f"\0opsd-{secrets.token_hex(8)}" if family == "abstract" else str(tmp_path / "s.sock")
        listener.bind(address)
        listener.listen()
        connect = f"s = socket.socket(socket.AF_UNIX); s.connect({address!r})"
    with listener:
        listener.settimeout(0.3)
        result = python(make(), f"import socket\n{connect}\ns.send(b'x')")
        assert result.returncode == 1 and "Error" in result.text
        with pytest.raises(TimeoutError):
            listener.accept()
        subprocess.run([sys.executable, "-c", f"import socket\n{connect}\ns.send(b'x')"], check=True)
        listener.accept()[0].close()


def test_no_way_to_the_internet(make):
    result = python(make(), "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))")
    assert "unreachable" in result.text


def test_no_socket_that_a_network_namespace_does_not_hold(make):
    """AF_VSOCK leads from a virtual machine to its host, whatever the network namespace."""
    script = "import errno, socket\nfor family in (3, 4, 5, 17, 31, 38, 40, 41, 42, 43, 44):\n"
    script += "  for kind in (1, 2, 3, 5):\n    try: socket.socket(family, kind); print('opened', family)\n"
    script += "    except OSError as error: assert error.errno == errno.EAFNOSUPPORT, (family, error)\nprint('over')"
    assert python(make(), script).text == "over\n"


def test_no_key_waits_for_the_next_sandbox(make):
    """The kernel keeps a user's keys after the last process of that user."""
    script = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
out = ctypes.create_string_buffer(64)
"""
    first = make()
    put = python(first, f"{script}print(libc.syscall(add, b'user', b'opsd', b'left', 4, -4), ctypes.get_errno())")
    first.close()
    second = make()  # mostly with the same user id: the first that is free
    get = "key = libc.syscall(keyctl, 10, -4, b'user', b'opsd', 0); print(libc.syscall(keyctl, 11, key, out, 64), out.value)"
    assert python(second, script + get).text == "-1 b''\n" and put.text == "-1 1\n"


def test_fork_bomb_is_bounded_and_gone(make):
    sandbox = make(limits={"processes": 40})
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, len(processes_of(sandbox.uid)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    result = bash(sandbox, "b() { b | b & }; b; while :; do (sleep 1 &) ; done", timeout_s=2)
    done.set()
    sampler.join()
    assert 5 <= peak <= 40
    assert result.timed_out
    assert processes_of(sandbox.uid) == set()
    assert sandbox.run(["true"], timeout_s=5).returncode == 0


def test_memory_cannot_be_filled(make):
    sandbox = make(limits={"memory_bytes": 200 << 20})
    assert python(sandbox, "x = bytearray(1 << 30)").returncode in (1, 137)
    for where in ("/tmp", "~", "/usr/local/bin", "/dev/shm"):
        result = bash(sandbox, f"head -c 1000000000 /dev/zero > {where}/fill; stat -c %s {where}/fill; rm {where}/fill")
        assert "No space left" in result.text
        assert int(result.text.split()[-1]) <= 64 << 20
    assert bash(sandbox, "echo x > /fill; echo x > /dev/fill; ls /fill /dev/fill").returncode == 2


def test_disk_cannot_be_filled_by_one_file(make):
    sandbox = make(limits={"file_bytes": 10 << 20})
    bash(
        sandbox,
        "dd if=/dev/zero of=a bs=1M count=100; truncate -s 10G b; fallocate -l 10G c;"
        "dd if=/dev/zero of=d bs=1 count=1 seek=20G",
    )
    sizes = {path.name: path.stat().st_size for path in (sandbox.spec.workspace / "repo").iterdir()}
    assert sizes.get("a") == 10 << 20
    assert max(sizes.values()) <= 10 << 20


DETACH = {
    "setsid": "setsid bash -c 'while :; do date +%N > beat; sleep 0.05; done' &",
    "double fork": "( ( bash -c 'while :; do date +%N > beat; sleep 0.05; done' & ) & )",
    "ignored signals": "trap '' TERM INT HUP QUIT PIPE; while :; do date +%N > beat; sleep 0.05; done &",
    "nohup": "nohup bash -c 'while :; do date +%N > beat; sleep 0.05; done' > /dev/null 2>&1 &",
    "two sessions": "setsid -f setsid -f bash -c 'trap \"\" TERM; while :; do date +%N > beat; sleep 0.05; done'",
    "stopped": "(while :; do date +%N > beat; sleep 0.05; done) & bash -c 'kill -STOP $$' &",
}


@pytest.mark.parametrize("end", ["timeout", "exit"])
@pytest.mark.parametrize("attempt", DETACH)
def test_nothing_runs_on(make, attempt, end):
    sandbox = make()
    wait = "trap '' TERM; sleep 60; sleep 60" if end == "timeout" else "until [ -e beat ]; do sleep 0.1; done; sleep 0.2"
    result = bash(sandbox, f"{DETACH[attempt]}\n{wait}", timeout_s=2 if end == "timeout" else 30)
    assert result.timed_out is (end == "timeout")
    assert processes_of(sandbox.uid) == set()
    beat = sandbox.spec.workspace / "repo" / "beat"
    last = beat.stat().st_mtime_ns
    time.sleep(0.25)
    assert beat.stat().st_mtime_ns == last


def test_parent_cannot_be_killed(make, canary):
    sandbox = make()
    pids = " ".join(map(str, (1, os.getpid(), os.getppid(), canary.pid)))
    result = bash(sandbox, f"kill -9 $PPID {pids}; kill -9 -1; kill -STOP 1; echo still here")
    assert result.text.endswith("still here\n") and result.returncode == 0
    assert canary.poll() is None
    assert sandbox.run(["true"], timeout_s=5).returncode == 0


def test_host_processes_cannot_be_traced(make, canary):
    script = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, {os.getpid()}, {canary.pid}):
    print("attach", libc.ptrace(16, pid, 0, 0), libc.ptrace(0x4206, pid, 0, 0))
    for name in ("mem", "environ", "maps", "root"):
        try:
            os.listdir(f"/proc/{{pid}}/root") if name == "root" else open(f"/proc/{{pid}}/{{name}}", "rb").read()
            print("opened", pid, name)
        except OSError:
            pass
"""
    result = python(make(), script)
    assert result.text.splitlines() == ["attach -1 -1"] * 3
    assert "TracerPid:\t0" in Path(f"/proc/{canary.pid}/status").read_text()


def test_no_environment_of_the_host_is_read(make, canary):
    probe = "cat /proc/*/environ /proc/*/task/*/environ 2>/dev/null | tr '\\0' '\\n'; ps axeww"
    result = bash(make(), probe)
    assert "canary-secret" not in result.text
    assert "canary-secret" in subprocess.run(["bash", "-c", probe], capture_output=True, text=True, errors="replace").stdout


def test_first_process_tells_no_host_path(make, tmp_path):
    sandbox = make()
    result = bash(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; cat /proc/1/environ")
    assert str(tmp_path) not in result.text and "/run/opsd-sandbox" not in result.text


WRITES = {
    "touch": "touch {target}",
    "remount": "mount -o remount,rw {root}; touch {target}",
    "remount bind": "mount -o remount,rw,bind {root} {root}; touch {target}",
    "remount in a user namespace": "unshare -Urm bash -c 'mount -o remount,rw,bind {root}; touch {target}'",
    "unmount in a user namespace": "unshare -Urm bash -c 'umount -l {root}; mkdir -p {root}; touch {target}'",
    "link": "ln -s {root} l; touch l/{name}; ln {root}/x y; touch -d 2001-01-01 {root}; chmod 0777 {root}",
}


@pytest.mark.parametrize("root", ["/usr", "prefix", "bind"])
@pytest.mark.parametrize("attempt", WRITES)
def test_system_is_not_written(make, tmp_path, attempt, root):
    bound = tmp_path / "bound"
    bound.mkdir()
    (bound / "x").write_text("kept")
    bound.chmod(0o777)
    host = {"/usr": Path("/usr"), "prefix": Path(sys.base_prefix), "bind": bound}[root]
    inside = "/bound" if root == "bind" else str(host)
    name = f"opsd-{secrets.token_hex(8)}"
    before = sorted(os.listdir(host)), host.stat()[:9]
    bash(make(ro_binds=((bound, "/bound"),)), WRITES[attempt].format(root=inside, target=f"{inside}/{name}", name=name))
    assert (sorted(os.listdir(host)), host.stat()[:9]) == before
    assert (bound / "x").read_text() == "kept"


def test_no_device_can_be_made_or_opened(make):
    sandbox = make()
    device = os.stat("/").st_dev
    major, minor = os.major(device), os.minor(device)
    script = f"mknod d b {major} {minor}; mknod c c 1 1; unshare -Urm mknod e b {major} {minor}"
    script += "; cat /dev/mem /dev/kmsg /dev/vda /dev/sda"
    result = bash(sandbox, script + "; ls /dev")
    assert os.listdir(sandbox.spec.workspace / "repo") == []
    assert {"null", "zero", "full", "random", "urandom", "tty"} <= set(result.text.split())
    assert not {"mem", "kmsg", "vda", "sda", "kvm", "fuse"} & set(result.text.splitlines())


def test_no_privilege_is_gained(make, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir(mode=0o755)
    shutil.copy(shutil.which("bash") or "/bin/bash", tools / "rootshell")
    (tools / "rootshell").chmod(0o6755)
    tmp_path.chmod(0o755)
    sandbox = make(ro_binds=((tools, "/tools"),))
    script = "/tools/rootshell -p -c 'id -u; id -ru'; python3 -c 'import os; os.setuid(0)'"
    script += "; python3 -c 'import os; os.setgid(0)'"
    result = bash(
        sandbox,
        script + "; setpriv --reuid 0 id -u; su -c id; grep -E 'Cap(Eff|Prm|Bnd|Inh|Amb)|NoNewPrivs' /proc/self/status",
    )
    lines = result.text.splitlines()
    assert lines[:2] == [str(sandbox.uid)] * 2
    assert result.text.count("Operation not permitted") >= 3
    capabilities = [line.split()[1] for line in lines if line.startswith("Cap")]
    assert capabilities == ["0000000000000000"] * 5
    assert "NoNewPrivs:\t1" in lines


KERNEL = {  # system calls by number on x86-64 and arm64, that would reach past every namespace
    "bpf": (321, 280, "0, 0, 0"),
    "perf_event_open": (298, 241, "ctypes.create_string_buffer(128), 1, -1, -1, 0"),
    "init_module": (175, 105, "0, 0, b''"),
    "kexec_load": (246, 104, "0, 0, 0, 0"),
    "reboot": (169, 142, "0xfee1dead, 672274793, 0x4321fedc, 0"),
    "settimeofday": (164, 170, "ctypes.create_string_buffer(16), 0"),
    "swapon": (167, 224, "b'/workspace/repo/swap', 0"),
    "pivot_root": (155, 41, "b'/tmp', b'/tmp'"),
    "open_by_handle_at": (304, 265, "-100, ctypes.create_string_buffer(64), 0"),
    "process_vm_readv": (310, 270, "{pid}, vector, 1, vector, 1, 0"),
    "kcmp": (312, 272, "1, {pid}, 0, 0, 0"),
    "pidfd_open": (434, 434, "{pid}, 0"),
    "io_uring_setup": (425, 425, "8, ctypes.create_string_buffer(120)"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "open_tree": (428, 428, "-100, b'/usr', 1"),
    "mount_setattr": (442, 442, "-1, b'/usr', 0, ctypes.create_string_buffer(32), 32"),
    "fanotify_init": (300, 262, "0, 0"),
    "syslog": (103, 116, "3, ctypes.create_string_buffer(99), 99"),
    "acct": (163, 89, "b'/tmp/accounts'"),
    "chroot": (161, 51, "b'/tmp'"),
}


@pytest.mark.parametrize("call", KERNEL)
def test_calls_that_reach_the_kernel_or_other_processes_fail(make, canary, call):
    x86, arm, args = KERNEL[call]
    script = f"""
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
number = {{"x86_64": {x86}, "aarch64": {arm}}}[platform.machine()]
print(libc.syscall(number, {args.format(pid=canary.pid)}), ctypes.get_errno())
"""
    result = python(make(), script)
    code, errno = result.text.split()
    assert code == "-1" and int(errno) in (1, 3, 13, 22, 38), result.text  # EPERM, ESRCH, EACCES, EINVAL, ENOSYS


def test_a_terminal_of_the_host_is_not_typed_into(make):
    """TIOCSTI would put characters into the terminal that started everything."""
    script = "import fcntl, os, termios\nfor fd in (0, 1, 2):\n  try: fcntl.ioctl(fd, termios.TIOCSTI, b'x'); print('typed')\n"
    script += (
        "  except OSError: pass\ntry: os.open('/dev/tty', os.O_RDWR); print('opened')\nexcept OSError: pass\nprint('over')"
    )
    assert python(make(), script).text == "over\n"


def test_keys_of_the_host_are_not_seen(make):
    """The kernel's key rings: add a key as this process, look for it inside."""
    import ctypes
    import platform

    libc = ctypes.CDLL(None, use_errno=True)
    add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
    name = f"opsd-{secrets.token_hex(4)}".encode()
    key = libc.syscall(add, b"user", name, b"secret", 6, -4)  # the user's key ring
    if key < 0:
        pytest.skip(f"this host permits no keys (errno {ctypes.get_errno()})")
    script = f"""
import ctypes
libc = ctypes.CDLL(None)
out = ctypes.create_string_buffer(64)
print(libc.syscall({keyctl}, 11, {key}, out, 64), out.value)
print(open('/proc/keys').read() if __import__('os').path.exists('/proc/keys') else '')
"""
    try:
        result = python(make(), script)
        assert "secret" not in result.text and name.decode() not in result.text
    finally:
        libc.syscall(keyctl, 9, key, -4)  # unlink


def test_a_link_planted_in_the_workspace_does_not_catch_what_the_host_writes_or_removes(make, secret):
    """The host removes a pair's tree after agents had it: links in it are removed, not followed."""
    sandbox = make()
    bash(sandbox, f"ln -s {secret.parents[2]} data; mkdir -p deep; ln -s / deep/root; chmod 000 deep; mkfifo pipe")
    python(sandbox, "import os\nfor _ in range(1500): os.mkdir('d' * 100); os.chdir('d' * 100)")
    sandbox.close()
    remove_tree(sandbox.spec.workspace)
    assert secret.exists() and not sandbox.spec.workspace.exists()


def test_control_groups_cannot_be_changed(make):
    sandbox = make(limits={"processes": 50})
    limits = [path / name for path in sandbox._cgroup.paths for name in ("pids.max", "memory.limit_in_bytes", "memory.max")]
    before = {path: path.read_text() for path in limits if path.exists()}
    assert before or sandbox.limit_source == {"memory": "rlimit", "pids": "rlimit"}
    inner = "mount -t cgroup2 none m; mount -t cgroup -o pids none m; echo $$ > m/cgroup.procs"
    inner += "; find m -name pids.max -exec sh -c 'echo max > {}' ';'"
    bash(
        sandbox,
        f'mkdir m; {inner}; unshare -Urm bash -c "{inner}"; unshare -UrmC bash -c "{inner}"; ulimit -u 500',
    )
    assert {path: path.read_text() for path in before} == before


@pytest.mark.parametrize("name", ["kernel/core_pattern", "fs/suid_dumpable", "vm/overcommit_memory", "kernel/hostname"])
def test_kernel_settings_cannot_be_changed(make, name):
    path = Path("/proc/sys") / name
    before = path.read_text()
    value = "'|/workspace/evil'" if "core" in name else "1"
    bash(
        make(),
        f'echo {value} > {path}; unshare -Urm bash -c "mount -o remount,rw /proc; echo {value} > {path}"',
    )
    assert path.read_text() == before
