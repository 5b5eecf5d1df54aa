"""What the host gives a bubblewrap sandbox: programs, user ids, a state directory each, and the removal of stale ones.

Everything that a sandbox keeps on the host lies below ``STATE_ROOT``: one size-limited tmpfs a sandbox (its /tmp, home
and /usr/local/bin), named after the process that owns it, and one lock file a user id.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import re
import shutil
import signal
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from verl_opsd.cooperbench.sandbox.cgroup import Cgroup
from verl_opsd.cooperbench.sandbox.seccomp import call_filter
from verl_opsd.errors import InfraFault, OpsdError

LOCAL_BIN = Path("/usr/local/bin")
STATE_ROOT = Path("/run/opsd-sandbox")
PREFIX = "opsd-sandbox"
# 60578-61183 is left unused by Debian's and systemd's allocation of user ids, and fits a container's 65536 ids.
SHARED_GID = 60599
FIRST_UID, LAST_UID = 60600, 61099
PROGRAMS = {
    "bwrap": "bubblewrap",
    "setpriv": "util-linux",
    "prlimit": "util-linux",
    "env": "coreutils",
    "git": "git",
}
SYSTEM_DIRECTORIES = ("/usr/bin", "/bin", "/usr/sbin", "/sbin")
MIN_BWRAP = (0, 7)
# linux/mount.h; called directly: a program for each would take a third of a sandbox's start
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
_libc = ctypes.CDLL(None, use_errno=True)


def program(name: str) -> Path:
    """Path of a system program that the sandbox is built from.

    Raises:
        OpsdError: it is not in a system directory.
    """
    for directory in SYSTEM_DIRECTORIES:
        path = Path(directory) / name
        if path.exists():
            return path
    package = PROGRAMS[name]
    raise OpsdError(
        f"no `{name}` in /usr/bin, /bin, /usr/sbin or /sbin",
        "the bubblewrap sandbox is built from the system's bwrap, setpriv, prlimit, env and git",
        f"apt-get install {package}",
    )


def version_of(name: str) -> tuple[int, ...]:
    """Version numbers that ``<name> --version`` prints first.

    Raises:
        OpsdError: the program is missing, or does not run.
    """
    path = program(name)
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        raise OpsdError(
            f"{path} does not run: {e}",
            "its version is asked for before a sandbox is made",
            f"apt-get install --reinstall {PROGRAMS[name]}",
        ) from e
    match = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


@functools.lru_cache(maxsize=1)
def require_host() -> None:
    """Checks, once a process, what can be checked without starting a sandbox.

    Raises:
        OpsdError: a program is missing or too old, or this process is not root.
    """
    for name in PROGRAMS:
        program(name)
    call_filter()
    if version_of("bwrap") < MIN_BWRAP:
        raise OpsdError(
            f"bubblewrap {'.'.join(map(str, version_of('bwrap')))}",
            "0.7 or later is needed (size-limited tmpfs)",
            "install a later bubblewrap (Debian 12 and Ubuntu 24.04 have one)",
        )
    if not LOCAL_BIN.is_dir():
        raise OpsdError(f"no {LOCAL_BIN}", "each sandbox has its own there", f"mkdir -p {LOCAL_BIN}")
    if os.geteuid() != 0:
        raise OpsdError(
            f"the bubblewrap sandbox is asked for by user id {os.geteuid()}",
            "commands run as another user id than their host's, which only root can give away",
            "run as root, e.g. in a container with CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID",
        )


@dataclass(frozen=True)
class Owner:
    """A process by id, start time (clock ticks since boot) and process namespace: a reused id is another owner."""

    namespace: int
    pid: int
    start: int

    @classmethod
    def current(cls) -> Owner:
        start = _start_time(os.getpid())
        assert start is not None
        return cls(os.stat("/proc/self/ns/pid").st_ino, os.getpid(), start)

    @property
    def label(self) -> str:
        return f"{self.namespace}-{self.pid}-{self.start}"

    @classmethod
    def of_label(cls, text: str) -> Owner | None:
        match = re.match(r"(\d+)-(\d+)-(\d+)(?=-)", text)
        return cls(*map(int, match.groups())) if match else None

    def is_dead(self) -> bool:
        """True only for a process that this one could see and that is gone."""
        return self.namespace == os.stat("/proc/self/ns/pid").st_ino and _start_time(self.pid) != self.start


def _start_time(pid: int) -> int | None:
    """Start time of a process, None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def parent_of(pid: int) -> int:
    """Parent's process id; 0 when ``pid`` is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def state_root() -> Path:
    """``STATE_ROOT``, made if it is not there.

    Raises:
        OpsdError: it can't be written.
    """
    try:
        (STATE_ROOT / "uids").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OpsdError(
            f"{STATE_ROOT} can't be made: {error.strerror}",
            "a sandbox keeps its /tmp, its home and its claim to a user id there",
            f"make {STATE_ROOT.parent} writable",
        ) from error
    return STATE_ROOT


class UidLease:
    """A user id of the range that no other living sandbox on this host has; a file lock, so it ends with its holder."""

    def __init__(self) -> None:
        directory = state_root() / "uids"
        for uid in range(FIRST_UID, LAST_UID + 1):
            fd = os.open(directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            self.uid, self._fd = uid, fd
            return
        raise InfraFault(
            "sandbox_unreachable",
            f"all user ids from {FIRST_UID} to {LAST_UID} are taken by living sandboxes",
            "each sandbox has a user id of its own",
            "close sandboxes that are done",
        )

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cgroup_name(label: str) -> str:
    """A sandbox's control group, by the sandbox's label."""
    return f"{PREFIX}-{label}"


def processes_of(uid: int) -> set[int]:
    """Host process ids whose real user id is ``uid``."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                match = re.search(r"^Uid:\s+(\d+)", Path(entry.path, "status").read_text(errors="replace"), re.MULTILINE)
                if match and int(match.group(1)) == uid:
                    found.add(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def make_state(name: str, size_bytes: int) -> Path:
    """A new tmpfs below ``STATE_ROOT``.

    Raises:
        OpsdError: the host does not permit mounts.
    """
    path = state_root() / name
    path.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=0700".encode()
    if _libc.mount(PREFIX.encode(), os.fsencode(path), b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), options):
        reason = os.strerror(ctypes.get_errno())
        path.rmdir()
        raise OpsdError(
            f"mount of a tmpfs at {path} failed: {reason}",
            "the sandbox needs CAP_SYS_ADMIN for its mounts",
            "run the container with --cap-add SYS_ADMIN and without a seccomp or AppArmor profile that forbids mount",
        )
    return path


