"""docs/architecture.md tells the rooms of the package and what a run directory holds, and the code agrees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "verl_opsd"
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Names in the first column of a section's table, row by row."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in section.splitlines() if row.startswith("| `")]


ORDER = {name.rstrip("/").removesuffix(".py"): place for place, row in enumerate(table("Rooms")) for name in row}


def imported(node: ast.AST) -> Iterator[str]:
    """Rooms that a module imports, anywhere but under ``if TYPE_CHECKING``."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl_opsd":
        parts = (node.module or "").split(".")
        yield from [parts[1]] if len(parts) > 1 else [a.name for a in node.names]
    for below in ast.iter_child_nodes(node):
        yield from imported(below)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if "pocket" not in parts and parts != ("__init__.py",):
            yield parts[0].removesuffix(".py"), path


def test_every_room_is_in_the_table() -> None:
    assert {room for room, _ in modules()} == set(ORDER)


def test_no_room_imports_from_below() -> None:
    wrong = {
        (str(path.relative_to(PACKAGE)), other)
        for room, path in modules()
        for other in imported(ast.parse(path.read_text()))
        if other in ORDER and ORDER[other] > ORDER[room]
    }
    assert not wrong


def test_every_file_that_is_written_into_a_run_directory_is_in_the_table() -> None:
    told = {name.rstrip("/") for row in table("Run directory") for name in row}
    pattern = re.compile(r'(?:run|run_dir|self)\.path / "([\w.]+)"')
    written = {name for _, path in modules() for name in pattern.findall(path.read_text())}
    assert {"meta.json", "tasks.json", "data", "left_out", "interrupted"} <= written
    assert written - told == set(), written - told
