"""What a report leaves out unless it is asked to reveal: text of hidden tests, and of answers that an agent was given.

Text is compared line by line with the added lines of the patches in the task's folder; lines that the public task text holds are no
secret. Line breaks and quotes may be escaped, as inside a tool call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hunks import added_lines

#: A line counts from this many characters on; one alone is taken from ``ALONE`` on, shorter ones in a row of two.
SHORTEST, ALONE = 8, 40
_BREAK = re.compile(r"\\n|\n")


@dataclass(frozen=True)
class Secrets:
    """Lines of one pair: of its hidden tests, and of its gold patches."""

    tests: frozenset[str]
    gold: frozenset[str]


@functools.lru_cache(maxsize=4096)
def secrets_of(task_dir: Path, features: tuple[int, int]) -> Secrets:
    """Secrets of a pair.

    Raises:
        OpsdError: the task's folder is not there.
    """
    if not task_dir.is_dir():
        raise OpsdError(
            f"{task_dir} does not exist",
            "hidden tests are looked for in conversations, so their text is needed",
            "name the dataset (--dataset), or show everything (--reveal)",
        )
    public: set[str] = set()
    lines: dict[str, set[str]] = {"tests.patch": set(), "feature.patch": set()}
    for feature in features:
        folder = task_dir / f"feature{feature}"
        public |= {_plain(x) for x in (folder / "feature.md").read_text().splitlines()}
        for name, found in lines.items():
            if (folder / name).is_file():
                found |= {_plain(x) for x in added_lines((folder / name).read_text())}
    tests, gold = ({x for x in found - public if len(x) >= SHORTEST} for found in lines.values())
    return Secrets(frozenset(tests), frozenset(gold))


def spans(text: str, secret: frozenset[str]) -> list[tuple[int, int]]:
    """Where text holds secret lines, as [start, end) in characters, in order."""
    if secret.isdisjoint(_plain(line) for line in _BREAK.split(text)):
        return []
    found: list[tuple[int, int]] = []
    run: list[tuple[int, int, int]] = []

    def close() -> None:
        if len(run) > 1 or (run and run[0][2] >= ALONE):
            found.append((run[0][0], run[-1][1]))
        run.clear()

    start = 0
    for end, following in [(m.start(), m.end()) for m in _BREAK.finditer(text)] + [(len(text), len(text))]:
        line = _plain(text[start:end])
        if line in secret:
            run.append((start, end, len(line)))
        elif line:
            close()
        start = following
    close()
    return found


def redacted(text: str, where: Sequence[tuple[int, int]]) -> str:
    """Text with each span replaced by a note of its length."""
    for start, end in reversed(where):
        text = f"{text[:start]}{note(end - start)}{text[end:]}"
    return text


def note(characters: int) -> str:
    """What stands in the place of text that was left out."""
    return f"[{characters} characters of a hidden test or an answer left out]"


def _plain(line: str) -> str:
    if "\\" in line:
        line = line.replace('\\"', '"').replace("\\\\", "\\").replace("\\t", "\t")
    return line.strip()
