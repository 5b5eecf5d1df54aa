"""Reads the `send_message` calls of a shell command; needs nothing of the harness."""

from __future__ import annotations

import re

NAME = re.compile(r"\bsend_message\b")
_HEAD = re.compile(r"send_message[ \t]+(?P<before>--wait[ \t]+)?(?P<to>\w+)(?P<after>[ \t]+--wait)?[ \t]+")
_HEREDOC = re.compile(r"<<(?P<quote>'?)(?P<tag>\w+)(?P=quote)[ \t]*\n")
_QUOTED = re.compile(r'"(?P<double>(?:[^"\\]|\\.)*)"|\'(?P<single>[^\']*)\'', re.DOTALL)
#: What may hide a quote, in order: an escape, a string, a comment, a here-document; a quote that none of these ends is open.
_SHELL = re.compile(
    r"\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?<!\S)#[^\n]*|<<-?[ \t]*(['\"]?)(?P<tag>\w+)\1[^\n]*\n|(?P<open>['\"])", re.DOTALL
)
_END_OF_CALL = re.compile(r"[ \t]*(?:\Z|[\n;&|)]|[12&]?>)|[ \t]+#")


def read_calls(command: str) -> tuple[int, list[tuple[str, str, bool]] | None]:
    """Number of calls, and (recipient, body, wait) of each; None when one of them can't be read."""
    calls: list[tuple[str, str, bool]] = []
    occurrences, position, readable = 0, 0, True
    while name := NAME.search(command, position):
        occurrences += 1
        call = None if _quotes_are_open(command[position : name.start()]) else _read_call(command, name.start())
        if call is None:
            readable, position = False, name.end()
        else:
            calls.append(call[0])
            position = call[1]
    return occurrences, calls if readable else None


def _quotes_are_open(text: str) -> bool:
    """Whether what follows ``text`` is still inside a string or a here-document that began in it."""
    position = 0
    while part := _SHELL.search(text, position):
        if part["open"]:
            return True
        if part["tag"]:
            end = re.compile(rf"^\t*{part['tag']}$", re.MULTILINE).search(text, part.end())
            if end is None:
                return True
            position = end.end()
        else:
            position = part.end()
    return False


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
