"""Sandboxes that are containers kept alive by someone else (Docker, Modal): what commands need inside, and the four outcomes.

A container outlives its commands, so their processes do not end by themselves: after each command a sweep inside ends its
session, and everything but the container's own first processes when no other command runs. The command's exit code is written
inside and read by the sweep: a transport that fails is never taken for a command that failed.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from verl_opsd.cooperbench.sandbox.base import CommandResult, SandboxSpec
from verl_opsd.cooperbench.sandbox.layout import BASE_ENV
from verl_opsd.cooperbench.sandbox.spawn import TIMED_OUT, CannotStart, encoded, env_command
from verl_opsd.errors import InfraFault

START_WAIT_S = 30.0
SWEEP_WAIT_S = 30.0
KILLED = 137
ENV = {**BASE_ENV, "HOME": "/root"}

# $1 token, $2 largest file in blocks of 512 bytes, then the command. Messages of the shell itself ("Killed") go nowhere.
_COMMAND = """mkdir -p /run/opsd; ulimit -f "$2"; t=/run/opsd/$1; shift 2
setsid -w sh -c 'exec 2>/dev/null; echo $$ >"$0.sid"; "$@" 2>&1; exit $?' "$t" "$@" 2>/dev/null; c=$?
echo $c >"$t.code"; exit $c"""

# $1 token, $2 whether no other command runs, $3 processes to spare. Prints the command's exit code, if it has ended.
_SWEEP = """t=/run/opsd/$1; quiet=$2; keep=" $3 $$ "; s=none; i=0; n=1
[ -f "$t.sid" ] && read -r s <"$t.sid"
while [ $n = 1 ] && [ $i -lt 500 ]; do
  n=0; i=$((i + 1))
  for p in /proc/[0-9]*; do
    pid=${p#/proc/}
    case "$keep" in *" $pid "*) continue ;; esac
    { read -r line <"$p/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    case "$1" in Z|X) continue ;; esac
    if [ "$quiet" = 1 ] || [ "$4" = "$s" ]; then kill -9 "$pid" 2>/dev/null; n=1; fi
  done
  [ $n = 1 ] && sleep 0.01
done
[ -f "$t.code" ] && cat "$t.code"
rm -f "$t.sid" "$t.code"
exit $n"""

_PROCESSES = 'for p in /proc/[0-9]*; do [ "${p#/proc/}" = $$ ] || echo "${p#/proc/}"; done'


class Call(ABC):
    """One program that runs in the container."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Reads output until the program ends (True) or time is up (False)."""

    @abstractmethod
    def finish(self) -> int | None:
        """Lets go of the program, which has ended or been killed; its exit code as the transport knows it, else None."""

    @abstractmethod
    def output(self) -> tuple[bytes, bool]:
        """What was read, and whether it was cut."""


class ContainerSandbox(ABC):
    """A :class:`~verl_opsd.cooperbench.sandbox.base.Sandbox` over a container that :meth:`_start` runs programs in.

    Subclasses make the container in ``__init__`` and end it with ``super().__init__(spec)``, which runs the first command.

    Raises:
        InfraFault: ``sandbox_unreachable`` when the first, empty command does not run.
    """

    def __init__(self, spec: SandboxSpec):
        self.spec = spec
        self._state = threading.Condition()
        self._commands, self._sweeping, self._closed = 0, False, False
        self._own = ""
        try:
            code, listed = self._sh(_PROCESSES)
            self._own = " ".join(listed.decode().split())
            first = self.run(["true"], timeout_s=START_WAIT_S, cwd="/")
            if code or first.returncode:
                raise self._fault("sandbox_unreachable", f"the first command gave {first.returncode}: {first.text[:500]}")
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _start(self, argv: Sequence[bytes], stdin: bytes | None, output_bytes: int) -> Call:
        """Starts a program as root inside. Raises OSError (or CannotStart) when the transport can't."""

    @abstractmethod
    def _alive(self) -> bool:
        """Whether the container runs. Raises OSError when it can't be asked."""

    @abstractmethod
    def _remove(self) -> None:
        """Ends the container and shows, by listing, that it is gone. Idempotent. Raises InfraFault ``cleanup``."""

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
        command = env_command(cwd, {**ENV, **self.spec.env, **(env or {})}, argv)
        started, token = time.monotonic(), secrets.token_hex(8)
        blocks = str(self.spec.limits.file_bytes // 512)
        try:
            program = [encoded(part) for part in ("sh", "-c", _COMMAND, "opsd", token, blocks, *command)]
            with self._command():
                call = self._start(program, stdin, self.spec.limits.output_bytes)
                try:
                    ended = self._wait(call, token, timeout_s)
                    output, truncated = call.output()  # what is said of the killing comes later
                finally:
                    swept, code = self._sweep(token)
                    transport = call.finish()
        except CannotStart as error:
            return error.result(time.monotonic() - started)
        except OSError as error:
            raise self._diagnosis(f"a program can't be started: {error}") from error
        if self._closed:
            raise self._fault("sandbox_died", "it was closed while a command ran")
        if ended:
            output, truncated = call.output()
        seconds = time.monotonic() - started
        if not swept:
            raise self._diagnosis("the processes of a command could not be ended")
        if not ended:
            return CommandResult(TIMED_OUT, output, True, truncated, seconds)
        if code is None and transport == KILLED and self._is_alive():
            code = KILLED  # the command killed everything in reach, what records its exit code too
        if code is None:
            raise self._diagnosis(f"a command ended without an exit code (transport: {transport}): {output[-500:]!r}")
        return CommandResult(code, output, False, truncated, seconds)

    def _wait(self, call: Call, token: str, timeout_s: float) -> bool:
        """Waits for the command. A background process that holds its output holds the transport as well, so now and then the
        exit code is looked for inside."""
        deadline, step = time.monotonic() + timeout_s, 2.0
        while not call.wait(min(step, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                return False
            if self._sh('[ -f "/run/opsd/$1.code" ]', token)[0] == 0:
                return True
            step = min(2 * step, 30.0)
        return True

    @contextlib.contextmanager
    def _command(self) -> Iterator[None]:
        with self._state:
            while self._sweeping:
                self._state.wait()
            if self._closed:
                raise self._fault("sandbox_died", "it is closed")
            self._commands += 1
        try:
            yield
        finally:
            with self._state:
                self._commands -= 1
                self._state.notify_all()

    def _sweep(self, token: str) -> tuple[bool, int | None]:
        """Ends what a command left; (whether nothing is left, its exit code). The last of several commands ends everything,
        and none starts meanwhile."""
        with self._state:
            quiet = self._commands == 1
            self._sweeping = self._sweeping or quiet
        try:
            code, output = self._sh(_SWEEP, token, "1" if quiet else "0", self._own)
        except OSError:
            return False, None
        finally:
            if quiet:
                with self._state:
                    self._sweeping = False
                    self._state.notify_all()
        text = output.strip()
        return code == 0, int(text) if text.isdigit() else None

    def _sh(self, script: str, *args: str, stdin: bytes | None = None) -> tuple[int | None, bytes]:
        """Runs a script of ours; (exit code, output)."""
        call = self._start([part.encode() for part in ("sh", "-c", script, "opsd", *args)], stdin, 1 << 30)
        ended = call.wait(SWEEP_WAIT_S)
        code = call.finish()
        return (code if ended else None), call.output()[0]

    def _is_alive(self) -> bool:
        try:
            return self._alive()
        except OSError:
            return False

    def _diagnosis(self, what: str) -> InfraFault:
        """The fault behind something that went wrong. A dead container takes its files with it: nothing is reconnected."""
        try:
            alive = self._alive()
        except OSError as error:
            return self._fault("sandbox_unreachable", f"{what}; the backend does not answer: {error}")
        if alive:
            return self._fault("sandbox_unreachable", what)
        return self._fault("sandbox_died", f"{what}; the container is gone, and its files with it")

    def _fault(self, kind: str, what: str) -> InfraFault:
        return InfraFault(
            kind,
            f"sandbox {self.spec.name}: {what}",
            "a command ends with an exit code or at its limit; everything else is the sandbox's fault",
            "make a new sandbox; if it happens again, run `opsd doctor --sandbox` for this backend",
        )

    def close(self) -> None:
        """Ends the container and shows by listing that it is gone. Idempotent.

        Raises:
            InfraFault: ``cleanup``, it is still listed.
        """
        with self._state:
            self._closed = True
        self._remove()
