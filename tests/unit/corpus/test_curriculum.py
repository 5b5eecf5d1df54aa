"""Phases of weighted buckets as whole batches."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from verl_opsd.corpus.curriculum import PADDING, Phase, schedule
from verl_opsd.errors import OpsdError


def test_an_epoch_goes_through_every_row_once_and_ends_with_a_whole_batch():
    out = schedule({"a": 5}, [Phase({"a": 1.0}, epochs=3)], batch=4, seed=1)
    assert len(out) == 16 and out[15] == PADDING
    for e in range(3):
        assert sorted(i for _, i in out[5 * e : 5 * e + 5]) == [0, 1, 2, 3, 4]
    assert out[:5] != out[5:10]


def test_weights_count_passes_and_draw_fractions_anew_each_epoch():
    out = schedule({"a": 4, "b": 10}, [Phase({"a": 2.0, "b": 0.3}, epochs=20)], batch=1, seed=0)
    found = Counter(out)
    assert {found["a", i] for i in range(4)} == {40}
    assert sum(n for (name, _), n in found.items() if name == "b") == 20 * 3
    assert len({i for name, i in out if name == "b"}) == 10
    first = [set(i for name, i in out[11 * e : 11 * e + 11] if name == "b") for e in range(2)]
    assert [len(s) for s in first] == [3, 3] and first[0] != first[1]


def test_phases_follow_one_another_and_share_no_batch():
    out = schedule({"b": 3, "a": 2}, [Phase({"b": 1.0}), Phase({"a": 1.0})], batch=2, seed=0)
    assert {n for n, _ in out[:4]} == {"b", ""} and {n for n, _ in out[4:]} == {"a"}
    assert out[3] == PADDING


def test_the_order_follows_the_seed_alone():
    args = ({"a": 50}, [Phase({"a": 1.0})], 5)
    assert schedule(*args, seed=3) == schedule(*args, seed=3) != schedule(*args, seed=4)


def test_a_weight_above_1_draws_its_fraction_beside_whole_passes():
    out = Counter(schedule({"a": 4}, [Phase({"a": 1.5})], batch=1, seed=0))
    assert sorted(out.values()) == [1, 1, 2, 2] and sorted(out) == [("a", i) for i in range(4)]


def test_a_fraction_is_to_the_nearest_row():
    assert len(schedule({"a": 5}, [Phase({"a": 0.75})], batch=1, seed=0)) == 4
    assert len(schedule({"a": 5}, [Phase({"a": 0.25})], batch=1, seed=0)) == 1


def test_phases_over_the_same_rows_go_through_them_in_orders_of_their_own():
    out = schedule({"a": 50}, [Phase({"a": 1.0}), Phase({"a": 1.0})], batch=5, seed=0)
    assert sorted(out[:50]) == sorted(out[50:]) and out[:50] != out[50:]


def test_the_order_in_which_buckets_are_named_changes_nothing():
    sizes = {"a": 5, "b": 7}
    one, other = ([Phase({name: 0.6 for name in names})] for names in ("ab", "ba"))
    assert schedule(sizes, one, batch=2, seed=0) == schedule(sizes, other, batch=2, seed=0)


@pytest.mark.parametrize(
    ("sizes", "phases", "what"),
    [
        ({"a": 3}, [], "no phase"),
        ({"a": 3}, [Phase({"a": 1.0}, epochs=0)], "0 epochs"),
        ({"a": 3}, [Phase({})], "epochs over"),
        ({"a": 3}, [Phase({"b": 1.0})], "bucket 'b'"),
        ({"a": 3}, [Phase({"a": 0.0})], "weight 0.0"),
        ({"a": 3}, [Phase({"a": math.inf})], "weight inf"),
        ({"a": 3}, [Phase({"a": math.nan})], "weight nan"),
        ({"a": 3}, [Phase({"a": 0.1})], "weight 0.1 of bucket a of 3 rows"),
        ({"a": 3, "b": 9}, [Phase({"b": 1.0, "a": 0.1})], "weight 0.1 of bucket a of 3 rows"),
        ({"a": 3, "b": 1}, [Phase({"a": 1.0})], "buckets b in no phase"),
    ],
)
def test_what_makes_no_sense_is_refused(sizes, phases, what):
    with pytest.raises(OpsdError, match=what):
        schedule(sizes, phases, 2, 0)
