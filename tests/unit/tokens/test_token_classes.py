"""Token classes, over characters, over pieces that cut words and characters, and over a real byte-level tokenizer."""

from __future__ import annotations

import json

import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.tokens import TOKEN_CLASSES, token_classes
from verl_opsd.tokens.classes import text_classes, token_offsets


def by_class(text: str) -> dict[str, str]:
    codes = text_classes(text)
    assert len(codes) == len(text)
    joined = {name: "".join(c for c, k in zip(text, codes, strict=True) if TOKEN_CLASSES[k] == name) for name in TOKEN_CLASSES}
    return {name: part for name, part in joined.items() if part}


def call(command: str) -> str:
    arguments = json.dumps({"command": command})
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def test_think_command_other():
    text = f"<think>\nhm\n</think>\n\nNow.\n{call('ls -l')}<|im_end|>"
    assert by_class(text) == {
        "think": "<think>\nhm\n</think>",
        "other": "\n\nNow.\n<|im_end|>",
        "command": call("ls -l"),
    }


@pytest.mark.parametrize("quoted", ["<<'MSG'", "<<MSG", '<<"MSG"', "<< 'MSG'", "<<-'MSG'"])
def test_heredoc_message_and_code(quoted):
    command = f"send_message agent2 {quoted}\nI take \"a.py\" <ok>\nMSG\ncat > b.py <<'EOF'\nx = 1 << 2\ny = 'MSG'\nEOF\nls"
    found = by_class(call(command))
    assert found["message"] == json.dumps('I take "a.py" <ok>')[1:-1]
    assert found["code"] == json.dumps("x = 1 << 2\ny = 'MSG'")[1:-1]
    assert found["command"].endswith('ls"}}\n</tool_call>')
    assert set(found) == {"message", "code", "command"}


@pytest.mark.parametrize("wait", ["", "--wait "])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_quoted_message(wait, quote):
    found = by_class(call(f"send_message {wait}agent-2 {quote}hello there{quote} && ls"))
    assert found["message"] == "hello there"


def test_send_message_tool_and_plain_text_arguments():
    text = '<tool_call>\n{"name": "send_message", "arguments": {"content": "hi"}}\n</tool_call>'
    assert by_class(text)["command"] == "<tool_call></tool_call>"
    xml = "<tool_call>\n<function=bash>\n<parameter=command>\nsend_message a <<M\nhi\nM\n</parameter></tool_call>"
    assert by_class(xml)["message"] == "hi"


def test_unfinished_spans_and_calls_in_thought():
    assert by_class("<think>never ends <tool_call>x</tool_call>") == {"think": "<think>never ends <tool_call>x</tool_call>"}
    assert by_class("thought opened by the prompt</think>done") == {
        "think": "thought opened by the prompt</think>",
        "other": "done",
    }
    assert by_class('a<tool_call>\n{"name": "bash", "arg') == {
        "other": "a",
        "command": '<tool_call>\n{"name": "bash", "arg',
    }
    cut = json.dumps({"command": "cat > a <<'E'\nx = 1\ny"})[:-2]
    assert by_class(f"<tool_call>{cut}")["code"] == r"x = 1\ny"


def test_here_string_and_shift_are_no_heredocs():
    assert set(by_class(call('grep a <<<"text\nMSG" && echo $((1 << 2)) $((x << y))\nls'))) == {"command"}


def test_no_ids():
    assert token_classes([], lambda ids: "").tolist() == []


@given(st.text(st.sampled_from("ab é漢😀\n<>"), min_size=1, max_size=40))
def test_byte_tokens_start_at_their_character(text):
    """With one token a byte, each byte starts at the character that it belongs to."""
    data = list(text.encode())
    found, starts = token_offsets(data, lambda ids: bytes(ids).decode(errors="replace"))
    assert found == text
    assert starts == [i for i, c in enumerate(text) for _ in c.encode()]


def test_broken_bytes_do_not_swallow_what_follows():
    data = [0xFF, *b"ab", 0xE6, 0xBC, *b"<think>x"]
    text, starts = token_offsets(data, lambda ids: bytes(ids).decode(errors="replace"))
    assert text.endswith("<think>x") and len(starts) == len(data)
    assert text[starts[-1]] == "x"


def test_real_tokenizer_with_and_without_tag_tokens():
    text = "<think>\nplan é😀\n</think>\n\nOk.\n" + call("send_message agent2 <<M\nhéllo 😀\nM") + "<|im_end|>"
    for tags in (True, False):
        tokenizer = chat_tokenizer(tags)
        ids = tokenizer.encode(text, add_special_tokens=False)
        classes = token_classes(ids, tokenizer.decode)
        assert len(classes) == len(ids)
        for name, must in (
            ("think", "plan é😀"),
            ("message", json.dumps("héllo 😀")[1:-1]),
            ("command", '"name": "bash"'),
        ):
            part = tokenizer.decode([i for i, c in zip(ids, classes.tolist(), strict=True) if TOKEN_CLASSES[c] == name])
            assert must in part
        assert TOKEN_CLASSES[classes[-1]] == "other"  # the turn end
