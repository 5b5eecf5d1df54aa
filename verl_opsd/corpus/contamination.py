"""Contamination audit: no row is of an evaluated task, and none holds the text of one.

By name: a row whose repository (or task) is in an evaluation subset. By text, which also finds it in corpora that name no task: the
share of a feature text's, gold patch's or hidden test's distinct runs of :data:`GRAM` words that a row holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from verl_opsd.cooperbench.types import PairTask
from verl_opsd.corpus.records import CorpusRow
from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hunks import added_lines

#: Version of this audit; stamped on every corpus.
VERSION = "contamination-1"
#: Words in a row, and the least number of runs that a text must have to be searched for.
GRAM, LEAST = 8, 5
#: Share of a text's runs from which on a row counts as holding it.
SHARE = 0.2

Gram = tuple[str, ...]


def grams(text: str) -> frozenset[Gram]:
    """Distinct runs of words; signs between words don't count, so that a patch, a file and a JSON string of it are one text."""
    words = re.findall(r"\w+", re.sub(r"\\[nrt]", " ", text.lower()))
    return frozenset(tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1))


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated.

    Attributes:
        subsets: name of each subset -> its pairs' keys.
        names: repositories or tasks that no row may be of.
        texts: (where, runs of words) of feature texts, gold patches and hidden tests.
        digest: SHA-256 over all of it.
    """

    level: Literal["repo", "task"]
    subsets: dict[str, tuple[str, ...]]
    names: frozenset[str]
    texts: tuple[tuple[str, frozenset[Gram]], ...] = field(repr=False)
    digest: str


def evaluated(subsets: dict[str, Sequence[PairTask]], level: Literal["repo", "task"] = "repo") -> Evaluated:
    """Everything that rows are compared with.

    Raises:
        OpsdError: no subset, one without pairs, or a feature without one of its files.
    """
    if not subsets or not all(subsets.values()):
        raise OpsdError(
            f"evaluation subsets {list(subsets)}",
            "a corpus is audited against every subset that its model will be evaluated on",
            "name them with --eval",
        )
    pairs = [p for some in subsets.values() for p in some]
    files: dict[str, str] = {}
    for task_dir, feature in sorted({(p.task_dir, f) for p in pairs for f in p.features}):
        folder = task_dir / f"feature{feature}"
        for name in ("feature.md", "feature.patch", "tests.patch"):
            if not (folder / name).is_file():
                raise OpsdError(
                    f"{folder / name} is not there",
                    "rows are compared with the task text, gold patch and hidden tests of every evaluated feature",
                    "name a whole dataset with --dataset",
                )
            text = (folder / name).read_text(errors="replace")
            where = Path(*folder.parts[-3:], name).as_posix()
            files[where] = "\n".join(added_lines(text)) if name.endswith(".patch") else text
    texts = tuple((where, found) for where, text in files.items() if len(found := grams(text)) >= LEAST)
    keys = {name: tuple(p.key for p in some) for name, some in subsets.items()}
    names = frozenset(p.repo if level == "repo" else f"{p.repo}/task{p.task_id}" for p in pairs)
    digest = hashlib.sha256(repr((VERSION, level, sorted(keys.items()), sorted(files.items()))).encode()).hexdigest()
    return Evaluated(level, keys, names, texts, digest)


def contamination_of(text: str, target: Evaluated, name: str = "") -> str:
    """Why a text may not be trained on; empty when it may.

    Args:
        name: repository or task that it says it is of, as ``target.level`` has it.
    """
    if name and name in target.names:
        return f"{target.level} {name} is evaluated"
    mine = grams(text)
    shares = [(len(mine & wanted) / len(wanted), where) for where, wanted in target.texts]
    share, where = max(shares, default=(0.0, ""))
    return f"holds {share:.0%} of {where}" if share >= SHARE else ""


def contamination_of_row(row: CorpusRow, text: str, target: Evaluated) -> str:
    """The same for a row and its decoded text."""
    return contamination_of(text, target, row.repo if target.level == "repo" else row.task)


def subsets_named(dataset: Path, names: Iterable[str]) -> dict[str, Sequence[PairTask]]:
    """The pairs of evaluation subsets of a dataset, by name."""
    from verl_opsd.cooperbench.dataset import load_subset

    return {name: load_subset(name, dataset, split="eval") for name in names}
