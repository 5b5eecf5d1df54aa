"""Accounts for every `send_message` in a command: each call is delivered or refused, none is lost in silence.

The harness finds these calls with regular expressions over the command string, and loses some of them: a heredoc call
next to a quoted one, a quoted body with escaped quotes, a call whose removal leaves a broken command. This module reads
the command on its own, and a command that the two readings disagree on is refused as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from cooperbench.agents.mini_swe_agent_v2.agents.default import _parse_send_messages, _strip_send_message

from verl_opsd.cooperbench.send_calls import NAME, read_calls


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
    occurrences, calls = read_calls(command)
    residue = _strip_send_message(command) if occurrences else command
    found = _parse_send_messages(command) if occurrences else []
    agree = calls is not None and sorted(map(_comparable, calls)) == sorted(map(_comparable, found))
    return Sends(occurrences, bool(occurrences) and not (agree and not NAME.search(residue)), residue)


def _comparable(call: tuple[str, str, bool]) -> tuple[str, str, bool]:
    recipient, body, wait = call
    return recipient, body.lstrip(), wait  # the harness drops blank lines that lead a body
