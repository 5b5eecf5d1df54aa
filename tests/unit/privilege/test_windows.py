"""Windows of views that are too long: a golden example, and properties over random conversations, read token by token."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_chat import ASSISTANT, END, LINE, MARKERS, START, SYSTEM, USER, random_conversation

from verl_opsd.privilege import ViewTooLong, stated, teacher_view
from verl_opsd.tokens import build_trajectories

BRIEF = [900, 901]


def block(role: int, *body: int) -> list[int]:
    return [START, role, LINE, *body, END, LINE]


# System 0..5, then four exchanges of 6 + 6 tokens; reply k ends with its END at 6 + 12 k + 10.
IDS = np.array(block(SYSTEM, 10) + sum((block(USER, 20 + k) + block(ASSISTANT, 30 + k) for k in range(4)), []), np.int32)
MASK = np.zeros(len(IDS), np.int8)
for k in range(4):
    MASK[6 + 12 * k + 9 : 6 + 12 * k + 11] = 1  # the reply's token and its END


def test_golden_system():
    """20 tokens a window, the brief and the system block take 8: 12 for the stretch, which is one exchange without its last line
    break and what comes before as context."""
    found = teacher_view(IDS, MASK, BRIEF, "system", MARKERS, max_len=20, window_context=3)
    assert found.holds == (((0, 17),), ((0, 6), (18, 29)), ((0, 6), (30, 41)), ((0, 6), (42, 53)))
    assert found.lengths.tolist() == [19, 19, 19, 19] and found.windowed == 3
    assert found.ids[found.position + 1].tolist() == IDS[MASK == 1].tolist()
    assert found.ids[19:38].tolist() == [*IDS[:4], *BRIEF, *IDS[4:6], *IDS[18:29]]
    assert found.brief_span.tolist() == [[4 + 19 * n, 6 + 19 * n] for n in range(4)]
    assert stated(found).startswith("tokens 0..17 for 2 positions, tokens 0..6 + 18..29 for 2 positions")


def test_more_room_takes_more_replies_and_more_context_fewer():
    def held(max_len: int, context: int) -> list:
        return [h[-1] for h in teacher_view(IDS, MASK, BRIEF, "system", MARKERS, max_len=max_len, window_context=context).holds]

    assert held(32, 3) == [(0, 29), (30, 53)]  # 31 tokens; 8 + 23
    assert held(44, 3) == [(0, 41), (18, 53)]  # the last one has room for two exchanges before its own: 8 + 35
    assert held(32, 7) == [(0, 29), (18, 41), (30, 53)]  # the user block alone is 6 tokens, so the exchange before comes along
    with pytest.raises(ViewTooLong, match="a window of 43 tokens around the reply at 36"):
        held(31, 19)


def test_golden_last_user_message():
    """One user message, then tool results: later windows hold the message with the brief, though their stretch begins behind it."""
    ids = IDS.copy()
    result = MARKERS.tool_response[-1]
    for k in range(1, 4):
        ids[6 + 12 * k + 3] = result
    found = teacher_view(ids, MASK, BRIEF, "last_user", MARKERS, user_turn="message", max_len=26, window_context=3)
    assert found.holds == (((0, 17),), ((0, 12), (18, 29)), ((0, 12), (30, 41)), ((0, 12), (42, 53)))
    assert found.ids[19:44].tolist() == [*ids[:10], *BRIEF, *ids[10:12], *ids[18:29]]
    assert found.ids[found.position + 1].tolist() == ids[MASK == 1].tolist()


def test_without_a_limit_or_where_all_fits_nothing_changes():
    for options in ({}, {"max_len": 100}, {"max_len": 56, "window_context": 3}):
        found = teacher_view(IDS, MASK, BRIEF, "system", MARKERS, **options)
        assert found.holds == (((0, 54),),) and found.windowed == 0


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    calls=st.integers(2, 10),
    brief=st.lists(st.integers(900, 910), max_size=4),
    placement=st.sampled_from(["system", "last_user"]),
    user_turn=st.sampled_from(["block", "message"]),
    context=st.integers(0, 40),
    spare=st.integers(0, 80),
)
def test_windows_of_random_conversations(seed, calls, brief, placement, user_turn, context, spare):
    turns, _ = asyncio.run(random_conversation(random.Random(seed), calls))
    for trajectory in build_trajectories(turns):
        ids, mask = trajectory.input_ids, trajectory.loss_mask
        if ids[0] != START or ids[1] != SYSTEM or not mask.any():
            continue
        limit = 30 + len(brief) + context + spare
        try:
            found = teacher_view(
                ids, mask, brief, placement, MARKERS, user_turn=user_turn, max_len=limit, window_context=context
            )
        except ViewTooLong:
            continue
        scored = np.flatnonzero(mask)
        assert found.ids[found.position + 1].tolist() == ids[scored].tolist()  # each once, in order
        assert max(found.lengths.tolist()) <= limit
        starts = [i for i in range(len(ids)) if ids[i] == START]
        offset, done = 0, 0
        for length, spans, (begin, end) in zip(found.lengths.tolist(), found.holds, found.brief_span.tolist(), strict=True):
            one = found.ids[offset : offset + length].tolist()
            held = [t for a, b in spans for t in range(a, b)]
            assert [*one[: begin - offset], *one[end - offset :]] == ids[held].tolist() and one[
                begin - offset : end - offset
            ] == brief
            assert all(a in starts for a, _ in spans) and spans[0][0] == 0  # blocks are whole, the system block is there
            inside = scored[done : done + int(((found.position >= offset) & (found.position < offset + length)).sum())].tolist()
            done += len(inside)
            stretch = spans[-1][0]
            header = max(s for s in starts if s <= inside[0])
            assert stretch == 0 or header - stretch >= context or len(spans) == 1
            earlier = [s for s in starts if s < stretch and ids[s + 1] != ASSISTANT and s not in held]
            if earlier:  # another block before it would be too many
                assert length + stretch - max(earlier) > limit
            for t in inside:  # all between the stretch's start and the token is there
                assert set(range(max(stretch, 0), t + 1)) <= set(held)
            offset += length
        assert done == len(scored)
