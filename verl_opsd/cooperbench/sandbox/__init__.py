"""Sandboxes: where agents' commands and hidden tests run, and what this host can give them."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from verl_opsd.cooperbench.sandbox.base import CommandResult, Limits, Sandbox, SandboxSpec, Traits
from verl_opsd.cooperbench.sandbox.bubblewrap import BubblewrapSandbox
from verl_opsd.cooperbench.sandbox.cgroup import CONTROLLERS, find_cgroups
from verl_opsd.cooperbench.sandbox.host import reap_stale, require_host, version_of
from verl_opsd.cooperbench.sandbox.process import PlainProcessSandbox
from verl_opsd.errors import OpsdError

__all__ = [
    "BACKENDS",
    "BubblewrapSandbox",
    "CommandResult",
    "Limits",
    "PlainProcessSandbox",
    "Sandbox",
    "SandboxSpec",
    "Traits",
    "make_sandbox",
    "reap_stale",
    "require_sandbox",
    "sandbox_report",
    "traits",
    "unavailable",
]

BACKENDS = {
    "bubblewrap": Traits(
        processes="end with their command (a process namespace each)",
        network="none",
        files="stay between commands; /tmp, home and /usr/local/bin are the sandbox's own",
        limits="memory and processes of the sandbox; each file; output",
        verified=True,
    ),
    "process": Traits(
        processes="end with their command, unless they leave its process group",
        network="the host's",
        files="the host's",
        limits="memory of each process; each file; output. Processes are not counted",
        verified=True,
    ),
    "docker": Traits(
        processes="are swept after their command; one in a session of its own, when no other command runs",
        network="none",
        files="stay between commands, the image's included; commands are root of the container",
        limits="memory and processes of the container; each file; output",
        verified=False,
    ),
    "modal": Traits(
        processes="are swept after their command; one in a session of its own, when no other command runs",
        network="blocked",
        files="are sent at the start, and the workspace comes back at the end; no writable binds, so no pairs",
        limits="memory of the container; each file; output. Processes are not counted",
        verified=False,
    ),
}
MIN_GIT = (2, 38)  # `git merge-tree --write-tree`, which the gh shim uses


def make_sandbox(backend: str, spec: SandboxSpec, *, allow_unsafe: bool = False) -> Sandbox:
    """Makes a sandbox; the caller closes it.

    Args:
        backend: one of :data:`BACKENDS`; ``process`` isolates nothing.
        allow_unsafe: needed for ``process``, without effect on isolation that is there.

    Raises:
        OpsdError: unknown backend, ``process`` without ``allow_unsafe``, wrong paths, or a host that lacks something.
        InfraFault: the sandbox does not start.
    """
    if backend == "bubblewrap":
        return BubblewrapSandbox(spec)
    if backend == "process":
        return PlainProcessSandbox(spec, allow_unsafe=allow_unsafe)
    if backend == "docker":
        from verl_opsd.cooperbench.sandbox.docker import DockerSandbox

        return DockerSandbox(spec)
    if backend == "modal":
        from verl_opsd.cooperbench.sandbox.modal import ModalSandbox

        return ModalSandbox(spec)
    raise OpsdError(
        f"sandbox backend {backend!r}",
        "known backends: " + ", ".join(BACKENDS),
        "use one of them",
    )


def require_sandbox(backend: str, *, allow_unsafe: bool = False) -> None:
    """Refuses a host that can't give this sandbox, by making one and closing it; milliseconds.

    Raises:
        OpsdError: as :func:`make_sandbox`.
    """
    with tempfile.TemporaryDirectory() as directory:
        make_sandbox(backend, SandboxSpec("probe", Path(directory)), allow_unsafe=allow_unsafe).close()


def traits(backend: str) -> str:
    """What a backend does that another does not, where a score could depend on it, and the limits of an agent's sandbox (bytes)."""
    told = BACKENDS[backend]
    limits = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(Limits()).items())
    return f"processes {told.processes}; network {told.network}; files {told.files}; limits {told.limits}: {limits}"


def unavailable(backend: str) -> str:
    """Why this host can't make a sandbox of a backend, or ''."""
    if backend == "bubblewrap":
        try:
            require_host()
        except OpsdError as error:
            return str(error)
    if backend == "docker":
        from verl_opsd.cooperbench.sandbox.docker import missing as no_docker

        return no_docker()
    if backend == "modal":
        from verl_opsd.cooperbench.sandbox.modal import missing as no_modal

        return no_modal()
    return ""


def sandbox_report() -> list[tuple[str, bool, str]]:
    """What this host gives the bubblewrap sandbox: (name, ok, detail), by making one. For ``opsd doctor``."""
    try:
        require_host()
    except OpsdError as error:
        return [("sandbox programs", False, str(error))]
    report = [("bubblewrap", True, ".".join(map(str, version_of("bwrap"))))]
    host = find_cgroups()
    fallback = {"memory": "RLIMIT_AS, for each process", "pids": "RLIMIT_NPROC, for the sandbox's user id"}
    for name in CONTROLLERS:
        if name in host.parents:
            detail = f"version {host.versions[name]} below {host.parents[name]}"
        else:
            detail = f"none ({host.reasons[name]}); the limit is {fallback[name]}"
        report.append((f"cgroup {name}", True, detail))
    with tempfile.TemporaryDirectory() as directory:
        try:
            sandbox = BubblewrapSandbox(SandboxSpec("doctor", Path(directory)))
        except OpsdError as error:
            return [*report, ("sandbox starts", False, str(error))]
        try:
            report.append(("sandbox starts", True, "namespaces, mounts and the first command"))
            uid = sandbox.run(["id", "-u"], timeout_s=10, cwd="/").text.strip()
            report.append(("own user id", uid == str(sandbox.uid), f"commands run as {uid}"))
            devices = sandbox.run(["cat", "/proc/net/dev"], timeout_s=10, cwd="/").text.splitlines()[2:]
            names = [line.split(":")[0].strip() for line in devices]
            report.append(("no network", names == ["lo"], f"interfaces inside: {', '.join(names)}"))
            git = sandbox.run(["git", "--version"], timeout_s=10, cwd="/").text.strip()
            numbers = tuple(int(part) for part in git.removeprefix("git version ").split(".")[:2] if part.isdigit())
            report.append(("git inside", numbers >= MIN_GIT, f"{git}; {MIN_GIT[0]}.{MIN_GIT[1]} or later is needed"))
        finally:
            sandbox.close()
    return report
