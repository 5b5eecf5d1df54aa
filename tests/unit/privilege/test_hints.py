"""Hints are taken out by index, and nothing else changes."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_chat import random_conversation

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hints import find_hints, strip_hint
from verl_opsd.tokens import build_trajectories

HINT = [900, 901, 900]


def with_hint(trajectory, places):
    """The trajectory with the hint inserted before each of these positions, and where it then starts."""
    starts, out = [], {}
    for name, fill in (("input_ids", None), ("loss_mask", 0), ("turn_index", -1), ("token_class", -1), ("logprobs", 0.0)):
        values = getattr(trajectory, name).tolist()
        for at in sorted(places, reverse=True):
            values[at:at] = HINT if fill is None else [fill] * len(HINT)
        out[name] = np.array(values, getattr(trajectory, name).dtype)
    for n, at in enumerate(sorted(places)):
        starts.append(at + n * len(HINT))
    fork = trajectory.fork_position + len(HINT) * sum(at < trajectory.fork_position for at in places)
    return dataclasses.replace(trajectory, **out, fork_position=fork), starts


def same(a, b):
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        if isinstance(getattr(a, f.name), np.ndarray)
        else getattr(a, f.name) == getattr(b, f.name)
        for f in dataclasses.fields(a)
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_stripping_undoes_inserting(seed, data):
    turns, _ = asyncio.run(random_conversation(random.Random(seed), 4))
    for trajectory in build_trajectories(turns):
        context = np.flatnonzero(trajectory.turn_index < 0).tolist()
        places = data.draw(st.lists(st.sampled_from(context), max_size=3, unique=True))
        hinted, starts = with_hint(trajectory, places)
        assert find_hints(hinted.input_ids, HINT) == starts
        assert same(strip_hint(hinted, HINT, starts), trajectory)


def trajectory():
    turns, _ = asyncio.run(random_conversation(random.Random(1), 3))
    return build_trajectories(turns)[0]


def test_what_does_not_fit_is_refused():
    plain = trajectory()
    hinted, (first, second) = with_hint(plain, [2, 5])
    written = int(np.flatnonzero(plain.turn_index >= 0)[0])
    cases = [
        ("still stands", hinted, [first]),
        ("other ids", hinted, [first, second, second + 1]),
        ("other ids", hinted, [-1]),
        ("overlap", hinted, [first, first, second]),
    ]
    for match, one, starts in cases:
        with pytest.raises(OpsdError, match=match):
            strip_hint(one, HINT, starts)
    ids = plain.input_ids.copy()
    ids[written : written + 1] = 900
    inside = dataclasses.replace(plain, input_ids=ids)
    with pytest.raises(OpsdError, match="inside a reply"):
        strip_hint(inside, [900], [written])
    with pytest.raises(OpsdError, match="empty"):
        strip_hint(plain, [], [])
    assert same(strip_hint(plain, HINT, []), plain)


def test_occurrences_never_overlap():
    assert find_hints(np.array([7, 7, 7, 7, 7], np.int32), [7, 7]) == [0, 2]
    assert find_hints(np.array([7], np.int32), [7, 7]) == []
