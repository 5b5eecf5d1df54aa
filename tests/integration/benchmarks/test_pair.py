"""benchmarks/pair.py runs, with tiny shapes, and writes every row that it promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/pair.py"


@pytest.mark.parametrize("devices", ["1", "2"])
def test_every_part_runs(devices: str, tmp_path: Path) -> None:
    out = tmp_path / "table.txt"
    runpy.run_path(str(SCRIPT))["main"](["--tiny", "--devices", devices, "--out", str(out)])
    table = out.read_text()
    pair = "pair, one after the other" if devices == "1" else "pair, side by side"
    for what in (
        "per turn, top 20",
        "plain student",
        "plain teacher",
        " student ",
        " teacher ",
        pair,
        "times the layout per turn",
    ):
        assert what in table
    assert "not run" not in table and "out of memory" not in table
