"""The format of brief files: a few header lines, then sections with a declared kind.

    title: handoff
    source: where the text comes from
    --- section protocol guidance
    Text for both agents.
    --- section role guidance first
    Text for the agent with the lower id.
    --- section role guidance second
    Text for the other one.

A section line names the section, its kind (``scope``, ``guidance``, ``tests``, ``gold``, ``workflow``; the last three are answers)
and the side that reads it; without a side both do. ``{{agent}}`` and ``{{peer}}`` stand for the two ids. Text is taken as it is:
no templates, no escapes, so the same file gives the same bytes everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, cast, get_args

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.briefs import Answer, Case, Section, Side
from verl_opsd.tokens.records import BriefKind

MARK = "--- section "
KINDS = ("scope", "guidance", *get_args(Answer))


@dataclass(frozen=True)
class FileSection:
    """A section as it stands in the file; ``side`` None: for both."""

    name: str
    kind: str
    side: Side | None
    text: str


@dataclass(frozen=True)
class BriefFile:
    """A parsed file. ``header`` holds its lines ``key: value``; a key that stands several times has several values."""

    header: tuple[tuple[str, str], ...]
    sections: tuple[FileSection, ...]

    def values(self, key: str) -> list[str]:
        """All values of a header key, in order."""
        return [v for k, v in self.header if k == key]

    def value(self, key: str) -> str:
        """The only value of a header key.

        Raises:
            OpsdError: the key is missing or stands several times.
        """
        found = self.values(key)
        if len(found) != 1:
            _refuse(f"{len(found)} header lines {key!r}", f"{key} stands once in the header")
        return found[0]

    def render(self, case: Case) -> list[Section]:
        """The sections that this agent's teacher reads."""
        out = []
        for s in self.sections:
            if s.side is None or s.side == case.side:
                answer = cast(Answer, s.kind) if s.kind in get_args(Answer) else None
                text = s.text.replace("{{agent}}", case.agent_id)
                text = text.replace("{{peer}}", case.peer) if "{{peer}}" in text else text
                out.append(Section(s.name, cast(BriefKind, "answer" if answer else s.kind), text, answer=answer))
        return out


def parse(text: str, where: str) -> BriefFile:
    """Reads a brief file.

    Raises:
        OpsdError: a header line that is no ``key: value``, a section line that is not of the form above, an empty section, the same
            section twice for one side, or no section.
    """
    header: list[tuple[str, str]] = []
    found: list[tuple[str, str, Side | None, list[str]]] = []
    for number, line in enumerate(text.split("\n"), 1):  # a form feed, say, is part of a line
        if line.startswith(MARK):
            name, kind, *side = line.removeprefix(MARK).split() + [""] * 2
            side = [s for s in side if s]
            if kind not in KINDS or len(side) > 1 or (side and side[0] not in get_args(Side)):
                _refuse(
                    f"{where}, line {number}: {line!r}", f"`{MARK}NAME KIND [first|second]` with KIND of {', '.join(KINDS)}"
                )
            found.append((name, kind, cast(Side, side[0]) if side else None, []))
        elif found:
            found[-1][3].append(line)
        elif line.strip():
            key, colon, value = line.partition(":")
            if not colon or not key.isidentifier() or not value.strip():
                _refuse(f"{where}, line {number}: {line!r}", "lines before the first section are `key: value`")
            header.append((key, value.strip()))
    sections = tuple(FileSection(n, k, side, "\n".join(lines).strip("\n")) for n, k, side, lines in found)
    if not sections or not all(s.text.strip() for s in sections):
        _refuse(f"{where}: {[s.name for s in sections if not s.text.strip()] or 'no section'}", "a section has text")
    for reader in get_args(Side):
        names = [s.name for s in sections if s.side in (None, reader)]
        if len(set(names)) != len(names):
            _refuse(f"{where}: sections {names} for side {reader}", "each section stands once for each side")
    return BriefFile(tuple(header), sections)


def _refuse(what: str, rule: str) -> NoReturn:
    raise OpsdError(what, rule, "correct the file; docs/briefs.md describes the format")
