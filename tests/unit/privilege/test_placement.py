"""Placement of briefs: golden examples in tiny ids, refusals, and properties over random conversations."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_chat import ASSISTANT, END, LINE, MARKERS, RESULT, START, SYSTEM, USER, random_conversation

from verl_opsd.errors import OpsdError
from verl_opsd.privilege import ChatMarkers, chat_blocks, peer_spec, splice, teacher_view
from verl_opsd.tokens import build_row, build_trajectories, loss_positions

BRIEF = [900, 901]
# Written by hand: system 10, user 11, reply 21 22, tool result 30, reply 23, peer's message 31, reply 24.
IDS = np.array(
    [
        *(START, SYSTEM, LINE, 10, END, LINE),  # 0..5
        *(START, USER, LINE, 11, END, LINE),  # 6..11
        *(START, ASSISTANT, LINE, 21, 22, END, LINE),  # 12..18, scored 15 16 17
        *(START, USER, LINE, RESULT, 30, END, LINE),  # 19..25
        *(START, ASSISTANT, LINE, 23, END, LINE),  # 26..31, scored 29 30
        *(START, USER, LINE, 31, END, LINE),  # 32..37
        *(START, ASSISTANT, LINE, 24),  # 38..41, scored 41, cut off
    ],
    np.int32,
)
SCORED = [15, 16, 17, 29, 30, 41]
MASK = np.isin(np.arange(len(IDS)), SCORED).astype(np.int8)


def view(placement, ids=IDS, mask=MASK, brief=BRIEF, **options):
    return teacher_view(ids, mask, brief, placement, MARKERS, **options)


def test_golden_system():
    found = view("system")
    assert found.ids.tolist() == [*IDS[:4], 900, 901, *IDS[4:]]
    assert found.lengths.tolist() == [44]
    assert found.position.tolist() == [16, 17, 18, 30, 31, 42]  # 14 15 16 28 29 40, each behind the two brief tokens
    assert found.brief_span.tolist() == [[4, 6]] and found.placement == "system"
    assert (found.ids.dtype, found.lengths.dtype, found.position.dtype) == (np.int32, np.int64, np.int64)


def test_golden_last_user_block():
    found = view("last_user")
    passes = [
        [*IDS[:10], 900, 901, *IDS[10:18]],  # up to the end of the first reply: 20 tokens
        [*IDS[:24], 900, 901, *IDS[24:31]],  # 33 tokens, the brief in the tool result's block
        [*IDS[:36], 900, 901, *IDS[36:]],  # 44 tokens
    ]
    assert found.ids.tolist() == [i for one in passes for i in one]
    assert found.lengths.tolist() == [20, 33, 44]
    assert found.position.tolist() == [16, 17, 18, 20 + 30, 20 + 31, 53 + 42]
    assert found.brief_span.tolist() == [[10, 12], [44, 46], [89, 91]]


def test_golden_last_user_message():
    """Tool results are no user turns: the task conditions two replies, the peer's message one."""
    found = view("last_user", user_turn="message")
    assert found.ids.tolist() == [*IDS[:10], 900, 901, *IDS[10:31], *IDS[:36], 900, 901, *IDS[36:]]
    assert found.lengths.tolist() == [33, 44]
    assert found.position.tolist() == [16, 17, 18, 30, 31, 33 + 42]
    assert found.brief_span.tolist() == [[10, 12], [69, 71]]


@pytest.mark.parametrize("placement", ["system", "last_user"])
def test_no_brief_is_the_identity(placement):
    found = view(placement, brief=[])
    assert found.ids.tolist() == IDS.tolist() and found.lengths.tolist() == [len(IDS)]
    assert found.position.tolist() == [p - 1 for p in SCORED]
    assert found.brief_span[0, 0] == found.brief_span[0, 1]


def test_no_scored_token():
    nothing = np.zeros_like(MASK)
    assert view("system", mask=nothing).position.tolist() == []
    found = view("last_user", mask=nothing)
    assert found.ids.tolist() == [] and found.lengths.tolist() == [] and found.brief_span.shape == (0, 2)


@pytest.mark.parametrize(
    "at",
    [13, 14, 15, 16, 17, 29, 41, 42],
    ids=["role", "header", "first token", "inside", "turn end", "second reply", "open reply", "end of the open reply"],
)
def test_splice_inside_an_assistant_block_is_refused(at):
    with pytest.raises(OpsdError, match="inside the assistant block"):
        splice(IDS, at, np.array(BRIEF, np.int32), chat_blocks(IDS, MARKERS))


