"""Where a base tree comes from, and the one-commit git repository that agents start from.

Both agents of a pair need the same base commit, and none may find the upstream's history or future in it. So a tree is
exported without history and committed once, with a fixed author, date and settings: same files, same commit id.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_opsd.cooperbench.dataset import IGNORED_NAMES
from verl_opsd.cooperbench.recipes import WheelFiles
from verl_opsd.errors import OpsdError

_COMMAND_TIMEOUT_S = 900.0
_GRAMMAR = "tree:PATH, pypi:NAME==VERSION[#sha256=HEX], clone:PATH@COMMIT or git+URL@COMMIT"


@dataclass(frozen=True)
class Source:
    """Where a base tree comes from.

    Attributes:
        kind: ``tree`` (a folder as it is), ``pypi`` (source release), ``clone`` (a commit of a local clone) or ``git``
            (a commit of a repository's URL).
        location: folder, package name or URL.
        revision: version or full commit id; empty for a folder.
        sha256: of the source release; empty: not checked.
    """

    kind: Literal["tree", "pypi", "clone", "git"]
    location: str
    revision: str = ""
    sha256: str = ""

    @classmethod
    def parse(cls, text: str) -> Source:
        """Reads ``tree:PATH``, ``pypi:NAME==VERSION[#sha256=HEX]``, ``clone:PATH@COMMIT`` or ``git+URL@COMMIT``.

        Raises:
            OpsdError: none of these, or a commit that is not a full id (a branch or tag can move).
        """
        if text.startswith("tree:"):
            return cls("tree", text.removeprefix("tree:"))
        if match := re.fullmatch(r"pypi:([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)(?:#sha256=([0-9a-f]{64}))?", text):
            return cls("pypi", match[1], match[2], match[3] or "")
        if match := re.fullmatch(r"(clone:|git\+)(.+)@([0-9a-f]{40})", text):
            return cls("clone" if match[1] == "clone:" else "git", match[2], match[3])
        raise OpsdError(
            f"source {text!r}",
            f"a source is {_GRAMMAR}; COMMIT is the full 40-digit id, so that the tree can't move",
            "correct the source",
        )

    def __str__(self) -> str:
        return {
            "tree": f"tree:{self.location}",
            "pypi": f"pypi:{self.location}=={self.revision}" + (f"#sha256={self.sha256}" if self.sha256 else ""),
            "clone": f"clone:{self.location}@{self.revision}",
            "git": f"git+{self.location}@{self.revision}",
        }[self.kind]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock file; other processes and threads that want it wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_command(argv: Sequence[str], *, way_out: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs a trusted command of ours on the host and returns its output.

    Raises:
        OpsdError: it failed; the end of its output is in the text.
    """
    done = subprocess.run(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise OpsdError(
            f"{' '.join(argv)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}",
            "each step of a preparation must succeed",
            way_out,
        )
    return done.stdout


def git(*args: str, cwd: Path | None = None, date: str = "2000-01-01T00:00:00+0000") -> str:
    """Runs git with a fixed identity, date and settings; nothing of the user's configuration is read."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        **{
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "base"), ("EMAIL", "base@localhost"), ("DATE", date))
        },
    }
    settings = ["-c", "core.autocrlf=false", "-c", "core.fileMode=true", "-c", "safe.directory=*"]
    return run_command(
        ["git", *settings, *args],
        env=env,
        cwd=cwd,
        way_out="see git's message; git >= 2.38 and the source must be reachable",
    )


def fetch(source: Source, target: Path, downloads: Path) -> None:
    """Puts the files of a source, without history, into ``target`` (made here).

    Args:
        downloads: cache of releases.

    Raises:
        OpsdError: source absent, checksum different, or a command failed.
    """
    if source.kind == "tree":
        if not Path(source.location).is_dir():
            raise OpsdError(f"source {source}: no such folder", "a tree is a folder", "check the path")
        shutil.copytree(source.location, target, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED_NAMES, "*.pyc"))
    elif source.kind == "pypi":
        _unpack_sdist(download_sdist(source, downloads), target)
    elif source.kind == "clone":
        _export(Path(source.location), source.revision, target)
    else:
        with tempfile.TemporaryDirectory(dir=downloads) as clone:
            git("clone", "-q", "--no-checkout", source.location, clone)
            _export(Path(clone), source.revision, target)


def _export(clone: Path, commit: str, target: Path) -> None:
    """The tree of a commit, as ``git archive`` writes it."""
    target.mkdir()
    archive = target.with_suffix(".tar")
    git("archive", "--format=tar", f"--output={archive.absolute()}", commit, cwd=clone)
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    archive.unlink()


def pip(*args: str) -> str:
    return run_command(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *args],
        way_out="see pip's message: the package index must be reachable, or the file already in the cache",
    )


def _download(requirement: str, flags: Sequence[str], folder: Path) -> Path:
    """One file of an index, kept in ``folder``, which no other file shares."""
    with locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                pip("download", "--no-deps", *flags, "--dest", f"{partial}/file", requirement)
                Path(partial, "file").rename(folder)
    (file,) = folder.iterdir()
    return file


def download_sdist(source: Source, downloads: Path) -> Path:
    """The source release of a package, out of the cache or the index; its checksum is verified at each use.

    Raises:
        OpsdError: not reachable, or another checksum than the source states.
    """
    name = f"{source.location}-{source.revision}"
    file = _download(f"{source.location}=={source.revision}", ["--no-binary", ":all:"], downloads / "sdist" / name)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if source.sha256 and found != source.sha256:
        raise OpsdError(
            f"{file}: sha256 {found}",
            f"{source} states sha256 {source.sha256}",
            "delete the file; if it comes back, distrust it",
        )
    return file


def _unpack_sdist(file: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive:
                archive.extractall(folder)
        else:
            with tarfile.open(file) as tar:
                tar.extractall(folder, filter="data")
        tops = list(Path(folder).iterdir())
        if len(tops) != 1:
            raise OpsdError(f"{file}: {len(tops)} top folders", "a source release has exactly one", "use another source")
        tops[0].rename(target)


def extract_wheel_files(files: WheelFiles, folder: Path, downloads: Path) -> None:
    """Copies the files that match ``files.members`` out of a wheel for this interpreter into ``folder``.

    Raises:
        OpsdError: the wheel can't be had, or nothing matches.
    """
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = _download(files.wheel, ["--only-binary", ":all:"], downloads / "wheel" / f"{files.wheel}-{tag}")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        members = sorted(name for name in archive.namelist() if fnmatch.fnmatchcase(name, files.members))
        if not members:
            raise OpsdError(f"{wheel}: no file matches {files.members}", "a recipe names existing files", "correct the recipe")
        for member in members:
            (folder / Path(member).name).write_bytes(archive.read(member))


def commit_tree(tree: Path) -> str:
    """Makes a tree a git repository with one commit of every file (ignored ones too) and returns the commit's id.

    The same files (names, contents, executable bits) give the same id on every machine and day.
    """
    git("init", "-q", "-b", "main", "--object-format=sha1", "--template=", cwd=tree)
    git("add", "-A", "-f", cwd=tree)
    git("commit", "-q", "--no-gpg-sign", "-m", "Base tree", cwd=tree)
    if git("rev-list", "--all", "--count", cwd=tree).strip() != "1":
        raise OpsdError(f"{tree}: more than one commit", "a base repository has no history", "use a tree without .git")
    return git("rev-parse", "HEAD", cwd=tree).strip()
