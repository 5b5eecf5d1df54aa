"""Classes of reply tokens: think, message, command, code or other, from the reply's text by position.

    think     <think> ... </think>, tags included; also everything before a </think> that the generation prompt opened
    command   <tool_call> ... </tool_call>, tags included, outside think
    message   inside a command: a call of a send_message tool, and the heredoc or quoted text of a send_message in a
              shell command
    code      inside a command: the body of any other heredoc (files written, scripts run)
    other     the rest: prose, the turn-end token

Telemetry and class weights use the classes; no id is changed by them. Shell is matched by pattern, not parsed: a
heredoc inside a quoted string counts as a heredoc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from verl_opsd.tokens.records import TOKEN_CLASSES

CODE = {name: code for code, name in enumerate(TOKEN_CLASSES)}
#: A UTF-8 character has at most four bytes, so at most four byte-level tokens.
MAX_CHARACTER_TOKENS = 4

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_SEND_TOOL = re.compile(r"\"name\"\s*:\s*\"send_message\"|<function=send_message>")
# Arguments are JSON text, where a line break is the two characters \n, or plain text.
_BREAK = r"(?:(?<!\\)\\n|\n)"
_HEREDOC = re.compile(
    rf"(?<!<)<<-?[ \t]*(?:\\?[\"'])?(?P<tag>[A-Za-z_]\w*)(?:\\?[\"'])?(?P<rest>(?:(?!{_BREAK}).)*){_BREAK}"
    rf"(?P<body>.*?)(?:(?P<stop>{_BREAK}[ \t]*(?P=tag)\b)|\Z)",
    re.DOTALL,
)
_SEND_QUOTED = re.compile(r"\bsend_message(?:\s+--\w+)*\s+[\w-]+\s+(?P<quote>\\?\"|')(?P<body>.*?)(?P=quote)", re.DOTALL)


def token_classes(ids: Sequence[int], decode: Callable[[list[int]], str]) -> NDArray[np.int8]:
    """Class code (index into ``TOKEN_CLASSES``) of each reply id; int8[len(ids)].

    Args:
        ids: the ids of one reply.
        decode: text of ids, special tokens kept, e.g. ``tokenizer.decode``.
    """
    text, starts = token_offsets(ids, decode)
    spans = text_classes(text)
    classes = np.full(len(ids), CODE["other"], np.int8)
    for i, start in enumerate(starts):
        if start < len(text):
            classes[i] = spans[start]
    return classes


def token_offsets(ids: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[str, list[int]]:
    """The reply's text and the character at which each token starts.

    Tokens are decoded one by one; bytes that are no whole character yet wait for their successors, and all tokens of
    such a character start at it. The work is linear in the ids.
    """
    ids = [int(i) for i in ids]
    pieces: list[str] = []
    starts: list[int] = []
    length, first = 0, 0
    for i in range(len(ids)):
        starts.append(length)
        piece = decode(ids[first : i + 1])
        waits = piece.endswith("\ufffd") and i + 1 - first < MAX_CHARACTER_TOKENS
        if not waits or i + 1 == len(ids):
            pieces.append(piece)
            length += len(piece)
            first = i + 1
    return "".join(pieces), starts


def text_classes(text: str) -> NDArray[np.int8]:
    """Class code of each character of a reply's text; int8[len(text)]."""
    classes = np.full(len(text), CODE["other"], np.int8)
    opening, closing = text.find("<think>"), text.find("</think>")
    begin = 0
    if closing >= 0 and not 0 <= opening < closing:
        begin = closing + len("</think>")
        classes[:begin] = CODE["think"]
    while begin < len(text):
        think, call = _THINK.search(text, begin), _CALL.search(text, begin)
        if think and (not call or think.start() < call.start()):
            classes[think.start() : think.end()] = CODE["think"]
            begin = think.end()
        elif call:
            _classify_call(classes, text, call.start(), call.end())
            begin = call.end()
        else:
            break
    return classes


def _classify_call(classes: NDArray[np.int8], text: str, start: int, end: int) -> None:
    classes[start:end] = CODE["command"]
    whole = text.endswith("</tool_call>", start, end)
    end -= len("</tool_call>") if whole else 0
    if _SEND_TOOL.search(text, start, end):
        classes[start + len("<tool_call>") : end] = CODE["message"]
        return
    for match in _SEND_QUOTED.finditer(text, start, end):
        classes[match.start("body") : match.end("body")] = CODE["message"]
    while heredoc := _HEREDOC.search(text, start, end):
        if whole and heredoc["stop"] is None:  # no terminator in a whole command: a shift, not a heredoc
            start = heredoc.start() + 2
            continue
        line = re.split(_BREAK, text[start : heredoc.start()])[-1] + heredoc["rest"]
        kind = "message" if re.search(r"\bsend_message\b", line) else "code"
        classes[heredoc.start("body") : heredoc.end("body")] = CODE[kind]
        start = heredoc.end()
