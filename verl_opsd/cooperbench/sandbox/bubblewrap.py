"""The embedded default sandbox: each command in its own Linux namespaces, as its own user id, under resource limits.

A command sees a read-only system, its workspace and binds, and nothing else of the host: no network (its loopback leads
nowhere), no other processes, no home, no data set. Its whole tree is one process namespace, so ending the namespace's
first process ends everything, whatever it forked, detached or ignored.

Between commands of one sandbox its files stay: workspace, /tmp, home, /usr/local/bin. Processes do not.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from verl_opsd.cooperbench.sandbox import cgroup, layout
from verl_opsd.cooperbench.sandbox.base import CommandResult, SandboxSpec
from verl_opsd.cooperbench.sandbox.host import (
    PREFIX,
    SHARED_GID,
    Owner,
    UidLease,
    cgroup_name,
    hand_over,
    make_state,
    parent_of,
    processes_of,
    program,
    reap_stale,
    remove_state,
    require_host,
)
from verl_opsd.cooperbench.sandbox.seccomp import call_filter
from verl_opsd.cooperbench.sandbox.spawn import (
    TIMED_OUT,
    BoundedOutput,
    CannotStart,
    encoded,
    env_command,
    output_pipe,
    ready,
    spawn,
    stdin_fd,
    watch,
)
from verl_opsd.errors import InfraFault

START_WAIT_S = 30.0
END_WAIT_S = 10.0
_numbers = itertools.count()
_open_sandboxes: set[BubblewrapSandbox] = set()  # closed at exit


class BubblewrapSandbox:
    """A :class:`~verl_opsd.cooperbench.sandbox.base.Sandbox` made of Linux namespaces.

    Memory and process limits hold for the sandbox as a whole where control groups can be created; otherwise the memory
    limit holds for each process (RLIMIT_AS) and the process limit for the sandbox's user id (RLIMIT_NPROC).
    ``limit_source`` says which. A memory kill of the command gives ``returncode`` 137. A command that can't be started
    at all (argument too long, NUL byte) gives 126, a program that is not there 127, a missing ``cwd`` 125.
    /tmp, home and /usr/local/bin together hold a quarter of ``Limits.memory_bytes``.

    Raises:
        OpsdError: the host lacks something (named), or the spec's paths are wrong.
        InfraFault: ``sandbox_unreachable`` when the first, empty command does not run.
    """

    def __init__(self, spec: SandboxSpec):
        require_host()
        layout.check_binds(spec)
        reap_stale()
        self.spec = spec
        self._owner = Owner.current()
        self._lock = threading.Lock()
        self._running: set[int] = set()  # pidfd of each running command's first process
        self._closed = False
        self._lease = UidLease()
        self.uid = self._lease.uid
        slug = re.sub(r"[^A-Za-z0-9._]+", "_", spec.name)[:60]
        self.label = f"{self._owner.label}-{next(_numbers)}-{slug}"
        self._cgroup = cgroup.Cgroup(())
        self._state = None
        try:
            self._state = make_state(self.label, spec.limits.memory_bytes // 4)
            host = cgroup.find_cgroups()
            group = cgroup_name(self.label)
            (self._state / "cgroups").write_text("\n".join(str(parent / group) for parent in host.parents.values()))
            self._cgroup = host.create(group, spec.limits.memory_bytes, spec.limits.processes)
            self.limit_source = {name: "cgroup" if name in host.parents else "rlimit" for name in cgroup.CONTROLLERS}
            layout.write_state(self._state, self.uid)
            hand_over(spec.workspace, self.uid, SHARED_GID, shared=False)
            for source, _ in spec.rw_binds:
                hand_over(source, self.uid, SHARED_GID, shared=True)
            self._args = self._bwrap_args()
            _open_sandboxes.add(self)
            first = self.run(["true"], timeout_s=START_WAIT_S, cwd="/")
            if first.returncode:
                raise InfraFault(
                    "sandbox_unreachable",
                    f"sandbox {spec.name}: the first command gave {first.returncode}: {first.text.strip()[:500]}",
                    "an empty command runs before a sandbox is handed out",
                    "run `opsd doctor`: it says which part of the sandbox this host does not permit",
                )
        except OSError as error:
            self.close()
            raise self._fault("sandbox_unreachable", f"it can't be set up: {error}") from error
        except BaseException:
            self.close()
            raise

    def _bwrap_args(self) -> bytes:
        """The sandbox's part of bwrap's arguments, separated by NUL. They go through a descriptor, so that no command
        can read host paths from its first process's command line."""
        assert self._state is not None
        args = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--hostname", "sandbox"]
        args += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
        # Only to become the sandbox's user; setpriv then drops them from every set.
        args += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        args += layout.mount_args(self.spec, self._state)
        return b"\0".join(arg.encode("utf-8", "surrogateescape") for arg in args) + b"\0"

    def _command(self, cwd: str, env: Mapping[str, str], argv: Sequence[str]) -> list[str]:
        """What bwrap starts: limits, then the user, then (as that user) the environment, directory and program."""
        limits = self.spec.limits
        rlimits = [f"--nproc={limits.processes}", f"--fsize={limits.file_bytes}", "--core=0"]
        if self.limit_source["memory"] == "rlimit":
            rlimits.append(f"--as={limits.memory_bytes}")
        user = [f"--reuid={self.uid}", f"--regid={SHARED_GID}", "--clear-groups", "--no-new-privs"]
        user += ["--bounding-set=-all", "--inh-caps=-all"]
        prefix = [str(program("prlimit")), *rlimits, str(program("setpriv")), *user]
        return [*prefix, *env_command(cwd, env, argv)]

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "/workspace/repo",
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> CommandResult:
        """See :meth:`verl_opsd.cooperbench.sandbox.base.Sandbox.run`."""
        full_env = {**layout.BASE_ENV, **self.spec.env, **(env or {})}
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            read_end, write_end = output_pipe()
            stack.callback(os.close, read_end)
            output = BoundedOutput(read_end, self.spec.limits.output_bytes)
            try:
                command = [encoded(arg) for arg in self._command(cwd, full_env, argv)]
                tree = stack.enter_context(_Tree(self, command, stdin, write_end))
            except CannotStart as error:
                return error.result(time.monotonic() - started)
            except OSError as error:
                raise self._fault("sandbox_unreachable", f"bwrap can't be started: {error}") from error
            finally:
                os.close(write_end)
            self._admit(tree, output)
            try:
                ended = watch(tree.monitor, output, timeout_s)
                tree.end()
                output.drain()
            finally:
                with self._lock:
                    self._running.discard(tree.init)
            seconds = time.monotonic() - started
            if self._closed:
                raise self._fault("sandbox_died", "it was closed while a command ran")
            if not ended:
                return CommandResult(TIMED_OUT, output.value(), True, output.truncated, seconds)
            code = tree.exit_code()
            if code is None:
                text = output.value()[-500:].decode(errors="replace")
                raise self._fault("sandbox_died", f"bwrap ended without its command's exit code: {text}")
            return CommandResult(code, output.value(), False, output.truncated, seconds)

    def _admit(self, tree: _Tree, output: BoundedOutput) -> None:
        """Puts a new tree under the sandbox's limits, then lets its command start."""
        try:
            tree.find_init()
            if tree.init < 0:
                tree.kill_monitor()
                output.drain()
                raise self._fault("sandbox_died", f"bwrap failed: {output.value().decode(errors='replace').strip()}")
            with self._lock:
                if self._closed or self._owner.pid != os.getpid():
                    raise self._fault("sandbox_died", "it is closed, or another process's")
                self._running.add(tree.init)
                with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # it failed: there is no exit code then
                    self._cgroup.add(tree.init_pid)
                    tree.release()
        except OSError as error:
            raise self._fault("sandbox_died", f"its control group is gone: {error}") from error

    def _fault(self, kind: str, what: str) -> InfraFault:
        return InfraFault(
            kind,
            f"sandbox {self.spec.name}: {what}",
            "a command ends with an exit code or at its limit; everything else is the sandbox's fault",
            "make a new sandbox; if it happens again, run `opsd doctor`",
        )

    def close(self) -> None:
        """Ends every process of this sandbox, removes its control group and state, and checks that all are gone.

        Raises:
            InfraFault: ``sandbox_died`` when a process is still there after 10 seconds.
        """
        if self._owner.pid != os.getpid():
            return  # a forked copy: the sandbox is its parent's
        with self._lock:
            self._closed = True
            for init in self._running:
                _kill(init)
        try:
            self._cgroup.remove()
        except OSError as error:
            raise self._fault("sandbox_died", f"its control group can't be removed: {error}") from error
        if self._state is None:
            self._lease.release()
            return
        deadline = time.monotonic() + END_WAIT_S
        while left := processes_of(self.uid):
            if time.monotonic() > deadline:
                raise self._fault("sandbox_died", f"processes {sorted(left)} can't be ended")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        remove_state(self._state)
        self._state = None
        self._lease.release()
        _open_sandboxes.discard(self)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


