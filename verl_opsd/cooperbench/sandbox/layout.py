"""What a bubblewrap sandbox sees: its files on the host (etc, home, tmp, bin) and the mount arguments for ``bwrap``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import verl_opsd
from verl_opsd.cooperbench.sandbox import host
from verl_opsd.cooperbench.sandbox.base import SandboxSpec
from verl_opsd.errors import OpsdError

HOME = "/home/agent"
WORKSPACE = "/workspace"
HOST_BIN = "/opt/host-bin"
LOCAL_BIN = "/usr/local/bin"
BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": HOME, "LANG": "C.UTF-8"}
SHM_BYTES = 64 << 20
RESERVED = ("/", "/bin", "/dev", "/etc", "/home", "/lib", "/lib64", "/proc", "/sbin", "/tmp", "/usr", HOME)

# The repository that two agents share holds hooks and settings that either can write: no hook runs by default.
GITCONFIG = """\
[safe]
\tdirectory = *
[core]
\thooksPath = /dev/null
[init]
\tdefaultBranch = main
[protocol "file"]
\tallow = always
[gc]
\tauto = 0
"""
COPIED_ETC = ("ld.so.cache", "localtime", "mime.types", "protocols", "services")


def interpreter_prefix() -> Path:
    """Where this interpreter's own files live: what a virtual environment inside needs too."""
    return Path(sys.base_prefix)


def installed_packages() -> list[Path]:
    """Python packages of the host: a later release of a task's own library may be among them, which holds what its features ask for."""
    roots = dict.fromkeys((interpreter_prefix(), Path("/usr"), Path("/usr/local")))
    return [path for root in roots for path in sorted(root.glob("lib*/python3*/*-packages"))]


def write_state(state: Path, uid: int) -> None:
    """Fills a sandbox's state directory: ``etc`` (read-only inside), ``home``, ``tmp`` and ``bin`` (the user's)."""
    etc = state / "etc"
    etc.mkdir()
    (etc / "passwd").write_text(
        f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{uid}:{host.SHARED_GID}:agent:{HOME}:/bin/bash\n"
    )
    (etc / "group").write_text(f"root:x:0:\nagent:x:{host.SHARED_GID}:\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n")
    (etc / "gitconfig").write_text(GITCONFIG)
    for name in COPIED_ETC:
        source = Path("/etc") / name
        if source.is_file():
            shutil.copyfile(source, etc / name)
    (etc / "alternatives").mkdir()
    for path in etc.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
    etc.chmod(0o755)
    for name, mode in (("home", 0o700), ("tmp", 0o1777), ("bin", 0o755)):
        (state / name).mkdir()
        (state / name).chmod(mode)
        os.chown(state / name, uid, host.SHARED_GID)
    _link_programs(state / "bin")


def _link_programs(directory: Path) -> None:
    """Links to what the host keeps in /usr/local/bin, which the sandbox's own covers; and this interpreter."""
    for path in host.LOCAL_BIN.iterdir():
        (directory / path.name).symlink_to(f"{HOST_BIN}/{path.name}")
    python = interpreter_prefix() / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("python3", "python"):
        if python.exists() and not (directory / name).is_symlink():
            (directory / name).symlink_to(python)