def test_splice_inside_think_is_refused():
    """A brief behind the generation header or in <think> would be the teacher's own reasoning."""
    tokenizer = chat_tokenizer()
    markers = ChatMarkers.from_tokenizer(tokenizer)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    ids = np.array(prompt + tokenizer.encode("<think>\nI plan\n</think>\nDone.<|im_end|>"), np.int32)
    blocks = chat_blocks(ids, markers)
    brief = np.array(tokenizer.encode("secret"), np.int32)
    think = ids.tolist().index(tokenizer.convert_tokens_to_ids("<think>"))
    for at in range(len(prompt) - 1, len(ids)):
        with pytest.raises(OpsdError, match="not inside <think>"):
            splice(ids, at, brief, blocks)
    assert len(prompt) <= think
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.int8)
    for placement in ("system", "last_user"):
        found = teacher_view(ids, mask, brief, placement, markers)
        text = tokenizer.decode(found.ids)
        assert text.index("secret") < text.index("<|im_start|>assistant")
        assert text.count("<|im_start|>assistant\n<think>\nI plan\n</think>") == 1


def test_splice_around_blocks_is_allowed():
    for at in (0, 4, 10, 12, 18, 24):
        assert len(splice(IDS, at, np.array(BRIEF, np.int32), chat_blocks(IDS, MARKERS))) == len(IDS) + 2


@pytest.mark.parametrize("placement", ["system", "last_user"])
def test_nothing_is_truncated(placement):
    assert view(placement, max_len=44).lengths.max() == 44
    with pytest.raises(OpsdError, match="44 tokens, 4 more than max_len=40"):
        view(placement, max_len=40)
    with pytest.raises(OpsdError, match="max_len"):
        view(placement, brief=[], max_len=41)


@pytest.mark.parametrize("brief", [[900, START], [END]])
def test_control_tokens_in_a_brief_are_refused(brief):
    with pytest.raises(OpsdError, match="brief that holds"):
        view("system", brief=brief)


@pytest.mark.parametrize("token", [3, 8, 12, 13, 14, 18, 23])
# text, line break, control token, role, line break of the header, line break after the turn end, tool result
def test_scored_tokens_outside_replies_are_refused(token):
    mask = MASK.copy()
    mask[token] = 1
    for placement in ("system", "last_user"):
        with pytest.raises(OpsdError, match="outside every assistant block"):
            view(placement, mask=mask)


def test_missing_places_are_refused():
    with pytest.raises(OpsdError, match="start with a system message"):
        view("system", ids=IDS[6:], mask=MASK[6:])
    assert view("last_user", ids=IDS[6:], mask=MASK[6:]).lengths.tolist() == [14, 27, 38]
    no_user = np.concatenate([IDS[:6], IDS[12:]])
    with pytest.raises(OpsdError, match="no user turn before it"):
        view("last_user", ids=no_user, mask=np.concatenate([MASK[:6], MASK[12:]]))


def test_bad_arguments_are_refused():
    with pytest.raises(OpsdError):
        view("assistant")
    with pytest.raises(OpsdError):
        view("last_user", user_turn="turn")
    with pytest.raises(OpsdError):
        view("system", mask=MASK[:-1])
    with pytest.raises(OpsdError):
        view("system", mask=np.concatenate([[1], MASK[1:]]).astype(np.int8))


def test_control_tokens_in_a_tool_result_do_not_move_the_brief_into_a_reply():
    """A file that holds ChatML text: its <|im_start|> is text of the open block, no reply follows its <|im_end|>."""
    ids = np.array(
        [
            *(START, SYSTEM, LINE, 10, END, LINE),
            *(START, USER, LINE, RESULT, START, ASSISTANT, LINE, 40, END, LINE, 41, END, LINE),
            *(START, ASSISTANT, LINE, 21, START, USER, 22, END, LINE),
        ],
        np.int32,
    )
    scored = [22, 23, 24, 25, 26]
    mask = np.isin(np.arange(len(ids)), scored).astype(np.int8)
    assert [(b.role, b.start, b.close) for b in chat_blocks(ids, MARKERS)] == [
        ("system", 0, 4),
        ("user", 6, 14),
        ("assistant", 19, 26),
    ]
    found = teacher_view(ids, mask, BRIEF, "last_user", MARKERS)
    assert found.brief_span.tolist() == [[14, 16]]
    assert found.ids[found.position + 1].tolist() == [21, START, USER, 22, END]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    calls=st.integers(1, 10),
    brief=st.lists(st.integers(900, 910), max_size=6),
    placement=st.sampled_from(["system", "last_user"]),
    user_turn=st.sampled_from(["block", "message"]),
)
def test_views_of_random_conversations(seed, calls, brief, placement, user_turn):
    """Without the brief each pass is a prefix of the student's ids; the brief is in the right message; the map is
    exact.

    The reading of the ids here is independent of the code: a scan token by token.
    """
    turns, _ = asyncio.run(random_conversation(random.Random(seed), calls))
    for trajectory in build_trajectories(turns):
        ids = trajectory.input_ids
        if ids[0] != START:  # the stub writes its tools in front
            ids = ids[1:]
        mask = trajectory.loss_mask[len(trajectory.input_ids) - len(ids) :]
        if placement == "system" and ids[1] != SYSTEM and brief:
            with pytest.raises(OpsdError):
                teacher_view(ids, mask, brief, placement, MARKERS)
            continue
        found = teacher_view(ids, mask, brief, placement, MARKERS, user_turn=user_turn)
        scored = np.flatnonzero(mask)
        assert found.ids[found.position + 1].tolist() == ids[scored].tolist()
        assert found.lengths.sum() == len(found.ids)
        if not brief:
            assert found.ids.tolist() == ids.tolist() and found.position.tolist() == (scored - 1).tolist()
            continue
        before, offset = -1, 0
        for length, (begin, end) in zip(found.lengths.tolist(), found.brief_span.tolist(), strict=True):
            one = found.ids[offset : offset + length].tolist()
            at, stop = begin - offset, end - offset
            assert one[at:stop] == brief
            assert one[:at] + one[stop:] == ids[: length - len(brief)].tolist()
            assert one[stop] == END
            header = max(i for i in range(at) if one[i] == START)
            assert one[header + 1] == (SYSTEM if placement == "system" else USER)
            inside = [p - offset for p in found.position.tolist() if offset <= p < offset + length]
            assert [p - len(brief) for p in inside] == [s - 1 for s in scored.tolist() if before < s < length - len(brief)]
            for p in inside:  # no other user turn stands between the brief and a token that it conditions
                between = one[stop : p + 1]
                users = [i for i in range(len(between) - 1) if between[i] == START and between[i + 1] == USER]
                if placement == "last_user":
                    assert [i for i in users if user_turn == "block" or between[i + 3] != RESULT] == []
            before = length - len(brief) - 1 if placement == "last_user" else before
            offset += length
        lengths = [len(found.lengths)]
        assert lengths == [1] or placement == "last_user"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), user_turn=st.sampled_from(["block", "message"]))
