"""What a sandbox is: the one protocol behind which agents' commands and hidden tests run.

An outcome is one of four, never mixed up: the command failed (``returncode``), it ran past its limit (``timed_out``),
the sandbox died, or the infrastructure can't be reached (both raise :class:`verl_opsd.errors.InfraFault`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """Resource limits of one sandbox. Sizes in bytes, times in seconds."""

    memory_bytes: int = 2 << 30
    processes: int = 128
    file_bytes: int = 1 << 30
    output_bytes: int = 4 << 20


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox can see. Everything not named here is absent or read-only system.

    Attributes:
        name: unique on this host; shows in process lists, cgroups and errors.
        workspace: host directory, writable inside at ``/workspace``.
        ro_binds: (host path, path inside) pairs, read-only.
        rw_binds: (host path, path inside) pairs, writable. The host directory is handed to the sandbox's user.
        env: the whole environment of a command, on top of a minimal PATH, HOME and LANG; nothing else is inherited.
        limits: resource limits.
        hidden: host paths that stay unreadable even where they lie below something visible (an installed data set below
            the interpreter's prefix): an empty directory covers them. The ``verl_opsd`` package is always covered.
    """

    name: str
    workspace: Path
    ro_binds: tuple[tuple[Path, str], ...] = ()
    rw_binds: tuple[tuple[Path, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    hidden: tuple[Path, ...] = ()


@dataclass(frozen=True)
class CommandResult:
    """Result of one command. ``output`` is stdout and stderr together, in order, cut to ``Limits.output_bytes``
    (``truncated`` says so)."""

    returncode: int
    output: bytes
    timed_out: bool
    truncated: bool
    seconds: float

    @property
    def text(self) -> str:
        """The output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.output.decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Traits:
    """How a backend differs from the others, in words; ``verified``: whether its contract suite has run for this version."""

    processes: str
    network: str
    files: str
    limits: str
    verified: bool


class Sandbox(Protocol):
    """A place where commands run. Thread-safe: each call is a command of its own; background processes that a command
    leaves behind die with it."""

    spec: SandboxSpec

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "/workspace/repo",
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> CommandResult:
        """Runs one command to its end or its limit; then its whole process tree is gone.

        Args:
            argv: program and arguments, e.g. ``["bash", "-lc", "ls"]``.
            timeout_s: seconds; past it the tree is killed, ``timed_out`` is True and ``returncode`` 124.
            stdin: bytes for standard input; None gives an empty one.

        Raises:
            InfraFault: kind ``sandbox_died`` or ``sandbox_unreachable``.
        """
        ...

    def close(self) -> None:
        """Ends every process of this sandbox and removes its cgroup; the workspace stays the caller's. Idempotent."""
        ...