def check_binds(spec: SandboxSpec) -> None:
    """Checks paths before anything is created.

    Raises:
        OpsdError: a missing host path, a path inside that is not absolute and plain, reserved or named twice, or a
            writable host path that is a symbolic link (it may point anywhere by the time it is mounted).
    """
    seen = set(RESERVED)
    for source, inside in ((spec.workspace, WORKSPACE), *spec.ro_binds, *spec.rw_binds):
        if not Path(source).exists():
            raise OpsdError(
                f"sandbox {spec.name}: {source} (for {inside}) does not exist",
                "every host path of a SandboxSpec exists when the sandbox is made",
                "create it first",
            )
        plain = inside.startswith("/") and str(PurePosixPath(inside)) == inside and ".." not in inside.split("/")
        if not plain or inside in seen:
            raise OpsdError(
                f"sandbox {spec.name}: {source} can't be mounted at {inside!r}",
                "a path inside is absolute and normal, named once, and none of " + ", ".join((*RESERVED, WORKSPACE)),
                "choose another path inside",
            )
        seen.add(inside)
    for source in (spec.workspace, *(source for source, _ in spec.rw_binds)):
        if Path(source).is_symlink() or not Path(source).is_dir():
            raise OpsdError(
                f"sandbox {spec.name}: {source} is not a directory of its own",
                "writable host paths are directories, not links: their whole tree is handed to the sandbox's user",
                "name the directory itself",
            )


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in reversed(PurePosixPath(path).parents)][1:]


def _below(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def mount_args(spec: SandboxSpec, state: Path) -> list[str]:
    """The mounts as ``bwrap`` arguments, parents before children. Parents get mode 0755: bwrap's default is 0700."""
    args: list[str] = []
    system = ["/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            args += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            system.append(name)
    binds: list[tuple[str, str, str]] = [("--ro-bind", path, path) for path in system]
    binds.append(("--ro-bind", str(state / "etc"), "/etc"))
    if os.path.isdir("/etc/alternatives"):
        binds.append(("--ro-bind", "/etc/alternatives", "/etc/alternatives"))
    binds.append(("--bind", str(state / "bin"), LOCAL_BIN))
    binds.append(("--ro-bind", str(host.LOCAL_BIN), HOST_BIN))
    prefix = interpreter_prefix()
    if not _below(str(prefix), system):
        binds.append(("--ro-bind", str(prefix.resolve()), str(prefix)))
        if prefix.resolve() != prefix and not _below(str(prefix.resolve()), system):
            binds.append(("--ro-bind", str(prefix.resolve()), str(prefix.resolve())))
    binds.append(("--bind", str(state / "home"), HOME))
    binds.append(("--bind", str(state / "tmp"), "/tmp"))
    binds.append(("--bind", str(spec.workspace), WORKSPACE))
    binds += [("--ro-bind", str(source), inside) for source, inside in spec.ro_binds]
    binds += [("--bind", str(source), inside) for source, inside in spec.rw_binds]
    binds = sorted(dict.fromkeys(binds), key=lambda bind: PurePosixPath(bind[2]).parts)
    mounted: list[str] = []
    made: set[str] = set()
    for option, source, inside in binds:
        for parent in _parents(inside):
            own = any(parent.startswith(f"{top}/") for top in ("/tmp", HOME))  # below a mount of the sandbox's own files
            if parent not in made and parent not in mounted and (own or not _below(parent, mounted)):
                args += ["--perms", "0755", "--dir", parent]
                made.add(parent)
        args += [option, source, inside]
        mounted.append(inside)
    args += ["--proc", "/proc", "--dev", "/dev"]
    args += ["--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
    # Packages last: what else is hidden may lie in them, and a cover holds nothing to cover.
    hidden = (*spec.hidden, Path(verl_opsd.__file__).parent, *installed_packages())
    args += _covers(hidden, [(source, inside) for _, source, inside in binds])
    return [*args, "--remount-ro", "/"]


def _covers(hidden: Iterable[Path], binds: Iterable[tuple[str, str]]) -> list[str]:
    """Arguments that cover each hidden host path wherever a bind shows it."""
    args: list[str] = []
    binds = list(binds)
    for path in dict.fromkeys(str(Path(path).resolve()) for path in hidden):
        for source, inside in binds:
            real = str(Path(source).resolve())
            if not _below(path, [real]) or not os.path.exists(path):
                continue
            where = inside + path[len(real) :]
            if os.path.isdir(path):
                args += ["--perms", "0755", "--tmpfs", where, "--remount-ro", where]
            else:
                args += ["--ro-bind", "/dev/null", where]
    return args
