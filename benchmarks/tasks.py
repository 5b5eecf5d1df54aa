"""Writes the tables of measured tasks into docs/tasks.md: what `opsd tasks qualify` found on this machine.

    python benchmarks/tasks.py [DATASET ...]

DATASET: folders in CooperBench's layout, prepared and qualified before. The pocket tasks are always shown; those that are not measured yet
are measured now.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

from demo import ROOT, machine

from verl_opsd.cooperbench.dataset import POCKET_DIR, discover, load_subset
from verl_opsd.cooperbench.feature_table import load_table
from verl_opsd.cooperbench.prepare import is_prepared, load_prepared, prepare
from verl_opsd.cooperbench.qualification import gold_merge, qualify
from verl_opsd.paths import cache_dir


def features(datasets: list[Path]) -> str:
    """One row a task: its features, those that are qualified, tests and seconds."""
    lines = ["| task | features | qualified | tests with gold, fewest to most | seconds a feature, slowest | base tree |"]
    lines.append("|---|---|---|---|---|---|")
    for task in (t for folder in datasets for t in discover(folder)):
        prepared, table = None, None
        if is_prepared(cache_dir(), task.repo, task.task_id):
            prepared = load_prepared(cache_dir(), task.repo, task.task_id)
            table = load_table(prepared)
        if prepared is None or table is None or set(table.rows) != set(task.features):
            print(f"{task.repo}/task{task.task_id}: not measured, left out", file=sys.stderr)
            continue
        rows = list(table.rows.values())
        tests = [r.gold_tests for r in rows]
        base = prepared.near_benchmark or "its own"
        lines.append(
            f"| {task.repo}/task{task.task_id} | {len(rows)} | {len(table.qualified)} of {len(rows)} "
            f"| {min(tests)} to {max(tests)} | {max(r.seconds for r in rows):.1f} | {base} |"
        )
    return "\n".join(lines) + "\n"


def pocket_pairs() -> str:
    """One row a pocket pair: its split, and whether git merges its gold patches."""
    lines = ["| split | pair | gold patches |", "|---|---|---|"]
    for split in ("train", "eval", "test"):
        for pair in load_subset(f"pocket_{split}", split=split):
            merge = gold_merge(pair, load_prepared(cache_dir(), pair.repo, pair.task_id))
            word = "conflict" if merge == "conflicts" else "merge clean"
            lines.append(
                f"| {split} | {pair.repo}/task{pair.task_id} features {pair.features[0]}, {pair.features[1]} | {word} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Pastes both tables between their markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", type=Path, metavar="DATASET")
    args = parser.parse_args()
    for task in discover(POCKET_DIR):
        prepared = prepare(task.task_dir, None, cache_dir())
        if load_table(prepared) is None:
            qualify(task.task_dir, prepared)
    path = ROOT / "docs" / "tasks.md"
    stamp = f"Measured {datetime.date.today()} on {machine()}.\n\n"
    tables = {"pairs": pocket_pairs(), "features": stamp + features([POCKET_DIR, *args.datasets])}
    for name, text in tables.items():
        marked = re.compile(rf"(<!-- tasks:{name} -->\n).*?(<!-- /tasks -->)", re.DOTALL)
        path.write_text(marked.sub(lambda m, text=text: m[1] + text + m[2], path.read_text()))  # type: ignore[misc]


if __name__ == "__main__":
    main()