class _Tree:
    """One bwrap and what it starts. The command waits until ``release``.

    bwrap reports its namespace's first process before that process starts anything. The kernel ends that process last:
    once its pidfd is readable, nothing of the tree is left.
    """

    def __init__(self, sandbox: BubblewrapSandbox, command: list[bytes], stdin: bytes | None, out: int):
        self.init = self.monitor = -1
        self.init_pid = 0
        self._stack = contextlib.ExitStack()
        self._reports = b""
        with contextlib.ExitStack() as child_ends:
            args = _memfd(sandbox._args)
            child_ends.callback(os.close, args)
            seccomp = _memfd(call_filter())
            child_ends.callback(os.close, seccomp)
            source = stdin_fd(stdin)
            child_ends.callback(os.close, source)
            self._status, status_end = os.pipe()
            self._stack.callback(os.close, self._status)
            child_ends.callback(os.close, status_end)
            gate, self._gate = os.pipe()
            child_ends.callback(os.close, gate)
            fds = [
                "--args",
                str(args),
                "--json-status-fd",
                str(status_end),
                "--block-fd",
                str(gate),
                "--seccomp",
                str(seccomp),
                "--",
            ]
            try:
                self._process = spawn(
                    [f"{PREFIX}:{sandbox.label}".encode(), *(part.encode() for part in fds), *command],
                    executable=program("bwrap"),
                    stdin=source,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(args, status_end, gate, seccomp),
                    cwd="/",
                    env={},
                    umask=0o002,  # what one agent pushes to a shared repository, the group can replace
                )
            except BaseException:
                os.close(self._gate)
                self._stack.close()
                raise
        self.monitor = os.pidfd_open(self._process.pid)
        self._stack.callback(os.close, self.monitor)

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._gate >= 0:
            os.close(self._gate)
        self._stack.close()

    def _read_report(self) -> bool:
        data = os.read(self._status, 65536)
        self._reports += data
        return bool(data)

    def _report(self, key: str) -> int | None:
        for line in self._reports.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # half a line
                if key in (report := json.loads(line)):
                    return int(report[key])
        return None

    def find_init(self) -> None:
        """Waits for bwrap's report of the namespace's first process; without one ``init`` stays -1."""
        deadline = time.monotonic() + START_WAIT_S
        while self._report("child-pid") is None:
            if not ready([self._status], deadline - time.monotonic()) or not self._read_report():
                return
        pid = self._report("child-pid") or 0
        try:
            init = os.pidfd_open(pid)
        except ProcessLookupError:  # bwrap failed at its mounts
            return
        if parent_of(pid) == self._process.pid:  # otherwise it ended and its id is someone else's
            self.init, self.init_pid = init, pid
            self._stack.callback(os.close, init)
        else:
            os.close(init)

    def release(self) -> None:
        """Lets the command start."""
        os.write(self._gate, b"\n")
        os.close(self._gate)
        self._gate = -1

    def kill_monitor(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kills what is left of the tree and waits until nothing is."""
        if self.init >= 0:
            _kill(self.init)
            if not ready([self.init], END_WAIT_S):
                raise InfraFault(
                    "sandbox_died",
                    f"process {self.init_pid} is still there {END_WAIT_S:.0f} s after it was killed",
                    "a killed process namespace ends at once",
                    "look for a process in uninterruptible sleep (`ps -eo pid,stat,wchan`)",
                )
        if self._process.returncode is None:
            if not ready([self.monitor], END_WAIT_S if self.init >= 0 else 0):
                self._process.kill()
            self._process.wait()

    def exit_code(self) -> int | None:
        """The command's exit code as bwrap reported it; None when bwrap died or failed before."""
        while ready([self._status], 0) and self._read_report():
            pass
        return self._report("exit-code")


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("bwrap", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@atexit.register
def _close_all() -> None:
    for sandbox in list(_open_sandboxes):
        sandbox.close()
