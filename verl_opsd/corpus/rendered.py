"""Rows from chat messages that were never recorded: the one place where text becomes training ids, by a stated rendering step.

A line of a JSONL file is ``{"messages": [...], "tools": [...] or absent}`` in OpenAI's form, with no other key: what a template does not
write (``weight``, ``reasoning_content``) would be lost silently. Contexts are rendered by the chat builder, replies by the chat template;
loss is on every assistant message, turn-end token included. Such rows are marked ``rendered``, have no contract and no
log-probabilities, and pass the gates of a corpus like others; ``rendered_again`` compares their text with the template's rendering of
the whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError

from verl_opsd.corpus.records import CorpusRow
from verl_opsd.corpus.rerender import Rendering
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.boundary import canonical
from verl_opsd.tokens.classes import token_classes

#: Version of this step; stamped on every corpus that has such rows.
VERSION = "render-1"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Function(_Strict):
    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]]


class _Call(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Described(BaseModel):
    name: str


class _Tool(_Strict):
    type: Literal["function"]
    function: _Described


class _Line(_Strict):
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None


def rows_of_file(
    path: Path, rendering: Rendering, encode: Callable[[str], list[int]], whole: Callable[[Any, Any], str]
) -> list[CorpusRow]:
    """One row a line.

    Args:
        encode: ids of a text, special tokens read as such.
        whole: the template's text of a conversation with tools.

    Raises:
        OpsdError: a line of another form, without an assistant message after the first, whose text holds the turn's end, that the
            template refuses, or whose ids decode to another text than the whole conversation renders to.
    """
    try:
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")  # a text may hold other line breaks (U+2028)
    except OSError as error:
        raise OpsdError(f"{path}: {error.strerror}", "a bucket is a JSONL file", "correct the path") from error
    if lines == [b""]:
        raise OpsdError(f"{path} is empty", "a bucket has rows", "name another file")
    rows = []
    for number, line in enumerate(lines):
        where = f"{path}, line {number + 1}"
        try:
            _Line.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the line"
            form = 'a line is {"messages": [{"role": ..., "content": ..., "tool_calls": [...]}, ...], "tools": [...]}'
            raise OpsdError(f"{where}: {place}: {first['msg']}", form, "correct the file") from error
        entry = json.loads(line)
        messages, tools = [canonical(m) for m in entry["messages"]], entry.get("tools")
        if held := next((m for m in messages if rendering.turn_end in json.dumps(m, ensure_ascii=False)), None):
            raise OpsdError(
                f"{where}: a message of role {held['role']} holds {rendering.turn_end}",
                "a message's text doesn't end its turn: what follows would be read as another message",
                "leave the line out, or write the marker otherwise",
            )
        try:
            rows.append(_row(path.stem, f"{number:06d}", where, messages, tools, rendering, encode, whole))
        except TemplateError as error:
            raise OpsdError(f"{where}: {error}", "the chat template writes the conversation", "leave the line out") from error
    return rows


def _row(
    source: str,
    name: str,
    where: str,
    messages: list[dict[str, Any]],
    tools: Any,
    rendering: Rendering,
    encode: Callable[[str], list[int]],
    whole: Callable[[Any, Any], str],
) -> CorpusRow:
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not places or places[0] == 0:
        raise OpsdError(
            f"{where}: roles {[m['role'] for m in messages]}", "an assistant answers a message", "leave the line out"
        )
    ids: list[int] = []
    mask: list[int] = []
    turns: list[int] = []
    classes: list[int] = []
    for turn, i in enumerate(places):
        last = places[turn - 1] + 1 if turn else 0
        new = (
            rendering.builder.extend(messages[:last], messages[:i], ids, tools)
            if turn
            else rendering.builder.initial(messages[:i], tools)
        )
        reply = encode(rendering.reply(messages[i]))
        ids += [*new, *reply]
        mask += [0] * len(new) + [1] * len(reply)
        turns += [-1] * len(new) + [turn] * len(reply)
        classes += [-1] * len(new) + token_classes(reply, rendering.decode).tolist()
    text, wanted = rendering.decode(ids), whole(messages[: places[-1] + 1], tools).rstrip("\n")
    if text != wanted:
        at = next((k for k, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted)))
        raise OpsdError(
            f"{where}: message by message {text[max(0, at - 20) : at + 20]!r}, whole {wanted[max(0, at - 20) : at + 20]!r} (character {at})",
            "gate rendered_again: a conversation has one rendering",
            "use an append-only chat template, or leave the line out",
        )
    return CorpusRow(
        source=source,
        episode_id=name,
        agent_id="assistant",
        branch=0,
        origin="rendered",
        repo="",
        task_id=0,
        feature_id=0,
        passed=False,
        pair_passed=False,
        actor_brief_kind="none",
        contract_hash="",
        model_version=-1,
        input_ids=np.asarray(ids, np.int32),
        loss_mask=np.asarray(mask, np.int8),
        turn_index=np.asarray(turns, np.int32),
        token_class=np.asarray(classes, np.int8),
        logprobs=np.zeros(len(ids), np.float32),
    ).hashed()
