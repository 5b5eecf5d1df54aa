"""How a sandbox's processes are started and watched: one spawner thread a process, bounded output, process handles."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from verl_opsd.cooperbench.sandbox.base import CommandResult
from verl_opsd.cooperbench.sandbox.host import program
from verl_opsd.errors import OpsdError

CHUNK_BYTES = 1 << 20
DRAIN_READS = 16
TIMED_OUT = 124
NOT_STARTED = 126


class CannotStart(Exception):
    """No kernel can start this command: an argument too long, a NUL byte, a lone surrogate. Its writer is at fault: a
    failed command, not a fault of the sandbox."""

    def result(self, seconds: float) -> CommandResult:
        text = f"cannot start the command: {self}\n".encode("utf-8", "backslashreplace")
        return CommandResult(NOT_STARTED, text, False, False, seconds)


def encoded(arg: str) -> bytes:
    """An argument as the kernel takes it.

    Raises:
        CannotStart: it holds a NUL byte or is not text.
    """
    try:
        data = arg.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise CannotStart(str(error)) from error
    if b"\0" in data:
        raise CannotStart("an argument holds a NUL byte")
    return data


def env_command(cwd: str, env: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """The command line that enters a directory, sets exactly this environment and runs ``argv``.

    Raises:
        OpsdError: ``argv`` is empty or its program would read as a variable.
    """
    if not argv or "=" in argv[0]:
        raise OpsdError(
            f"command {list(argv)!r}", "a command has a program, and its name holds no '='", 'use ["bash", "-c", ...]'
        )
    variables = [f"{key}={value}" for key, value in env.items()]
    return [str(program("env")), "--ignore-environment", f"--chdir={cwd}", "--", *variables, *argv]


class _Spawner(threading.Thread):
    """Starts child processes from a thread that lives as long as the process.

    ``bwrap --die-with-parent`` follows the spawning *thread*: a pool thread's child dies when the pool is shut down.
    """

    def __init__(self) -> None:
        super().__init__(name="opsd-sandbox-spawner", daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], Sequence[bytes | str], dict[str, Any]]] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        while True:
            future, argv, options = self._jobs.get()
            try:
                future.set_result(subprocess.Popen(argv, **options))
            except BaseException as error:  # handed to the caller, who raises it
                future.set_exception(error)

    def spawn(self, argv: Sequence[bytes | str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((future, argv, options))
        return future.result()


_spawners: dict[int, _Spawner] = {}  # one a process id: a forked child has none of its parent's threads
_spawners_lock = threading.Lock()
os.register_at_fork(before=_spawners_lock.acquire, after_in_parent=_spawners_lock.release)
os.register_at_fork(after_in_child=_spawners_lock.release)


def spawn(argv: Sequence[bytes | str], **options: Any) -> subprocess.Popen[bytes]:
    """``subprocess.Popen(argv, **options)``, from this process's spawner thread.

    Raises:
        CannotStart: the command line is longer than the kernel takes.
        OSError: anything else that Popen raises.
    """
    with _spawners_lock:
        spawner = _spawners.get(os.getpid())
        if spawner is None:
            spawner = _spawners[os.getpid()] = _Spawner()
            spawner.start()
    try:
        return spawner.spawn(argv, options)
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise CannotStart("the command line is too long") from error
        raise


class BoundedOutput:
    """Reads a command's output pipe: keeps the first ``limit`` bytes, reads on and drops the rest, so that the writer
    never blocks."""

    def __init__(self, fd: int, limit: int):
        self.fd, self._limit = fd, limit
        self._kept = bytearray()
        self.truncated = False
        self.eof = False
        os.set_blocking(fd, False)

    def read_available(self) -> None:
        """Takes one chunk if there is one; sets ``eof`` at the end of the pipe."""
        try:
            data = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.eof = True
            return
        room = self._limit - len(self._kept)
        self._kept += data[:room]
        self.truncated = self.truncated or len(data) > room

    def drain(self) -> None:
        """Takes what a dead tree left in the pipe. Bounded: someone outside the tree may hold the pipe's other end."""
        for _ in range(DRAIN_READS):
            if self.eof or not ready([self.fd], 0):
                return
            self.read_available()

    def value(self) -> bytes:
        return bytes(self._kept)


def output_pipe() -> tuple[int, int]:
    """A pipe (read end, write end) that holds a megabyte where the system permits it, so that a flood of output costs
    few wake-ups."""
    read_end, write_end = os.pipe()
    try:
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
    except PermissionError:  # over the user's pipe quota: the default size works as well, with more wake-ups
        return read_end, write_end
    return read_end, write_end


def stdin_fd(data: bytes | None) -> int:
    """A descriptor to read ``data`` from, at its start; without data the null device."""
    if data is None:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def ready(fds: Sequence[int], timeout_s: float) -> list[int]:
    """Those of ``fds`` that can be read or have ended, after at most ``timeout_s`` seconds."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(max(0.0, timeout_s) * 1000)]


def watch(exit_fd: int, output: BoundedOutput, timeout_s: float) -> bool:
    """Reads output until the process behind ``exit_fd`` ends (True) or ``timeout_s`` seconds have passed (False)."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        seen = ready([exit_fd] if output.eof else [exit_fd, output.fd], left)
        if output.fd in seen:
            output.read_available()
        if exit_fd in seen:
            return True
    return False
