"""Markers are those of the tokenizer's own chat template: other role names are read, frames that can't be said are refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer, template

from verl_opsd.errors import OpsdError
from verl_opsd.privilege import ChatMarkers, chat_blocks, teacher_view
from verl_opsd.verl_adapter.brief_checks import check_briefs

#: As most small ChatML models have it: every role a block of its own name, tools included.
OWN_BLOCKS = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def tokenizer_of(text: str | None, tags: bool = True) -> Any:
    tokenizer = copy.deepcopy(chat_tokenizer(tags))
    tokenizer.chat_template = text
    return tokenizer


def roles_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    ids = np.array(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False), np.int32)
    return [b.role for b in chat_blocks(ids, ChatMarkers.from_tokenizer(tokenizer))]


TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "<tool_response>\nquoted\n</tool_response>"},
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "t"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize("tags", [True, False])
def test_role_names_are_the_templates(tags: bool) -> None:
    """A brief at the end of the last user turn stands in the block that the template calls so."""
    renamed = template().replace("<|im_start|>user", "<|im_start|>human").replace("<|im_start|>assistant", "<|im_start|>bot")
    renamed = renamed.replace("'<|im_start|>' + m.role", "'<|im_start|>' + ('human' if m.role == 'user' else m.role)")
    tokenizer = tokenizer_of(renamed, tags)
    markers = ChatMarkers.from_tokenizer(tokenizer)
    assert [tokenizer.decode(list(m)) for m in (markers.system, markers.user, markers.assistant)] == ["system", "human", "bot"]
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    last = [b for b in chat_blocks(ids, markers) if b.role == "assistant"][-1]
    mask = (np.arange(len(ids)) > last.body).astype(np.int8) * (np.arange(len(ids)) <= last.close).astype(np.int8)
    brief = tokenizer.encode("SECRET", add_special_tokens=False)
    seen = teacher_view(ids, mask, brief, "last_user", markers, user_turn="message")
    assert tokenizer.decode(seen.ids.tolist()) == text.replace("human\nu<|im_end|>", "human\nuSECRET<|im_end|>").removesuffix(
        "\n"
    )
    assert ChatMarkers.from_tokenizer(chat_tokenizer(tags)) != markers


def test_tool_results_in_blocks_of_their_own_are_no_user_turns() -> None:
    tokenizer = tokenizer_of(OWN_BLOCKS)
    markers = ChatMarkers.from_tokenizer(tokenizer)
    assert markers.tool_response == () and roles_of(tokenizer, TALK) == [
        "system",
        "user",
        "assistant",
        "other",
        "user",
        "assistant",
    ]
    ids = np.array(tokenizer.apply_chat_template(TALK[:3], tokenize=True, return_dict=False), np.int32)
    reply = chat_blocks(ids, markers)[2]
    mask = (np.arange(len(ids)) == reply.body + 1).astype(np.int8)
    seen = {t: teacher_view(ids, mask, [5], "last_user", markers, user_turn=t).ids.tolist() for t in ("block", "message")}
    assert seen["block"] == seen["message"]  # a message that quotes the tag is a message


#: The frames of models in use, as their templates write them (shortened to what is rendered here).
OPEN_END = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}{% if (loop.last and
add_generation_prompt) or not loop.last %}{{ '<|im_end|>' + '\n'}}{% endif %}{% endfor %}{% if add_generation_prompt and
messages[-1]['role'] != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TRIMMED = """{%- for m in messages -%}
{%- set content = m.content | trim -%}
{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n<think>\n' }}{{ '\n</think>\n\n' + content }}
{%- for call in m.tool_calls or [] -%}{%- for name, value in call.function.arguments | items -%}{{ name + value }}{%- endfor -%}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"""
STRICT = """{%- for m in messages -%}
{%- if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool' -%}{{ raise_exception('no user here') }}{%- endif -%}
{%- if m.role == 'tool' -%}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


@pytest.mark.parametrize(
    ("text", "wrapped"), [(OPEN_END, False), (TRIMMED, True), (STRICT, True)], ids=["open", "trimmed", "strict"]
)
def test_other_ways_to_write_the_same_frames(text: str, wrapped: bool) -> None:
    """A last message left open, reasoning around replies, arguments as an object only, no user message behind a tool's result."""
    own, ours = ChatMarkers.from_tokenizer(tokenizer_of(text)), ChatMarkers.from_tokenizer(chat_tokenizer())
    assert own == (ours if wrapped else dataclasses.replace(ours, tool_response=()))


def test_another_wrapper_is_the_templates() -> None:
    tokenizer = tokenizer_of(template().replace("tool_response>", "result>"))
    markers = ChatMarkers.from_tokenizer(tokenizer)
    assert tokenizer.decode(list(markers.tool_response)).startswith("\n<result")
    assert roles_of(tokenizer, TALK) == ["system", "user", "assistant", "user", "user", "assistant"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: None, "is missing"),
        (lambda t: "{{ raise_exception('no system role') }}", "no system role"),
        (lambda t: t.replace("m.role + '\\n'", "m.role + '<|im_end|>\\n'"), "no block for a user"),
        (lambda t: t.replace("m.role + '\\n' + m.content", "m.role + ': ' + m.content"), "frames a user message"),
        (lambda t: t.replace("m.role + '\\n' + m.content", "m.role + '\\nAt 12:00. ' + m.content"), "frames a user message"),
        (lambda t: t.replace("+ m.content + '<|im_end|>", "+ m.content + ' (end)<|im_end|>"), "frames a user message"),
        (lambda t: t.replace("'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>", "'[INST]' + m.content + '[/INST]"), "no block for a user"),
        (lambda t: t.replace("'<|im_start|>' + m.role", "'<|im_start|>assistant'"), "read back as"),
        (lambda t: t.replace("'<|im_start|>system\\n' + text", "'<|im_start|>user\\n' + text"), "read back as"),
        (lambda t: t.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>ai\\n' }}"), "asks for a reply with"),
        (lambda t: OWN_BLOCKS.replace("m.role +", "('user' if m.role == 'tool' else m.role) +"), "tool's result in a user block"),
        (lambda t: t.replace("'<|im_start|>user'", "'<|im_start|>user_tool'"), "tool message that is read back as"),
    ],
    ids=["none", "raises", "closes early", "no line break", "words before", "words behind", "no control tokens", "user as assistant",
         "system as user", "other prefix", "unmarked results", "a name that begins as another"],
)  # fmt: skip
def test_frames_that_do_not_agree_are_refused(change: Any, named: str) -> None:
    text = change(template())
    assert text != template()
    with pytest.raises(OpsdError, match=named) as caught:
        ChatMarkers.from_tokenizer(tokenizer_of(text))
    assert "template" in caught.value.what or "tool's result" in caught.value.what


def test_a_launch_refuses_them(tmp_path: Path) -> None:
    from opsd_section import SECTION

    from verl_opsd.config import OpsdConfig
    from verl_opsd.models.tiny import make_tiny

    path = make_tiny(tmp_path / "model")
    file = path / "chat_template.jinja"
    file.write_text(file.read_text().replace("m.role + '\\n' + m.content", "m.role + ': ' + m.content"))
    opsd = OpsdConfig.parse(SECTION)
    for name in ("peer_spec", "none"):
        with pytest.raises(OpsdError, match="frames a user message"):
            check_briefs(dataclasses.replace(opsd, brief=dataclasses.replace(opsd.brief, name=name)), [], str(path))