def remove_state(path: Path) -> None:
    """Unmounts and removes a state directory. Idempotent."""
    if os.path.ismount(path):
        _libc.umount2(os.fsencode(path), MNT_DETACH)  # what is still mounted is an error of the next line
    if path.exists():
        shutil.rmtree(path)


def reap_stale() -> list[str]:
    """Ends and removes what sandboxes of dead processes left behind: processes, control groups, state directories.

    Only names with this project's prefix are looked at, and only owners that this process could see and that are gone.

    Returns:
        the names of what was removed.

    Raises:
        InfraFault: ``sandbox_unreachable`` when something can't be removed.
    """
    lock = os.open(state_root() / "reap", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together would reap the same rests
        return _reap()
    except OSError as error:
        raise InfraFault(
            "sandbox_unreachable",
            f"the rest of a dead process's sandbox can't be removed: {error}",
            "no sandbox starts beside the rests of another: they may hold memory and processes",
            f"remove what is left below {STATE_ROOT} (umount first) and its control group by hand",
        ) from error
    finally:
        os.close(lock)


def _reap() -> list[str]:
    rests = [path for path in STATE_ROOT.iterdir() if (owner := Owner.of_label(path.name)) and owner.is_dead()]
    if not rests:  # a sandbox's state is made before its first process, and removed after its last
        return []
    removed = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (name := _sandbox_of(int(entry.name))):
            owner = Owner.of_label(name)
            if owner and owner.is_dead():
                _kill_if_there(int(entry.name))
                removed.append(name)
    for path in rests:
        groups = path / "cgroups"
        if groups.exists():
            lines = (Path(line) for line in groups.read_text().splitlines())
            Cgroup(tuple(line for line in lines if line.name == cgroup_name(path.name))).remove()
        remove_state(path)
        removed.append(path.name)
    return removed


def _sandbox_of(pid: int) -> str:
    """The sandbox's name when ``pid`` is its bwrap process, otherwise empty."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    prefix = f"{PREFIX}:".encode()
    return title[len(prefix) :].decode(errors="replace") if title.startswith(prefix) else ""


def _kill_if_there(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def hand_over(root: Path, uid: int, gid: int, *, shared: bool) -> None:
    """Gives a tree to a sandbox's user without following a symbolic link.

    Args:
        shared: also writable for the group, so that several sandboxes (one user id each, one group for all) can write.
            Read-only files (git's objects) keep their mode.
    """
    for _, _, files, directory in os.fwalk(root, follow_symlinks=False):
        os.fchown(directory, uid, gid)
        if shared:
            os.fchmod(directory, os.fstat(directory).st_mode & 0o7777 | 0o2070)
        for name in files:
            try:
                os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)
                if shared:
                    _share_file(name, directory)
            except FileNotFoundError:  # another sandbox is at work in the shared tree
                continue


def _share_file(name: str, directory: int) -> None:
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o200:
        return
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fchmod(fd, info.st_mode & 0o7777 | 0o060)
    finally:
        os.close(fd)