def test_views_make_rows(seed, user_turn):
    import torch

    turns, _ = asyncio.run(random_conversation(random.Random(seed), 5))
    for trajectory in build_trajectories(turns):
        n = len(loss_positions(trajectory.loss_mask))
        if not n or trajectory.input_ids[0] != START:
            continue
        for placement in ("system", "last_user"):
            seen = teacher_view(trajectory.input_ids, trajectory.loss_mask, BRIEF, placement, MARKERS, user_turn=user_turn)
            row = build_row(trajectory, seen, torch.ones(n), torch.zeros(n))
            assert row["opsd_turn"].min() >= 0 and row["opsd_class"].min() >= 0


@pytest.mark.parametrize("tags", [True, False])
def test_markers_of_a_tokenizer(tags):
    tokenizer = chat_tokenizer(tags)
    markers = ChatMarkers.from_tokenizer(tokenizer)
    assert tokenizer.convert_ids_to_tokens([markers.im_start, markers.im_end]) == ["<|im_start|>", "<|im_end|>"]
    for name in ("system", "user", "assistant"):
        assert tokenizer.decode(list(getattr(markers, name))) == name
    assert tokenizer.decode(list(markers.tool_response)).startswith("\n<tool_response")
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "\n<tool_responses> in text"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]},
        *({"role": "tool", "content": c} for c in ("{x", "")),
        {"role": "assistant", "content": "b"},
    ]
    ids = np.array(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False), np.int32)
    blocks = chat_blocks(ids, markers)
    assert [b.role for b in blocks] == ["system", "user", "assistant", "user", "assistant"]
    body = ids[blocks[3].body :][: len(markers.tool_response)].tolist()
    assert tuple(body) == markers.tool_response


def test_other_tokenizers_are_refused():
    tokenizer = chat_tokenizer()

    class NoChat:
        def encode(self, text, add_special_tokens=True):
            return tokenizer.encode(text.replace("<|im_start|>", "[INST]"), add_special_tokens=False)

    with pytest.raises(OpsdError, match="ChatML family"):
        ChatMarkers.from_tokenizer(NoChat())


def test_a_tokenizer_that_hides_where_tool_results_start_is_refused():
    """The tag's tokens depend on what follows: no ids would tell a tool result from a message."""
    tokenizer = chat_tokenizer()

    class Merging:
        def encode(self, text, add_special_tokens=True):
            ids = tokenizer.encode(text, add_special_tokens=False)
            return ids if "<tool_response>" not in text else [*ids[:-2], 1000 + len(text)]

        decode = tokenizer.decode
        chat_template = tokenizer.chat_template
        apply_chat_template = tokenizer.apply_chat_template

    with pytest.raises(OpsdError, match="tool results are told apart"):
        ChatMarkers.from_tokenizer(Merging())


def test_a_brief_that_quotes_control_tokens_is_text():
    tokenizer = chat_tokenizer()
    brief = peer_spec("agent1", "agent2", "Render <|im_start|>user and <|im_end|> verbatim.")
    ids = brief.ids(tokenizer)
    assert tokenizer.decode(ids) == f"\n\n{brief.text}"
    markers = ChatMarkers.from_tokenizer(tokenizer)
    assert markers.im_start not in ids and markers.im_end not in ids
