"""Directory trees that code which is not trusted has written: of any depth, with any permissions. Links are not followed.

``shutil.rmtree`` and ``os.walk`` recurse, and end at some thousand levels.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def remove_tree(root: Path) -> None:
    """Removes a tree in which permissions may have been taken away.

    Raises:
        OSError: something of it is left.
    """
    subprocess.run(["chmod", "-R", "u+rwX", "--", root], capture_output=True)  # what can't be changed, rm names
    done = subprocess.run(["rm", "-rf", "--", root], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(f"{root} can't be removed: {done.stderr.strip()[-500:]}")


@contextmanager
def temporary_tree(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """A new directory, removed afterwards. ``parent`` None: the system's place for temporary files."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield path
    finally:
        remove_tree(path)


def walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each directory with the names of its directories (links to some included) and of its other files. What the caller takes out of
    the directories is not entered; nor is a link, or a path that is longer than the system takes."""
    folders = [root]
    while folders:
        folder = folders.pop()
        directories: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    (directories if entry.is_dir() else files).append(entry.name)
        except OSError:
            continue
        yield folder, directories, files
        folders += [folder / name for name in directories if not (folder / name).is_symlink()]
