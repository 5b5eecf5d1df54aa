"""Which ids delimit the messages of a conversation, read off the tokenizer's own chat template.

A brief goes before the token that closes a system or user message, so the frames of both are what the template writes around a message
of that role, not what a family of templates usually writes: messages that hold one known word are rendered, and the text around each
word is the frame. What is read is then held against the rendered ids themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.windows import Block
from verl_opsd.tokens.records import Ids

START, END = "<|im_start|>", "<|im_end|>"
#: A word of each message that is rendered; none holds another.
_WORDS = {"system": "Alfa", "user": "Bravo", "assistant": "Charlie", "tool": "Delta"}
#: Forms in which templates take a call's arguments: an object, or its JSON.
_ARGUMENTS: tuple[Any, ...] = ({"command": "ls"}, '{"command": "ls"}')
_RULE = "a brief is placed by the frames of the chat template: <|im_start|>ROLE, a line break, the message, <|im_end|>"
_WAY_OUT = (
    "use a tokenizer and template of the ChatML family (Qwen, SmolLM2), or set the template to verl_opsd/models/chatml.jinja"
)


@dataclass(frozen=True)
class ChatMarkers:
    """Ids that delimit ChatML blocks ``<|im_start|>role\\n ... <|im_end|>``.

    Attributes:
        im_start, im_end: the two control tokens.
        system, user, assistant: ids of the role names that the template writes, without the line break.
        tool_response: ids that follow the user role's name where tool results are wrapped in user blocks: line break, <tool_response>;
            empty where the template gives them blocks of their own.
    """

    im_start: int
    im_end: int
    system: tuple[int, ...]
    user: tuple[int, ...]
    assistant: tuple[int, ...]
    tool_response: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatMarkers:
        """Reads the markers off a Hugging Face tokenizer and its chat template.

        Raises:
            OpsdError: the control tokens are missing or not one token each, there is no template, it refuses a plain exchange, or its
                frames are others than :class:`ChatMarkers` can say.
        """
        start, end, line = (_encode(tokenizer, text) for text in (START, END, "\n"))
        if len(start) != 1 or len(end) != 1:
            raise OpsdError(
                f"a tokenizer that encodes {START} as {start} and {END} as {end}",
                "briefs are placed by ChatML's control tokens, one id each",
                "use a tokenizer of the ChatML family (Qwen, SmolLM2), or add the two tokens and train with them",
            )
        plain, asked, tools = _render(tokenizer)
        names = {role: _role(plain, role) for role in ("system", "user", "assistant")}
        prompt = asked.rpartition(START)[2]
        if not prompt.startswith(f"{names['assistant']}\n"):
            _refuse(f"asks for a reply with {START + prompt!r}, and writes one as {START + names['assistant']!r}")

        def role_ids(name: str) -> tuple[int, ...]:
            ids = _encode(tokenizer, f"{START}{name}\n")
            if ids[:1] != start or ids[-len(line) :] != line:
                raise OpsdError(
                    f"a tokenizer that encodes '{START}{name}\\n' as {ids}",
                    "a block's header is the control token, the role's name and a line break",
                    "use a tokenizer of the ChatML family (Qwen, SmolLM2)",
                )
            return tuple(ids[1 : -len(line)])

        user = role_ids(names["user"])
        result = _result_ids(tokenizer, tools, names["user"], len(user)) if tools is not None else ()
        found = cls(start[0], end[0], role_ids(names["system"]), user, role_ids(names["assistant"]), result)
        for text in (plain, tools):
            if text is not None:
                _check(tokenizer, text, found)
        return found


def chat_blocks(ids: Ids, markers: ChatMarkers) -> list[Block]:
    """The blocks of a token sequence, in order. A <|im_start|> inside an open block is part of its text."""
    names = {"system": markers.system, "user": markers.user, "assistant": markers.assistant}
    ends = np.flatnonzero(ids == markers.im_end)
    blocks: list[Block] = []
    after = 0
    for start in np.flatnonzero(ids == markers.im_start).tolist():
        if start < after:
            continue
        k = int(np.searchsorted(ends, start))
        close = int(ends[k]) if k < len(ends) else len(ids)
        role, body = "other", start + 1
        for name, name_ids in names.items():
            if tuple(ids[start + 1 : start + 1 + len(name_ids)].tolist()) == name_ids:
                role, body = name, start + 1 + len(name_ids)
        blocks.append(Block(role, start, body, close))
        after = close + 1
    return blocks


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _render(tokenizer: Any) -> tuple[str, str, str | None]:
    """A plain exchange; the same up to its reply, with the generation prefix; one with a tool's result, None where the template has none."""
    system, user, reply = ({"role": role, "content": _WORDS[role]} for role in ("system", "user", "assistant"))
    after = {"role": "user", "content": "Echo"}  # some templates leave the last message open

    def render(messages: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))

    if not getattr(tokenizer, "chat_template", None):
        _refuse("is missing")
    try:
        plain, asked = render([system, user, reply, after]), render([system, user], prompt=True)
    except (TemplateError, ValueError, TypeError) as e:
        _refuse(f"renders no system message, user message and reply: {str(e).splitlines()[0][:160]}")
    for arguments, rest in itertools.product(_ARGUMENTS, ([after], [])):
        call = {"id": "call00000", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "call00000", "content": _WORDS["tool"]}
        try:
            with_tool = render([system, user, reply | {"tool_calls": [call]}, result, *rest])
        except (TemplateError, ValueError, TypeError):
            continue
        return plain, asked, with_tool if _WORDS["tool"] in with_tool else None
    return plain, asked, None


