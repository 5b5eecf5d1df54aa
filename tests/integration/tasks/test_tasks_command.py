"""`opsd tasks` end to end on one pocket task, and the wheel that carries the tasks."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from verl_opsd.cli.tasks import add_parser
from verl_opsd.cooperbench.dataset import POCKET_DIR, tree_files
from verl_opsd.errors import OpsdError

ROOT = Path(__file__).parents[3]


def opsd(*args: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["tasks", *args])
    out = io.StringIO()
    return parsed.func(parsed, Console(file=out, width=200)), out.getvalue()


def row(output: str, *start: str) -> list[str]:
    """Cells of the first row that starts so."""
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in output.splitlines() if "│" in line]
    return next(cells for cells in rows if tuple(cells[: len(start)]) == start)


def test_list_prepare_qualify(tmp_path: Path) -> None:
    one = ("--repo", "pocket_textkit_task", "--task", "0", "--cache-dir", str(tmp_path))
    code, text = opsd("list", "--cache-dir", str(tmp_path))
    assert code == 0 and "subsets: pocket_eval, pocket_test, pocket_train" in text
    assert row(text, "pocket_textkit_task/task0")[1:4] == ["1 2 3", "no", "not measured"]
    with pytest.raises(OpsdError, match="not prepared"):
        opsd("qualify", *one)
    code, text = opsd("prepare", *one)
    assert code == 0 and len(row(text, "pocket_textkit_task/task0")[1]) == 12
    assert row(opsd("list", *one)[1], "pocket_textkit_task/task0")[2:4] == ["yes", "not measured"]
    code, text = opsd("qualify", *one)
    assert code == 0
    for feature, tests in (("1", "17"), ("2", "10"), ("3", "15")):
        cells = row(text, "pocket_textkit_task/task0", feature)
        assert (cells[2:5], cells[6]) == (["passes", tests, "fails"], "qualified")
    assert row(opsd("list", *one)[1], "pocket_textkit_task/task0")[2:4] == ["yes", "1 2 3"]


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(
        OpsdError, match=r"no task --repo pocket_textkit_task --task 9 in (?s:.*)known: pocket_inifile_task/task1"
    ):
        opsd("list", "--repo", "pocket_textkit_task", "--task", "9")
    with pytest.raises(OpsdError, match="no task --task 9 in "):
        opsd("list", "--task", "9")
    with pytest.raises(OpsdError, match="a source is of one task"):
        opsd("prepare", "--source", "pypi:x==1", "--cache-dir", str(tmp_path))
    with pytest.raises(OpsdError, match="no task found"):
        opsd("list", "--dataset", str(tmp_path))


def test_the_wheel_carries_the_tasks(tmp_path: Path) -> None:
    """Built from a copy of what is tracked, so that nothing untracked helps and nothing is written into the tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "src" / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "src" / "README.md").touch()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*build, tmp_path / "out", tmp_path / "src"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist() if "/pocket/" in name}
    expected = {
        f"verl_opsd/cooperbench/pocket/{p.relative_to(POCKET_DIR).as_posix()}": p.read_bytes() for p in tree_files(POCKET_DIR)
    }
    assert len(expected) > 50
    assert shipped == expected
    with zipfile.ZipFile(wheel) as archive:
        names = ("recipes.json", "runner_template.sh", "subsets/flash.json", "subsets/lite.json", "subsets/flash_10.json")
        assert {f"verl_opsd/cooperbench/{name}" for name in names} <= set(archive.namelist())
