"""Coefficients by hand, and their independence of how rows are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.distill.reduction import coefficients
from verl_opsd.errors import OpsdError

# Episode A has branches a0 (turns 0, 0, 1) and a1 (turn 2); episode B has branch b0 (turns 0, 0).
TURNS = [torch.tensor([0, 0, 1]), torch.tensor([2]), torch.tensor([0, 0])]
BRANCHES, EPISODES = ["a0", "a1", "b0"], ["A", "A", "B"]
ONES = [torch.ones(3), torch.ones(1), torch.ones(2)]
BY_HAND = {
    "token": [[1 / 6] * 3, [1 / 6], [1 / 6] * 2],
    "turn": [[1 / 8, 1 / 8, 1 / 4], [1 / 4], [1 / 8, 1 / 8]],
    "branch": [[1 / 9] * 3, [1 / 3], [1 / 6] * 2],
    "episode": [[1 / 8] * 3, [1 / 8], [1 / 4] * 2],
}


@pytest.mark.parametrize("reduction", BY_HAND)
def test_by_hand(reduction) -> None:
    got = coefficients(reduction, TURNS, BRANCHES, EPISODES, ONES)
    for row, want in zip(got, BY_HAND[reduction], strict=True):
        assert row.dtype == torch.float32 and row.tolist() == pytest.approx(want)


def test_static_weights_enter_the_denominator_and_numerator_weights_do_not() -> None:
    weights = [torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.0]), torch.tensor([1.0, 0.0])]
    got = coefficients("token", TURNS, BRANCHES, EPISODES, weights)
    assert [r.tolist() for r in got] == [[0, 0.5, 0.25], [0], [0.25, 0]]
    # Turns with weight: (a0, 0), (a0, 1), (b0, 0).
    got = coefficients("turn", TURNS, BRANCHES, EPISODES, weights)
    assert torch.cat(got).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3, 0])
    got = coefficients("token", TURNS, BRANCHES, EPISODES, ONES, numerator_weights=weights, scale=6.0)
    assert torch.cat(got).tolist() == pytest.approx([0, 2, 1, 0, 1, 0])


def test_turns_of_one_number_on_two_branches_are_two_turns() -> None:
    """Both agents of an episode have a turn 0: means of 1 and of 3 positions, not one mean of 4."""
    got = coefficients(
        "turn", [torch.tensor([0]), torch.tensor([0, 0, 0])], ["A1", "A2"], ["A", "A"], [torch.ones(1), torch.ones(3)]
    )
    assert torch.cat(got).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4), st.floats(0, 10)), min_size=1, max_size=30),
    st.sampled_from(["token", "turn", "branch", "episode"]),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_of_the_rows_gives_the_same_coefficients(positions, reduction, data) -> None:
    """Rows are branches; each is cut in pieces, and the pieces come in any order."""
    positions.append((0, 0, 0, 1.0))
    rows: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for episode, branch, turn, weight in positions:
        rows.setdefault((episode, branch), []).append((turn, weight))

    def coefs(pieces):
        got = coefficients(
            reduction,
            [torch.tensor([t for t, _ in values], dtype=torch.int64) for _, values in pieces],
            [key for key, _ in pieces],
            [key[0] for key, _ in pieces],
            [torch.tensor([w for _, w in values], dtype=torch.float64) for _, values in pieces],
        )
        return sorted(
            (key, *v, c) for (key, vs), row in zip(pieces, got, strict=True) for v, c in zip(vs, row.tolist(), strict=True)
        )

    whole = list(rows.items())
    pieces = []
    for key, values in whole:
        at = data.draw(st.integers(0, len(values)))
        pieces += [(key, values[:at]), (key, values[at:])]
    pieces = data.draw(st.permutations(pieces))
    for a, b in zip(coefs(whole), coefs(pieces), strict=True):
        assert a[:-1] == b[:-1] and a[-1] == pytest.approx(b[-1], rel=1e-6)
    assert sum(c for *_, c in coefs(whole)) == pytest.approx(1.0, rel=1e-5)


def test_refusals() -> None:
    with pytest.raises(OpsdError, match="no weight"):
        coefficients("token", TURNS, BRANCHES, EPISODES, [torch.zeros_like(w) for w in ONES])
    with pytest.raises(OpsdError, match="negative"):
        coefficients("token", TURNS, BRANCHES, EPISODES, [-w for w in ONES])
    with pytest.raises(OpsdError, match="non-finite"):
        coefficients("token", TURNS, BRANCHES, EPISODES, [w * torch.nan for w in ONES])
    with pytest.raises(OpsdError, match="one entry a row"):
        coefficients("token", TURNS[:2], BRANCHES, EPISODES, ONES)
    with pytest.raises(OpsdError, match="one entry a loss position"):
        coefficients("token", TURNS, BRANCHES, EPISODES, [torch.ones(2), torch.ones(1), torch.ones(2)])
    with pytest.raises(OpsdError, match="reduction"):
        coefficients("sum", TURNS, BRANCHES, EPISODES, ONES)
