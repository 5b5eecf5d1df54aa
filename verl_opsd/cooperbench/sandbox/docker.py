"""Docker containers as sandboxes, through the ``docker`` program. Unverified: see docs/sandbox.md."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from verl_opsd.cooperbench.sandbox import layout
from verl_opsd.cooperbench.sandbox.base import SandboxSpec
from verl_opsd.cooperbench.sandbox.container import Call, ContainerSandbox
from verl_opsd.cooperbench.sandbox.host import Owner
from verl_opsd.cooperbench.sandbox.spawn import BoundedOutput, output_pipe, spawn, stdin_fd, watch
from verl_opsd.errors import InfraFault, OpsdError

#: Debian 12 with Python 3.11 and git 2.39.
IMAGE = "python:3.11"
PULL_WAIT_S = 900.0
ASK_WAIT_S = 60.0
END_WAIT_S = 10.0
OWNER_LABEL = "opsd.owner"
#: What remains of root's rights inside: its own files, as package managers and git need them.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
_numbers = itertools.count()


class DockerSandbox(ContainerSandbox):
    """A container without network, with few capabilities, under Docker's limits of memory and processes.

    Commands run as root of the container. What they write into writable binds is handed back to this process' user when the
    sandbox is closed.

    Args:
        image: has bash, coreutils, util-linux and git.

    Raises:
        OpsdError: no ``docker`` program, wrong paths, or a hidden path below a bind.
        InfraFault: ``sandbox_unreachable``: the daemon does not answer, or the image can't be had.
    """

    def __init__(self, spec: SandboxSpec, *, image: str = IMAGE):
        self._docker = require_docker()
        layout.check_binds(spec)
        binds = (*spec.ro_binds, *spec.rw_binds, (spec.workspace, layout.WORKSPACE))
        for hidden in spec.hidden:
            for source, inside in binds:
                if hidden.resolve().is_relative_to(source.resolve()):
                    raise OpsdError(
                        f"sandbox {spec.name}: {hidden} lies below {source}, which is shown at {inside}",
                        "a container shows what is bound, and can't cover a part of it",
                        "bind the parts that agents may see, one by one",
                    )
        self.spec, self._closed = spec, False
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", spec.name)[:40].strip("-.")
        owner = Owner.current().label
        reap_stale(self._docker)
        self.name = f"opsd-{owner}-{next(_numbers)}-{slug}"
        limits = spec.limits
        options = ["--name", self.name, "--label", f"{OWNER_LABEL}={owner}-", "--init", "--hostname", "sandbox"]
        options += ["--network", "none", "--security-opt", "no-new-privileges", "--cap-drop", "ALL"]
        options += [f"--cap-add={capability}" for capability in CAPABILITIES]
        options += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        options += ["--pids-limit", str(limits.processes), "--ulimit", "core=0", "--workdir", "/"]
        prefix = layout.interpreter_prefix()
        if not prefix.is_relative_to("/usr"):  # a virtual environment among the binds needs the interpreter that made it
            options += ["--volume", f"{prefix.resolve()}:{prefix}:ro"]
        options += [o for source, inside in spec.ro_binds for o in ("--volume", f"{source.resolve()}:{inside}:ro")]
        writable = ((spec.workspace, layout.WORKSPACE), *spec.rw_binds)
        options += [o for source, inside in writable for o in ("--volume", f"{source.resolve()}:{inside}:rw")]
        done = self._ask("run", "--detach", *options, "--entrypoint", "sleep", image, "infinity", timeout_s=PULL_WAIT_S)
        if done.returncode:
            self._ask("rm", "--force", "--volumes", self.name)  # what a start that failed half-way has left
            raise self._fault("sandbox_unreachable", f"`docker run` of {image}: {done.stderr.strip()[-500:]}")
        super().__init__(spec)

    def _ask(self, *argv: str, timeout_s: float = ASK_WAIT_S) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([self._docker, *argv], capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._fault("sandbox_unreachable", f"`docker {argv[0]}` took more than {timeout_s:g} s") from error

    def _start(self, argv: Sequence[bytes], stdin: bytes | None, output_bytes: int) -> Call:
        interactive = [] if stdin is None else ["--interactive"]
        return _DockerCall([self._docker, "exec", *interactive, self.name, *argv], stdin, output_bytes)

    def _alive(self) -> bool:
        done = self._ask("inspect", "--format", "{{.State.Running}}", self.name)
        if done.returncode and "no such" not in done.stderr.lower():
            raise OSError(done.stderr.strip()[-500:])
        return done.stdout.strip() == "true"

    def close(self) -> None:
        """Hands writable binds back, ends the container, and shows by listing that it is gone. Idempotent."""
        if not self._closed and self._is_alive():
            inside = (layout.WORKSPACE, *(inside for _, inside in self.spec.rw_binds))
            self._sh('u=$1; shift; chown -Rh "$u" "$@"', f"{os.geteuid()}:{os.getegid()}", *inside)
        super().close()

    def _remove(self) -> None:
        self._ask("rm", "--force", "--volumes", self.name)
        listed = self._ask("ps", "--all", "--filter", f"name=^{self.name}$", "--format", "{{.Names}}")
        if listed.returncode or self.name in listed.stdout.split():
            raise InfraFault(
                "cleanup",
                f"container {self.name} after `docker rm`: {(listed.stdout + listed.stderr).strip()[-300:]}",
                "a closed sandbox is no longer listed",
                f"docker rm --force {self.name}",
            )


class _DockerCall(Call):
    """One ``docker exec``."""

    def __init__(self, argv: Sequence[bytes | str], stdin: bytes | None, output_bytes: int):
        self._read, write = output_pipe()
        self._kept = BoundedOutput(self._read, output_bytes)
        source = stdin_fd(stdin)
        try:
            self._process = spawn(list(argv), stdin=source, stdout=write, stderr=subprocess.STDOUT, start_new_session=True)
        except BaseException:
            os.close(self._read)
            raise
        finally:
            os.close(source)
            os.close(write)
        self._exit = os.pidfd_open(self._process.pid)

    def wait(self, timeout_s: float) -> bool:
        return watch(self._exit, self._kept, timeout_s)

    def finish(self) -> int | None:
        if not watch(self._exit, self._kept, END_WAIT_S):
            self._process.kill()
        code = self._process.wait()
        self._kept.drain()
        os.close(self._exit)
        os.close(self._read)
        return code

    def output(self) -> tuple[bytes, bool]:
        return self._kept.value(), self._kept.truncated


def require_docker() -> str:
    """Path of the ``docker`` program.

    Raises:
        OpsdError: there is none.
    """
    program = shutil.which("docker")
    if program is None:
        raise OpsdError("no `docker` on PATH", "this backend drives the docker program", "install Docker, or use bubblewrap")
    return program


def reap_stale(docker: str) -> list[str]:
    """Removes containers whose owner, a process of this host, is gone; their names."""
    form = f'{{{{.Names}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
    listed = subprocess.run(
        [docker, "ps", "--all", "--filter", f"label={OWNER_LABEL}", "--format", form],
        capture_output=True,
        text=True,
        timeout=ASK_WAIT_S,
    )
    stale = []
    for line in listed.stdout.splitlines():
        name, _, label = line.partition(" ")
        owner = Owner.of_label(label)
        if owner is not None and owner.is_dead():
            subprocess.run([docker, "rm", "--force", "--volumes", name], capture_output=True, timeout=ASK_WAIT_S)
            stale.append(name)
    return stale


def missing() -> str:
    """Why no container can be started on this host, or ''."""
    program = shutil.which("docker")
    if program is None:
        return "no `docker` on PATH"
    try:
        done = subprocess.run([program, "version"], capture_output=True, text=True, timeout=ASK_WAIT_S)
    except subprocess.TimeoutExpired:
        return f"the docker daemon does not answer within {ASK_WAIT_S:g} s"
    return "" if done.returncode == 0 else f"no docker daemon: {done.stderr.strip()[-200:]}"
