"""An agent's whole history, where the harness has compacted it: its segments overlap by the turns that compaction kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids of an assistant message's tool calls."""
    return tuple(str(c.get("id")) for c in message.get("tool_calls") or ())


def join_segments(segments: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of all solver segments in order, each once.

    A later segment begins with the system and the task message, a summary and the turns that were kept; what precedes its first new
    turn is dropped. Turns are known by their tool calls' ids.
    """
    out: list[dict[str, Any]] = []
    seen: set[tuple[str, ...]] = set()
    for segment in segments:
        if segment.get("kind") != "solver":
            continue
        messages = [dict(m) for m in segment["messages"]]
        start = 0
        if out:
            kept = [i for i, m in enumerate(messages) if call_ids(m) in seen and call_ids(m)]
            summaries = [i for i, m in enumerate(messages) if (m.get("extra") or {}).get("summary")]
            start = max([*kept, *summaries, 1]) + 1
            answered = {m.get("tool_call_id") for m in out if m.get("role") == "tool"}
            while (
                start < len(messages)
                and messages[start].get("role") == "tool"
                and messages[start].get("tool_call_id") in answered
            ):
                start += 1
        out += messages[start:]
        seen |= {call_ids(m) for m in messages if call_ids(m)}
    return out
