"""Which gold patches of a task get in each other's way: shared files, edits that touch, and the data set's own report.

Git's merge conflicts where two edits of one file overlap or leave no untouched line between them. Two that are closer than three
lines merge, but only as long as the agents' edits are as tight as gold's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from verl_opsd.cooperbench.dataset import Task
from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hunks import CONTEXT, edits, gap

#: Nearest approach of two patches: no common file; a common file, further apart than Git's context; within it; no line between.
Approach = Literal["apart", "share_a_file", "within_three_lines", "overlap"]


@dataclass(frozen=True)
class Collision:
    """The gold patches of one pair. ``files`` are those that both touch, ``lines`` the fewest untouched lines between two of their
    edits (0: they touch; negative: they overlap; None: no common file)."""

    features: tuple[int, int]
    files: tuple[str, ...]
    lines: int | None

    @property
    def approach(self) -> Approach:
        """How near the two come."""
        if self.lines is None:
            return "share_a_file" if self.files else "apart"
        return "overlap" if self.lines <= 0 else "within_three_lines" if self.lines < CONTEXT else "share_a_file"

    @property
    def conflicts(self) -> bool:
        """Whether Git's merge of the two conflicts."""
        return self.approach == "overlap"


def collisions_of(task: Task) -> list[Collision]:
    """Every pair of a task's features, ascending.

    Raises:
        OpsdError: a gold patch that is cut off.
    """
    gold = {}
    for feature in task.features:
        patch = (task.task_dir / f"feature{feature}" / "feature.patch").read_bytes().decode("utf-8", "surrogateescape")
        gold[feature] = edits(patch)
    found = []
    for a, b in combinations(task.features, 2):
        files = sorted(gold[a].keys() & gold[b].keys())
        gaps = [gap(x, y) for file in files for x in gold[a][file] for y in gold[b][file]]
        found.append(Collision((a, b), tuple(files), min(gaps, default=None)))
    return found


def reported_conflicts(report: Path) -> dict[tuple[str, int], set[tuple[int, int]]]:
    """Pairs of each task whose gold patches conflict, by a data set's ``gold_conflict_report.json``; every task that it covers.

    Raises:
        OpsdError: the file is no such report.
    """
    try:
        data = json.loads(report.read_text())
        out: dict[tuple[str, int], set[tuple[int, int]]] = {}
        for name in data["per_task"]:
            repo, _, number = name.rpartition("/task")
            out[repo, int(number)] = set()
        for entry in data["conflict_pairs"]:
            a, b = sorted((int(entry["f1"]), int(entry["f2"])))
            out[entry["repo"], int(entry["task_id"])].add((a, b))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise OpsdError(
            f"{report}: {type(e).__name__}: {e}",
            "a conflict report has per_task and conflict_pairs with repo, task_id, f1, f2",
            "give the data set's gold_conflict_report.json",
        ) from e
    return out
