"""Whether code touched the files that judge it while its tests ran, seen from the host.

Watched: what the runner sets back to the base tree (test files, conftest, settings of pytest), what the hidden tests' patch names,
and the directories that hold them, below the root. A file that was written, replaced or moved has another change time (which no
command can set), also where its content was put back; a directory has, once a file came or went in it.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath

from verl_opsd.cooperbench.recipes import runner_template

_APPLIED = '\napply_patch "$1"\n'
_GUARDED = re.compile("".join(re.findall(r"^guarded\+?='(.*)'$", runner_template(), re.MULTILINE)), re.IGNORECASE)
_NAMED = re.compile(rb"^\+\+\+ b/([^\t\n]+)", re.MULTILINE)

#: Inode, mode, size and change time by path; of a directory no size.
State = dict[str, tuple[int, int, int, int]]


def split_runner(text: str) -> tuple[str, ...]:
    """A runner of this project's form as two scripts: the patches are applied; the tests are run. One of another form as it is."""
    before, found, tests = text.partition(_APPLIED)
    if not found:
        return (text,)
    return f"{before}{_APPLIED}trap - EXIT\n", f"set -e\ncd /workspace/repo\n{tests}"


def watched(workspace: Path, tests: bytes) -> State:
    """State of what judges a test run, once the patches are applied and before anything of them has run.

    Args:
        tests: patches of the hidden tests.
    """
    named = {os.fsdecode(path) for path in _NAMED.findall(tests)}
    repo = workspace / "repo"
    files = [path for path in _files(repo) if _GUARDED.search(path) or path in named]
    directories = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    return {path: _state(repo / path) for path in (*files, *directories)} | {"..": _state(workspace)}


def touched(workspace: Path, before: State) -> str:
    """The first path whose state is another one now; empty where there is none."""
    repo = workspace / "repo"
    return next((path for path in sorted(before) if _state(repo / path) != before[path]), "")


def _files(repo: Path) -> list[str]:
    found = []
    for folder, directories, files in os.walk(repo):
        inside = Path(folder).relative_to(repo)
        directories[:] = [name for name in directories if (inside / name) != Path(".git")]
        found += [str(inside / name) for name in files]
    return found


def _state(path: Path) -> tuple[int, int, int, int]:
    try:
        info = path.lstat()
    except OSError:
        return (0, 0, 0, 0)
    return (info.st_ino, info.st_mode, 0 if stat.S_ISDIR(info.st_mode) else info.st_size, info.st_ctime_ns)
