"""The byte-exact gate: a conversation rendered again gives the recorded ids.

What the policy read is compared id by id; what it wrote by its text, because one text has many encodings and the sampled one is the
truth. Rendering is a check, never a source of training ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.classes import token_offsets
from verl_opsd.tokens.gateway import TokenBuilder, Tools
from verl_opsd.tokens.records import Ids, Trajectory, TurnRecord, common_prefix

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendering:
    """How messages become ids and text.

    Attributes:
        builder: renders a prompt, and what follows a reply.
        reply: text of an assistant message as the chat template writes it, turn end included, line break behind it not.
        decode: text of ids, special tokens kept.
        tools: tool definitions of every call.
        turn_end: text of the token that ends a turn.
        tokenizer: SHA-256 of the tokenizer (``teachers.cache.tokenizer_hash``).
        hinted: the builder of prompts that hold a hint of these ids.
        strip: a trajectory as if its actor had not read that hint.
    """

    builder: TokenBuilder
    reply: Callable[[dict[str, Any]], str]
    decode: Callable[[list[int]], str]
    tools: Tools
    turn_end: str
    tokenizer: str
    hinted: Callable[[list[int]], TokenBuilder]
    strip: Callable[[Trajectory, list[int]], Trajectory]


@dataclass(frozen=True)
class Mismatch:
    """The first difference of a turn.

    Attributes:
        part: ``context`` (the prompt), ``reply``, or ``missing``: the stored messages don't hold the turn.
        position: of the first differing token in the branch.
        recorded, rendered: text of that token on either side, or of what stands there; empty where a side has ended.
    """

    turn: int
    part: Literal["context", "reply", "missing"]
    position: int
    recorded: str
    rendered: str

    def __str__(self) -> str:
        if self.part == "missing":
            return f"turn {self.turn}: the stored messages don't hold it"
        return f"turn {self.turn}, {self.part}, token {self.position}: recorded {self.recorded!r}, rendered again {self.rendered!r}"


def rerender(
    turns: Sequence[TurnRecord], messages: Sequence[Message], rendering: Rendering, hint: Sequence[int] = ()
) -> dict[int, Mismatch | None]:
    """Renders every policy turn of one agent again.

    Args:
        turns: all turns of the agent, in order.
        messages: the agent's stored history; an assistant message's ``extra.turn`` names its turn.
        hint: ids of the brief that stood in the agent's own prompts.

    Returns:
        For each policy turn its first difference, or None. Behind a turn that differs every later one has its difference: it is compared
        behind the ids that were recorded.
    """
    history = [m for m in messages if m.get("role") != "exit"]  # the harness' own mark, which no prompt holds
    place = {
        m["extra"]["turn"]: i for i, m in enumerate(history) if m.get("role") == "assistant" and "turn" in m.get("extra", {})
    }
    plain = [_plain(m) for m in history]
    ids = {t.branch: t.input_ids for t in build_trajectories(turns)}
    found: dict[int, Mismatch | None] = {}
    previous: TurnRecord | None = None
    builder = rendering.hinted(list(hint)) if hint else rendering.builder
    for turn in turns:
        if turn.kind != "policy":
            continue
        if turn.turn not in place:
            found[turn.turn] = Mismatch(turn.turn, "missing", turn.prompt_len, "", "")
            continue
        here = place[turn.turn]
        if previous is None:
            prompt = list(builder.initial(plain[:here], rendering.tools))
        else:
            before = ids[previous.branch][: previous.end].tolist()
            known = plain[: place[previous.turn] + 1]
            prompt = before + list(builder.extend(known, plain[:here], before, rendering.tools))
        recorded = ids[turn.branch]
        found[turn.turn] = (
            (found[previous.turn] if previous else None)
            or _context(turn, recorded[: turn.prompt_len], prompt, rendering)
            or _reply(turn, recorded[turn.prompt_len : turn.end], plain[here], rendering)
        )
        previous = turn
    return found


def _plain(message: Message) -> dict[str, Any]:
    """The parts of a message that a prompt can hold, as the gateway takes them."""
    rest = {k: v for k, v in message.items() if v is not None and k != "extra" and (k != "tool_calls" or v)}
    return {**rest, "content": message.get("content") or ""}


def _context(turn: TurnRecord, recorded: Ids, rendered: list[int], rendering: Rendering) -> Mismatch | None:
    a, b = recorded, np.asarray(rendered, np.int32)
    at = common_prefix(a, b)
    if at == len(a) == len(b):
        return None
    text = [rendering.decode(side[at : at + 1].tolist()) if at < len(side) else "" for side in (a, b)]
    return Mismatch(turn.turn, "context", at, text[0], text[1])


def _reply(turn: TurnRecord, reply: Ids, message: dict[str, Any], rendering: Rendering) -> Mismatch | None:
    recorded, starts = token_offsets(reply.tolist(), rendering.decode)
    rendered = rendering.reply(message)
    if not recorded.endswith(rendering.turn_end):  # a reply that was cut off
        rendered = rendered.removesuffix(rendering.turn_end)
    if recorded == rendered:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(recorded, rendered, strict=False)) if a != b), min(len(recorded), len(rendered))
    )
    token = max((i for i, start in enumerate(starts) if start <= at), default=0)
    start = starts[token]
    end = starts[token + 1] if token + 1 < len(starts) else len(recorded)
    return Mismatch(turn.turn, "reply", turn.prompt_len + token, recorded[start:end], rendered[start:end])
