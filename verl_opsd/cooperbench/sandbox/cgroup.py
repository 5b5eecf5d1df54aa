"""Control groups for a sandbox's memory and process limits: version 1 and 2, found by creating one, not by guessing."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids")
KILL_WAIT_S = 10.0
_probe_numbers = itertools.count()


@dataclass(frozen=True)
class CgroupHost:
    """Where this process may create control groups.

    Attributes:
        parents: for ``memory`` and ``pids``, the directory below which groups are created; absent where none can be.
        versions: 1 or 2 for each controller of ``parents``.
        reasons: why a controller is absent.
    """

    parents: dict[str, Path]
    versions: dict[str, int]
    reasons: dict[str, str]

    def create(self, name: str, memory_bytes: int, processes: int) -> Cgroup:
        """Creates the group ``name`` with its limits in every hierarchy that there is.

        Raises:
            OSError: the host took back what the probe found.
        """
        group = Cgroup(tuple(dict.fromkeys(parent / name for parent in self.parents.values())))
        try:
            for controller, parent in self.parents.items():
                path = parent / name
                path.mkdir(exist_ok=True)
                _limit(path, controller, self.versions[controller], memory_bytes, processes)
        except BaseException:
            group.remove()
            raise
        return group


def _limit(path: Path, controller: str, version: int, memory_bytes: int, processes: int) -> None:
    """Writes one controller's limit; swap counts as memory where the kernel accounts for it."""
    if controller == "pids":
        (path / "pids.max").write_text(str(processes))
    elif version == 2:
        (path / "memory.max").write_text(str(memory_bytes))
        if (path / "memory.swap.max").exists():
            (path / "memory.swap.max").write_text("0")
    else:
        (path / "memory.limit_in_bytes").write_text(str(memory_bytes))
        if (path / "memory.memsw.limit_in_bytes").exists():
            (path / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))


@dataclass(frozen=True)
class Cgroup:
    """One sandbox's group: the same name in one or two hierarchies."""

    paths: tuple[Path, ...]

    def add(self, pid: int) -> None:
        """Moves a process (and what it will start) into the group."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> set[int]:
        """Host process ids that are in the group now."""
        return {int(pid) for path in self.paths if path.exists() for pid in (path / "cgroup.procs").read_text().split()}

    def remove(self) -> None:
        """Kills what is in the group and removes it. Idempotent.

        Raises:
            OSError: it is still there after 10 seconds.
        """
        deadline = time.monotonic() + KILL_WAIT_S
        for path in self.paths:
            while path.exists():
                _kill(Cgroup((path,)).pids())
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _unescape(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _mounts() -> list[tuple[str, Path, set[str]]]:
    """(file system type, mount point, super options) of the control group mounts."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            found.append((kind, Path(_unescape(left.split()[4])), set(options.split(","))))
    return found


def _own_path(controller: str) -> str:
    """This process's group in a version 1 hierarchy; for ``""`` in the unified one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _candidates(controller: str) -> list[tuple[int, Path]]:
    """(version, directory) where a group may be creatable: first below our own, so that limits above hold."""
    out: list[tuple[int, Path]] = []
    for kind, mount, options in _mounts():
        if kind == "cgroup" and controller in options:
            own = mount / _own_path(controller)
            out += [(1, path) for path in dict.fromkeys((own, mount)) if path.is_dir()]
        elif kind == "cgroup2" and controller in (mount / "cgroup.controllers").read_text().split():
            own = mount / _own_path("")
            # In version 2 a group that holds processes can't have limited children; its parent can.
            above = (own, own.parent) if own != mount else (own,)
            out += [(2, path) for path in dict.fromkeys((*above, mount)) if path.is_dir()]
    return out


def _probe(controller: str, version: int, parent: Path) -> str:
    """Creates a group, limits it and puts a process in. Empty when it worked, otherwise the reason."""
    name = f"opsd-probe-{os.getpid()}-{next(_probe_numbers)}"
    group = Cgroup((parent / name,))
    child = None
    try:
        if version == 2 and controller not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        (parent / name).mkdir()
        _limit(parent / name, controller, version, 64 << 20, 8)
        child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
        group.add(child.pid)
        return "" if child.pid in group.pids() else f"{parent}: a process that was moved in is not there"
    except OSError as error:
        return f"{parent}: {error.strerror or error}"
    finally:
        if child is not None:
            child.kill()
            child.wait()
        group.remove()


@functools.lru_cache(maxsize=1)
def find_cgroups() -> CgroupHost:
    """Finds, once a process, where groups with memory and process limits can be created."""
    parents: dict[str, Path] = {}
    versions: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for controller in CONTROLLERS:
        problems = []
        for version, parent in _candidates(controller):
            problem = _probe(controller, version, parent)
            if not problem:
                parents[controller], versions[controller] = parent, version
                break
            problems.append(problem)
        else:
            reasons[controller] = "; ".join(problems) or "no hierarchy with this controller is mounted"
    return CgroupHost(parents, versions, reasons)
