"""Sources of base trees and the one-commit repository, without a network."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from verl_opsd.cooperbench.base_tree import Source, commit_tree, extract_wheel_files, fetch
from verl_opsd.cooperbench.dataset import POCKET_DIR
from verl_opsd.cooperbench.prepare import _inputs_hash
from verl_opsd.cooperbench.recipes import Recipe, WheelFiles
from verl_opsd.errors import OpsdError

SHA = "0123456789abcdef0123456789abcdef01234567"


def run_git(*args: str, cwd: Path) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@y", *args], cwd=cwd, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("tree:/a b/c", Source("tree", "/a b/c")),
        ("pypi:Jinja2==3.0.3", Source("pypi", "Jinja2", "3.0.3")),
        (f"pypi:x==1!2.0.post1#sha256={'a' * 64}", Source("pypi", "x", "1!2.0.post1", "a" * 64)),
        (f"clone:/a@b@{SHA}", Source("clone", "/a@b", SHA)),
        (f"git+https://h/r.git@{SHA}", Source("git", "https://h/r.git", SHA)),
    ],
)
def test_sources_are_read_and_written_back(text: str, source: Source) -> None:
    assert Source.parse(text) == source
    assert str(source) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Jinja2",
        "pypi:Jinja2",
        "pypi:x==1#sha256=12",
        "clone:/a@main",
        f"clone:/a@{SHA[:12]}",
        "git+https://h/r",
        "/a",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(OpsdError, match="a source is tree:PATH"):
        Source.parse(text)


def write_tree(root: Path) -> Path:
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("x = 1\r\ny = 2\n")
    (root / ".gitignore").write_text("*.so\n")
    (root / "pkg" / "_built.so").write_bytes(b"\0\xff")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root


def test_the_same_files_give_the_same_commit_whatever_the_user_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (write_tree(tmp_path / name) for name in ("one", "two", "three"))
    first = commit_tree(one)
    (tmp_path / "config").write_text("[core]\nautocrlf = true\n[init]\ndefaultBranch = other\n[commit]\ngpgsign = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2021-01-01T00:00:00Z")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    os.utime(two / "run.sh", (1, 1))
    assert commit_tree(two) == first
    (three / "run.sh").chmod(0o644)
    assert commit_tree(three) != first
    assert run_git("log", "--all", "--format=%an %ad %s", "--date=iso", cwd=one) == "base 2000-01-01 00:00:00 +0000 Base tree"
    assert run_git("ls-files", cwd=one).split() == [".gitignore", "pkg/__init__.py", "pkg/_built.so", "run.sh"]
    assert run_git("remote", cwd=one) == "" and run_git("tag", cwd=one) == ""


def test_a_clone_is_exported_at_the_commit_without_history_or_future(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    run_git("init", "-q", cwd=clone)
    shas = []
    for text in ("past", "base", "future"):
        (clone / "file.txt").write_text(text)
        run_git("add", "-A", cwd=clone)
        run_git("commit", "-qm", text, cwd=clone)
        shas.append(run_git("rev-parse", "HEAD", cwd=clone))
    for number, kind in enumerate(("clone", "git")):
        target = tmp_path / f"tree{number}"
        (tmp_path / "downloads").mkdir(exist_ok=True)
        fetch(Source(kind, str(clone), shas[1]), target, tmp_path / "downloads")
        assert [p.name for p in target.iterdir()] == ["file.txt"]
        assert (target / "file.txt").read_text() == "base"
        commit_tree(target)
        for sha in shas:
            assert subprocess.run(["git", "cat-file", "-e", sha], cwd=target, capture_output=True).returncode != 0
    with pytest.raises(OpsdError, match="git"):
        fetch(Source("clone", str(clone), SHA), tmp_path / "none", tmp_path / "downloads")


def put_sdist(downloads: Path, name: str, members: dict[str, str]) -> str:
    """A source release as the cache keeps it; returns its checksum."""
    folder = downloads / "sdist" / name
    folder.mkdir(parents=True)
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
        for member, text in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256((folder / f"{name}.tar.gz").read_bytes()).hexdigest()


def test_a_release_is_unpacked_and_its_checksum_verified(tmp_path: Path) -> None:
    sha256 = put_sdist(tmp_path, "x-1.0", {"x-1.0/PKG-INFO": "", "x-1.0/src/x/__init__.py": "v = 1\n"})
    fetch(Source("pypi", "x", "1.0", sha256), tmp_path / "tree", tmp_path)
    assert (tmp_path / "tree" / "src" / "x" / "__init__.py").read_text() == "v = 1\n"
    with pytest.raises(OpsdError, match=f"states sha256 {'0' * 64}"):
        fetch(Source("pypi", "x", "1.0", "0" * 64), tmp_path / "other", tmp_path)
    assert not (tmp_path / "other").exists()


def test_a_release_can_not_write_outside_its_folder(tmp_path: Path) -> None:
    put_sdist(tmp_path, "x-1.0", {"x-1.0/../../../escaped": "!"})
    with pytest.raises(tarfile.OutsideDestinationError):
        fetch(Source("pypi", "x", "1.0"), tmp_path / "tree", tmp_path)
    assert not list(tmp_path.rglob("escaped"))


def test_files_of_a_wheel(tmp_path: Path) -> None:
    import sys

    folder = tmp_path / "wheel" / f"x==1-cp{sys.version_info.major}{sys.version_info.minor}"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "x-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("x/_x.cpython-311.so", "binary")
        wheel.writestr("x/other.py", "no")
    extract_wheel_files(WheelFiles("x==1", "x/_x*.so", "x"), tmp_path / "out", tmp_path)
    assert [(p.name, p.read_text()) for p in (tmp_path / "out").iterdir()] == [("_x.cpython-311.so", "binary")]
    with pytest.raises(OpsdError, match="no file matches"):
        extract_wheel_files(WheelFiles("x==1", "y*", "x"), tmp_path / "out", tmp_path)


def test_a_preparation_depends_on_content_and_not_on_the_checkout(tmp_path):
    """Two checkouts that share a cache must not replace each other's preparations."""
    names = []
    for place in ("one", "two", "changed"):
        task_dir = tmp_path / place / "pocket_textkit_task" / "task0"
        shutil.copytree(POCKET_DIR / "pocket_textkit_task" / "task0", task_dir)
        if place == "changed":
            (task_dir / "base" / "README.md").write_text("other\n")
        names.append(_inputs_hash(task_dir, Source("tree", str(task_dir / "base")), Recipe()))
    assert names[0] == names[1] != names[2]
