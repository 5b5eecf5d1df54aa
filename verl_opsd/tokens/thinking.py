"""Reasoning of earlier turns taken out of a prompt: by ids where the policy wrote it, by text where a message is rendered.

A reply's reasoning is shown until a user message follows it, as the templates of reasoning models do. A peer's message is a user
message, so each one rewrites the history: the prompt goes on in a new branch, whose other ids are exactly the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CLOSE = "</think>"
#: What ends the part of a reply in which reasoning can stand.
CALL = "<tool_call>"


@dataclass(frozen=True)
class Thought:
    """A reply that holds reasoning: number of its message, its span in a branch's ids, and its ids without reasoning."""

    message: int
    start: int
    end: int
    kept: tuple[int, ...]

    def moved(self, by: int) -> Thought:
        """The same reply ``by`` ids further on."""
        return Thought(self.message, self.start + by, self.end + by, self.kept)


def reasoning_end(text: str) -> int:
    """Where a reply's reasoning ends, line breaks behind it included; 0 where there is none."""
    at = text.find(CLOSE)
    if at < 0 or CALL in text[:at]:
        return 0
    end = at + len(CLOSE)
    return end + len(text[end:]) - len(text[end:].lstrip("\n"))


def last_user(messages: Sequence[dict[str, Any]]) -> int:
    """Number of the last user message; -1 without one."""
    return max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)


def shown(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as they are rendered: assistant messages that a user message follows, without their reasoning."""
    last = last_user(messages)
    return [
        {**m, "content": m["content"][reasoning_end(m["content"]) :]} if m["role"] == "assistant" and i < last else m
        for i, m in enumerate(messages)
    ]


def cut(ids: list[int], thoughts: Sequence[Thought], last: int) -> tuple[list[int], list[Thought], list[tuple[int, int]]]:
    """Takes the reasoning of messages before ``last`` out.

    Returns:
        the new ids, the thoughts that are still in them, and for each cut (end in the old ids, ids that went) in order.
    """
    out: list[int] = []
    left: list[Thought] = []
    cuts: list[tuple[int, int]] = []
    position = 0
    for t in thoughts:
        if t.message < last:
            out += ids[position : t.start]
            out += t.kept
            position = t.end
            cuts.append((t.end, t.end - t.start - len(t.kept)))
        else:
            left.append(t.moved(len(out) - position))
    return out + ids[position:], left, cuts
