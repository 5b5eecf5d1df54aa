"""The page of known faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_fault_names_a_test() -> None:
    rows = re.findall(r"^\| .* \| `(tests/\S+\.py)` `(\w+)` \|$", (ROOT / "docs/harness.md").read_text(), re.MULTILINE)
    assert len(rows) >= 30
    for file, name in rows:
        assert name in {n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)}, name
