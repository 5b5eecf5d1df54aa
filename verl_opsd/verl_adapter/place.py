"""Where a run is written: that it can be, and what was there before, so that a refused run gives it back as it was."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_opsd.errors import OpsdError


def require_writable(path: str | Path, key: str) -> None:
    """A folder can be made at ``path`` and written into; nothing is made to find out.

    Raises:
        OpsdError: something in the way is a file, or the file system permits no writing.
    """
    folder = Path(path).absolute()
    try:
        nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
        with tempfile.TemporaryFile(dir=nearest):
            pass
        for name in folder.relative_to(nearest).parts:
            if len(os.fsencode(name)) > os.pathconf(nearest, "PC_NAME_MAX"):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except (OSError, ValueError) as error:
        raise OpsdError(
            f"{key}={path}: {getattr(error, 'strerror', None) or error} ({nearest})",
            f"{key} is a folder, there or to be made, that this process can write into",
            f"correct {key}, or the permissions of what is above it",
        ) from error


@dataclass(frozen=True)
class Found:
    """What a run directory held before this start.

    Attributes:
        names: its entries; files: contents of those that Hydra writes anew, by path in the directory.
    """

    names: frozenset[str]
    files: dict[str, bytes]

    @classmethod
    def of(cls, path: Path, job: str, fresh: bool = False, started: float | None = None) -> Found:
        """
        Args:
            fresh: Hydra has written its own files there already, so what they held before is not known and they are left out.
            started: seconds since the epoch; what was written later is of another rank of this very start.
        """
        entries = [p for p in path.iterdir() if started is None or p.stat().st_mtime < started] if path.is_dir() else []
        names = frozenset(p.name for p in entries)
        if fresh:
            return cls(names - {".hydra", f"{job}.log"}, {})
        files = [
            p
            for p in (path / f"{job}.log", *(path / ".hydra").glob("*"))
            if p.is_file() and p.relative_to(path).parts[0] in names
        ]
        return cls(names, {str(p.relative_to(path)): p.read_bytes() for p in files})

    def restore(self, path: Path) -> None:
        """Removes what a refused run wrote, gives files back their contents, and removes the directory, and those above it below the
        current one, where they are then empty. A directory that holds a run keeps what that run has written."""
        for entry in path.iterdir():
            if entry.name in self.names:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for name, content in self.files.items():
            (path / name).write_bytes(content)
        here = Path.cwd()
        for folder in (path, *(p for p in path.parents if here in p.parents)):
            try:
                folder.rmdir()
            except OSError:  # not empty
                return
