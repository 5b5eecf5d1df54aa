"""Whether code touched the files that judge it while its tests ran, seen from the host.

Watched: what the runner sets back to the base tree (test files, conftest, settings of pytest), what the hidden tests' patch names,
and the directories that hold them, below the root. A file that was written, replaced or moved has another change time (which no
command can set), also where its content was put back; a directory has, once a file came or went in it. Of data in test directories,
whose times tests do change, the content at the end counts. Bytecode is a file that the interpreter reads in the place of another
one: none is there at the start, none is written by the tests, and what appears beside watched code counts as a change of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path, PurePosixPath

from verl_opsd.cooperbench.recipes import runner_template
from verl_opsd.trees import remove_tree, walk

_APPLIED = '\napply_patch "$1"\n'
_GUARDED = re.compile("".join(re.findall(r"^guarded\+?='(.*)'$", runner_template(), re.MULTILINE)), re.IGNORECASE)
_NAMED = re.compile(rb"^\+\+\+ b/([^\t\n]+)", re.MULTILINE)

CACHE = "__pycache__"
_CODE = (".py", ".pyi", ".ini", ".cfg", ".toml")

#: By path: inode, mode, size (of a directory 0), and change time or the content's hash.
State = dict[str, tuple[int, int, int, int | str]]


def split_runner(text: str) -> tuple[str, ...]:
    """A runner of this project's form as two scripts: the patches are applied; the tests are run. One of another form as it is."""
    before, found, tests = text.partition(_APPLIED)
    if not found:
        return (text,)
    return f"{before}{_APPLIED}trap - EXIT\n", f"set -e\ncd /workspace/repo\n{tests}"


def without_bytecode(workspace: Path) -> None:
    """Removes each ``__pycache__`` of the tree: a patch may bring one, and what stands in it is run for the file that it names."""
    for folder, directories, files in walk(workspace / "repo"):
        for name in {CACHE} & {*directories, *files}:
            path = folder / name
            remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        directories[:] = [name for name in directories if name != CACHE]


def watched(workspace: Path, tests: bytes) -> State:
    """State of what judges a test run, once the patches are applied, bytecode is removed, and before anything of them has run.

    Args:
        tests: patches of the hidden tests.
    """
    named = {os.fsdecode(path) for path in _NAMED.findall(tests)}
    repo = workspace / "repo"
    files = [path for path in _files(repo) if _GUARDED.search(path) or path in named]
    code = {path for path in files if path in named or path.lower().endswith(_CODE)}
    directories = {str(parent) for path in code for parent in PurePosixPath(path).parents} - {"."}
    # Files come and go in the root, so its own time tells nothing.
    beside = [CACHE] if any(path.endswith(".py") and "/" not in path for path in code) else []
    timed = {path: _state(repo / path) for path in (*code, *directories, *beside, "..")}
    return timed | {path: _state(repo / path, content=True) for path in files if path not in code}


def touched(workspace: Path, before: State) -> str:
    """The first path whose state is another one now; empty where there is none."""
    repo = workspace / "repo"
    changed = (
        path for path, (*_, last) in sorted(before.items()) if _state(repo / path, isinstance(last, str)) != before[path]
    )
    return next(changed, "")


def _files(repo: Path) -> list[str]:
    found = []
    for folder, directories, files in walk(repo):
        inside = folder.relative_to(repo)
        directories[:] = [name for name in directories if (inside / name) != Path(".git")]
        found += [str(inside / name) for name in files]
    return found


def _state(path: Path, content: bool = False) -> tuple[int, int, int, int | str]:
    try:
        info = path.lstat()
        size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
        last = info.st_ctime_ns if not content else _hash(path) if stat.S_ISREG(info.st_mode) else "no file"
    except OSError:
        return (0, 0, 0, "gone")
    return (info.st_ino, info.st_mode, size, last)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
