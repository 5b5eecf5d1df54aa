"""The qualification table of a prepared task: for each feature, what its gold patch and the untouched base tree did.

It lies in the prepared task's folder and names the hash of the tree that was measured: it can't be used for another.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_opsd.cooperbench.types import PreparedTask
from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class FeatureRow:
    """One feature. ``gold_tests``: tests that pass with the gold patch. ``seconds``: both runs together."""

    feature_id: int
    gold_passes: bool
    gold_tests: int
    base_passes: bool
    seconds: float

    @property
    def verdict(self) -> str:
        """``qualified``, ``gold_fails``, or ``free_point``: the tests pass on the untouched base."""
        if not self.gold_passes:
            return "gold_fails"
        return "free_point" if self.base_passes else "qualified"


@dataclass(frozen=True)
class FeatureTable:
    """Rows by feature id, measured on the tree of ``tree_hash``."""

    repo: str
    task_id: int
    tree_hash: str
    rows: dict[int, FeatureRow]

    @property
    def qualified(self) -> tuple[int, ...]:
        """Features that may give reward, ascending."""
        return tuple(sorted(f for f, row in self.rows.items() if row.verdict == "qualified"))


def table_path(prepared: PreparedTask) -> Path:
    """Where the table of a prepared task lies."""
    return prepared.base.parent / "qualification.json"


def load_table(prepared: PreparedTask) -> FeatureTable | None:
    """The table of a prepared task; None where none was made.

    Raises:
        OpsdError: the file is not a table of this tree.
    """
    path = table_path(prepared)
    if not path.is_file():
        return None
    data = json.loads(path.read_text())
    if data["tree_hash"] != prepared.tree_hash:
        raise OpsdError(
            f"{path} was measured on tree {data['tree_hash']}",
            f"the prepared tree is {prepared.tree_hash}",
            "delete the file and run opsd tasks qualify",
        )
    rows = {row["feature_id"]: FeatureRow(**row) for row in data["rows"]}
    return FeatureTable(data["repo"], data["task_id"], data["tree_hash"], rows)


def save_table(prepared: PreparedTask, table: FeatureTable) -> Path:
    """Writes a table beside its prepared task, atomically."""
    path = table_path(prepared)
    data = {**asdict(table), "rows": [asdict(table.rows[f]) for f in sorted(table.rows)]}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1))
    os.replace(partial, path)
    return path
