"""What a patch touches, in lines of the base tree, and whether two patches can be merged.

A hunk carries three lines of context, so a patch applies for certain only where the three lines around it are as they were. The rule
of this project: two sides' edits of one file keep at least three untouched lines between them. `git merge` itself conflicts where edits
touch and is clean from three lines on; in between it depends on the edits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from verl_opsd.errors import OpsdError

#: Untouched lines between two edits of one file that Git needs.
CONTEXT = 3
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_FILE = re.compile(r"(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)")
_COMMENT = re.compile(r"\s*(#|//|/\*|\*|--|;|<!--)")


@dataclass(frozen=True, order=True)
class Edit:
    """Lines ``first..last`` of the base file that are removed or replaced; an insertion behind line n is first = n + 1, last = n."""

    first: int
    last: int


def edits(patch: str) -> dict[str, list[Edit]]:
    """Edits of a unified diff by file, in base lines, context left out. A new file has one edit, an insertion at its start.

    Raises:
        OpsdError: a hunk that is shorter or longer than its header says.
    """
    out: dict[str, list[Edit]] = {}
    name, lines = "", iter(patch.removesuffix("\n").split("\n"))
    old = ""
    for line in lines:
        if line.startswith("--- ") and (match := _FILE.match(line)):
            old = match[1]
        elif line.startswith("+++ ") and (match := _FILE.match(line)):
            name = match[1] if match[1] != "/dev/null" else old
            out.setdefault(name, [])
        elif match := _HUNK.match(line):
            at, left = int(match[1]), int(match[2] if match[2] is not None else 1)
            at += left == 0  # an insertion behind line `at`
            begin: int | None = None
            added = int(re.search(r"\+\d+(?:,(\d+))?", line)[1] or 1)  # type: ignore[index]
            while left > 0 or added > 0:
                body = next(lines, None)
                if body is None or body[:1] not in ("", " ", "+", "-", "\\"):
                    raise OpsdError(
                        f"a patch of {name} that ends inside {match[0]!r}", "a hunk has the lines of its header", "repair it"
                    )
                if body[:1] in ("+", "-"):
                    begin = at if begin is None else begin
                elif body[:1] in ("", " ") and begin is not None:
                    out[name].append(Edit(begin, at - 1))
                    begin = None
                left -= body[:1] in ("", " ", "-")
                added -= body[:1] in ("", " ", "+")
                at += body[:1] in ("", " ", "-")
            if begin is not None:
                out[name].append(Edit(begin, at - 1))
    return out


def gap(a: Edit, b: Edit) -> int:
    """Untouched base lines between two edits; negative where they overlap."""
    first, second = sorted((a, b))
    return second.first - max(first.last, first.first - 1) - 1


def collisions(patch_a: str, patch_b: str) -> dict[str, list[tuple[Edit, Edit]]]:
    """By file both patches touch: pairs of edits with fewer than :data:`CONTEXT` untouched lines between them (none: separable)."""
    ours, theirs = edits(patch_a), edits(patch_b)
    return {
        file: [(a, b) for a in ours[file] for b in theirs[file] if gap(a, b) < CONTEXT]
        for file in sorted(ours.keys() & theirs.keys())
    }


def added_lines(patch: str) -> list[str]:
    """Lines that a patch adds, without the leading plus."""
    return [line[1:] for line in patch.split("\n") if line.startswith("+") and not line.startswith("+++ ")]


def is_test(path: str) -> bool:
    """Whether a path looks like a test's: a folder or file name with ``test`` or ``spec`` as a word."""
    return any(re.search(r"(^|[_.\-])(tests?|specs?)([_.\-]|$)|Tests?\.", part) for part in PurePosixPath(path).parts)


def made_real_edits(patch: str) -> bool:
    """Whether a patch changes source code: a line that is neither blank nor a comment, in a file that is no test."""
    name = ""
    for line in patch.split("\n"):
        if line.startswith(("--- ", "+++ ")) and (match := _FILE.match(line)):
            name = match[1] if match[1] != "/dev/null" else name
        elif line.startswith(("+", "-")) and not is_test(name) and line[1:].strip() and not _COMMENT.match(line[1:]):
            return True
    return False


def regions_hold(regions: Mapping[str, list[Edit]], patch: str, shared: set[str]) -> list[str]:
    """Edits of a patch in shared files that lie outside the side's regions, as text."""
    return [
        f"{file}:{e.first}-{e.last}"
        for file, found in edits(patch).items()
        if file in shared
        for e in found
        if not any(r.first <= e.first and e.last <= r.last for r in regions.get(file, []))
    ]