def _around(text: str, role: str) -> tuple[str, str]:
    """What stands before a role's word in its block, and behind it up to the block's end.

    Raises:
        OpsdError: the word does not stand once, in a block that closes.
    """
    before, word, after = text.partition(_WORDS[role])
    opened, closed = before.rfind(START), after.find(END)
    if not word or word in after or opened < 0 or closed < 0 or END in before[opened:] or START in after[:closed]:
        _refuse(f"writes no block for a {role} message: {before[-60:] + word + after[:40]!r}")
    return before[opened + len(START) :], after[:closed]


def _role(text: str, role: str) -> str:
    """The name that the template gives a role."""
    head, tail = _around(text, role)
    name, line, rest = head.partition("\n")
    exact = (not rest and not tail) or role == "assistant"  # reasoning may stand around a reply
    if not line or not name or not exact or "<" in name:
        _refuse(f"frames a {role} message as {START + head + '...' + tail + END!r}")
    return name


def _result_ids(tokenizer: Any, text: str, user: str, skip: int) -> tuple[int, ...]:
    """See ``ChatMarkers.tool_response``. Without a token of its own, a tag's end may merge with what follows: the ids that all
    continuations have in common."""
    head, _ = _around(text, "tool")
    name, _, wrapper = head.partition("\n")
    if name != user:
        return ()
    tag = wrapper.strip()
    variants = [_encode(tokenizer, f"{START}{user}\n{tag}{after}") for after in ("\nA", "\n{", "\n\n", "\n ", "A")]
    common = 0
    while all(len(v) > common and v[common] == variants[0][common] for v in variants):
        common += 1
    found = variants[0][1 + skip : common]
    seen = tokenizer.decode(found).strip()
    if not tag or len(seen) < len(tag.rstrip(">")) or not tag.startswith(seen):
        raise OpsdError(
            f"a tool's result in a user block that begins with {tag!r}, encoded as {found} and more, by what follows",
            "tool results are told apart from messages by the ids at their start",
            "have the template mark them as <tool_response>, and add that to the tokenizer as one token",
        )
    return tuple(found)


def _check(tokenizer: Any, text: str, markers: ChatMarkers) -> None:
    """The blocks found in rendered ids are the template's messages.

    Raises:
        OpsdError: a message is found in no block, or in one of another role.
    """
    ids = np.array(_encode(tokenizer, text), np.int32)
    bodies = [(b, tokenizer.decode(ids[b.body : b.close].tolist())) for b in chat_blocks(ids, markers)]
    for role, word in _WORDS.items():
        if word not in text:
            continue
        want = role if role != "tool" else "user" if markers.tool_response else "other"
        holders = [(b.role, body) for b, body in bodies if word in body]
        if [r for r, _ in holders] != [want] or (want != "other" and not holders[0][1].startswith("\n")):
            _refuse(f"writes a {role} message that is read back as {[r for r, _ in holders] or 'none'}: {text[:200]!r}")


def _refuse(what: str) -> NoReturn:
    raise OpsdError(f"the chat template {what}", _RULE, _WAY_OUT)
