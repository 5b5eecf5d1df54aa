"""Accounts for every `send_message` in a command: each call is delivered or refused, none is lost in silence.

The harness finds these calls with regular expressions over the command string, and loses some of them: a heredoc call
next to a quoted one, a quoted body with escaped quotes, a call whose removal leaves a broken command. This module reads
the command on its own, and a command that the two readings disagree on is refused as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cooperbench.agents.mini_swe_agent_v2.agents.default import _parse_send_messages, _strip_send_message

_NAME = re.compile(r"\bsend_message\b")
_HEAD = re.compile(r"send_message[ \t]+(?P<before>--wait[ \t]+)?(?P<to>\w+)(?P<after>[ \t]+--wait)?[ \t]+")
_HEREDOC = re.compile(r"<<(?P<quote>'?)(?P<tag>\w+)(?P=quote)[ \t]*\n")
_QUOTED = re.compile(r'"(?P<double>(?:[^"\\]|\\.)*)"|\'(?P<single>[^\']*)\'', re.DOTALL)
_END_OF_CALL = re.compile(r"[ \t]*(?:\Z|[\n;&|)]|[12&]?>)|[ \t]+#")


@dataclass(frozen=True)
class Sends:
    """The `send_message` calls of one command.

    Attributes:
        occurrences: calls that the command contains.
        rejected: whether the command must be refused as a whole, nothing sent and nothing run.
        residue: what remains for the shell once the calls are taken out.
    """

    occurrences: int
    rejected: bool
    residue: str


def account(command: str) -> Sends:
    """Reads a command; the shell's view of ``residue`` (is it valid syntax?) is the caller's to check."""
    occurrences, calls = _read(command)
    residue = _strip_send_message(command) if occurrences else command
    found = _parse_send_messages(command) if occurrences else []
    agree = calls is not None and sorted(map(_comparable, calls)) == sorted(map(_comparable, found))
    return Sends(occurrences, bool(occurrences) and not (agree and not _NAME.search(residue)), residue)


def _comparable(call: tuple[str, str, bool]) -> tuple[str, str, bool]:
    recipient, body, wait = call
    return recipient, body.lstrip(), wait  # the harness drops blank lines that lead a body


def _read(command: str) -> tuple[int, list[tuple[str, str, bool]] | None]:
    """Number of calls, and (recipient, body, wait) of each; None when one of them can't be read."""
    calls: list[tuple[str, str, bool]] = []
    occurrences, position, readable = 0, 0, True
    while name := _NAME.search(command, position):
        occurrences += 1
        call = _read_call(command, name.start())
        if call is None:
            readable, position = False, name.end()
        else:
            calls.append(call[0])
            position = call[1]
    return occurrences, calls if readable else None


def _read_call(command: str, start: int) -> tuple[tuple[str, str, bool], int] | None:
    head = _HEAD.match(command, start)
    if not head:
        return None
    wait = bool(head["before"] or head["after"])
    heredoc = _HEREDOC.match(command, head.end())
    if heredoc:
        end = re.compile(rf"\n{heredoc['tag']}(?=\n|\Z)").search(command, heredoc.end())
        return end and ((head["to"], command[heredoc.end() : end.start()], wait), end.end())
    quoted = _QUOTED.match(command, head.end())
    if not quoted or not _END_OF_CALL.match(command, quoted.end()):
        return None
    body = quoted["double"] if quoted["double"] is not None else quoted["single"]
    return (head["to"], body, wait), quoted.end()
