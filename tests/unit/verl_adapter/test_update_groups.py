"""Which rows share an optimizer step: by episode, each row once, none without weight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.verl_adapter.reduce import update_groups

KEYS = ["a_0", "a_1", "b_0", "c_0", "c_1", "d_0"]


@pytest.mark.parametrize(
    ("carries", "per_update", "want"),
    [
        ([1, 1, 1, 1, 1, 1], None, [[0, 1, 2, 3, 4, 5]]),
        ([1, 1, 1, 1, 1, 1], 1, [[0, 1], [2], [3, 4], [5]]),
        ([1, 1, 1, 1, 1, 1], 3, [[0, 1, 2, 3, 4], [5]]),
        ([0, 0, 1, 0, 1, 1], 1, [[2], [3, 4], [5, 0, 1]]),  # a has nothing, c's first row has nothing
        ([1, 1, 1, 1, 1, 0], 1, [[0, 1], [2], [3, 4, 5]]),
        ([0, 0, 0, 0, 0, 0], 2, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_groups(carries, per_update, want):
    assert update_groups(KEYS, list(map(bool, carries)), per_update) == want


@given(rows=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=20), size=st.none() | st.integers(1, 7))
def test_each_row_once_and_no_step_without_weight(rows, size):
    rows = sorted(rows)
    keys, carries = [f"e{e}_{i}" for i, (e, _) in enumerate(rows)], [c for _, c in rows]
    groups = update_groups(keys, carries, size)
    assert sorted(i for g in groups for i in g) == list(range(len(rows)))
    step_of = {i: g for g, members in enumerate(groups) for i in members}
    for episode in {e for e, _ in rows}:
        assert len({step_of[i] for i, (e, _) in enumerate(rows) if e == episode}) == 1
    if any(carries):
        assert all(any(carries[i] for i in g) for g in groups)
        loaded = {e for e, c in rows if c}
        assert all(len({rows[i][0] for i in g} & loaded) <= (size or 99) for g in groups)
