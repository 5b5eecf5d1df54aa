"""The plain-process sandbox: the same protocol, no isolation. For machines that permit no namespaces, on request only.

What it is not: a boundary. A command runs as this process's user on the bare host. It can read the data set with its
gold patches and hidden tests, read and write whatever the user can, use the network, and leave a process behind in a
session of its own. Paths are not mapped either: ``/workspace`` works as a command's directory only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_opsd.cooperbench.sandbox.base import CommandResult, SandboxSpec
from verl_opsd.cooperbench.sandbox.host import program
from verl_opsd.cooperbench.sandbox.layout import BASE_ENV, WORKSPACE
from verl_opsd.cooperbench.sandbox.spawn import (
    TIMED_OUT,
    BoundedOutput,
    CannotStart,
    encoded,
    env_command,
    output_pipe,
    spawn,
    stdin_fd,
    watch,
)
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.trees import remove_tree

END_WAIT_S = 10.0


class PlainProcessSandbox:
    """A :class:`~verl_opsd.cooperbench.sandbox.base.Sandbox` made of a process group and resource limits.

    ``Limits.memory_bytes`` holds for each process (RLIMIT_AS); ``Limits.processes`` can't be held and is not.

    Raises:
        OpsdError: ``allow_unsafe`` is not given, or a bind wants another path than its host path.
    """

    def __init__(self, spec: SandboxSpec, *, allow_unsafe: bool = False):
        if not allow_unsafe:
            raise OpsdError(
                f"sandbox {spec.name}: backend 'process'",
                "it isolates nothing: agents can read the data set (gold patches, hidden tests) and change the host",
                "use backend 'bubblewrap'; or pass allow_unsafe=True and trust no score from it",
            )
        for source, inside in (*spec.ro_binds, *spec.rw_binds):
            if str(source) != inside:
                raise OpsdError(
                    f"sandbox {spec.name}: {source} can't be shown at {inside}",
                    "a plain process sees the host's paths",
                    "name the same path twice, or use backend 'bubblewrap'",
                )
        self.spec = spec
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._closed = False
        self._home = Path(tempfile.mkdtemp(prefix="opsd-process-"))

    def _command(self, cwd: str, env: Mapping[str, str], argv: Sequence[str]) -> list[str]:
        limits = self.spec.limits
        rlimits = [f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}", "--core=0"]
        if cwd == WORKSPACE or cwd.startswith(WORKSPACE + "/"):
            cwd = str(self.spec.workspace) + cwd[len(WORKSPACE) :]
        prefix = [str(program("prlimit")), *rlimits, str(program("setpriv")), "--pdeathsig", "KILL"]
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
        full_env = {**BASE_ENV, "HOME": str(self._home), **self.spec.env, **(env or {})}
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            read_end, write_end = output_pipe()
            stack.callback(os.close, read_end)
            output = BoundedOutput(read_end, self.spec.limits.output_bytes)
            source = stdin_fd(stdin)
            try:
                process = self._start([encoded(arg) for arg in self._command(cwd, full_env, argv)], source, write_end)
            except CannotStart as error:
                return error.result(time.monotonic() - started)
            except OSError as error:
                raise self._fault("sandbox_unreachable", f"a process can't be started: {error}") from error
            finally:
                os.close(source)
                os.close(write_end)
            try:
                exit_fd = os.pidfd_open(process.pid)
                stack.callback(os.close, exit_fd)
                ended = watch(exit_fd, output, timeout_s)
            finally:
                with self._lock:
                    self._running.discard(process.pid)
                    _kill_group(process.pid)  # before wait: the id can't be another group's yet
                gone = _wait_group(process.pid)
                code = process.wait()
            if not gone:
                raise self._fault("sandbox_died", f"process group {process.pid} is still there {END_WAIT_S:.0f} s later")
            output.drain()
            seconds = time.monotonic() - started
            if self._closed:
                raise self._fault("sandbox_died", "it was closed while a command ran")
            if not ended:
                return CommandResult(TIMED_OUT, output.value(), True, output.truncated, seconds)
            return CommandResult(code if code >= 0 else 128 - code, output.value(), False, output.truncated, seconds)

    def _start(self, command: list[bytes], stdin: int, out: int) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise self._fault("sandbox_died", "it is closed")
            process = spawn(command, stdin=stdin, stdout=out, stderr=subprocess.STDOUT, env={}, cwd="/", start_new_session=True)
            self._running.add(process.pid)
            return process

    def _fault(self, kind: str, what: str) -> InfraFault:
        return InfraFault(
            kind,
            f"sandbox {self.spec.name}: {what}",
            "a command ends with an exit code or at its limit; everything else is the sandbox's fault",
            "make a new sandbox",
        )

    def close(self) -> None:
        """Ends every process group of this sandbox and removes its home. Idempotent."""
        with self._lock:
            self._closed = True
            for group in self._running:
                _kill_group(group)
        if self._home.exists():
            remove_tree(self._home)


def _wait_group(group: int) -> bool:
    """Waits until a killed group has only zombies left: the kernel ends its processes one by one."""
    deadline = time.monotonic() + END_WAIT_S
    while _group_lives(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _group_lives(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
