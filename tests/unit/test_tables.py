"""Tables of the commands: a narrow terminal gets every character of every cell."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
import rich.table
from rich.console import Console

from verl_opsd.cli.tables import Table

PACKAGE = Path(__file__).parents[2] / "verl_opsd"
CELLS = ("train-00001-00000-0", "pocket_textkit_task/task0/f1_f2", "pocket_textkit_task", "a word")


def columns(table: Table, width: int) -> list[str]:
    """The text of each column, its lines joined."""
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    return ["".join(line.split("│")[n + 1].strip() for line in lines) for n in range(len(CELLS))]


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("kind", ["names", "columns", "added"])
def test_nothing_is_cut(width: int, kind: str) -> None:
    heads = list("abcd")
    table = Table(*(heads if kind == "names" else map(rich.table.Column, heads) if kind == "columns" else ()))
    for head in heads if kind == "added" else ():
        table.add_column(head)
    table.add_row(*CELLS)
    assert [c.replace(" ", "") for c in columns(table, width)] == [c.replace(" ", "") for c in CELLS]


def test_a_column_of_two_tables_shows_each_table_s_own_cells() -> None:
    heads = [rich.table.Column(h) for h in "abcd"]
    first, second = Table(*heads), Table(*heads)
    first.add_row(*CELLS)
    second.add_row(*"wxyz")
    assert columns(first, 200) == list(CELLS) and columns(second, 200) == list("wxyz")


def test_an_id_stands_in_one_line_of_a_terminal() -> None:
    table = Table(rich.table.Column("episode", no_wrap=True), *"bcd")
    table.add_row(*CELLS)
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    assert CELLS[0] in out.getvalue()


def test_the_commands_use_no_other_table() -> None:
    paths = [p for p in (PACKAGE / "cli").glob("*.py") if p.name != "tables.py"]
    taken = {
        (path.name, alias.name)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "rich.table"
        for alias in node.names
    }
    assert {name for _, name in taken} == {"Column"}
