"""Passes, grouping and layout, against values written down by hand and against a search by token."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.rows import padding_fields
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import (
    Pass,
    flat,
    group_passes,
    jagged,
    layout_index,
    own_passes,
    rows_of,
    signal_of,
    view_passes,
)


def row() -> dict[str, torch.Tensor]:
    """Tokens 10..15; replies 12 and 14, 15. The view: a pass a turn with 7, 8 in front; one between scores nothing."""
    i64 = torch.int64
    return {
        "input_ids": torch.tensor([10, 11, 12, 13, 14, 15]),
        "opsd_position": torch.tensor([1, 3, 4]),
        "opsd_coef": torch.ones(3),
        "opsd_anchor": torch.zeros(3),
        "opsd_behaviour": torch.tensor([-0.5, -1.0, -2.0]),
        "opsd_reward": torch.zeros(3),
        "opsd_class": torch.zeros(3, dtype=i64),
        "opsd_turn": torch.tensor([0, 1, 1]),
        "opsd_view_ids": torch.tensor([7, 8, 10, 11, 12, 7, 8, 9, 7, 8, 10, 11, 12, 13, 14, 15]),
        "opsd_view_len": torch.tensor([5, 3, 8]),
        "opsd_view_pos": torch.tensor([3, 13, 14]),
    }


def padding() -> dict[str, torch.Tensor]:
    ids = torch.tensor([10, 11])
    return {"input_ids": ids, **padding_fields(ids)}


def as_lists(p: Pass) -> tuple[int, list[int], list[int], list[int]]:
    return p.row, p.slots_N.tolist(), p.ids_T.tolist(), p.index_N.tolist()


def test_view_passes_by_hand() -> None:
    assert [as_lists(p) for p in view_passes([padding(), row()])] == [
        (1, [0], [7, 8, 10, 11, 12], [3]),
        (1, [1, 2], [7, 8, 10, 11, 12, 13, 14, 15], [5, 6]),
    ]


def test_own_passes_by_hand() -> None:
    assert [as_lists(p) for p in own_passes([row(), padding()])] == [(0, [0, 1, 2], [10, 11, 12, 13, 14, 15], [1, 3, 4])]


@pytest.mark.parametrize("passes", [view_passes, own_passes])
def test_every_slot_predicts_its_own_token(passes) -> None:  # type: ignore[no-untyped-def]
    rows = [row(), padding(), row()]
    seen = []
    for p in passes(rows):
        for slot, index in zip(p.slots_N.tolist(), p.index_N.tolist(), strict=True):
            r = rows[p.row]
            assert p.ids_T[index + 1] == r["input_ids"][r["opsd_position"][slot] + 1]
            seen.append((p.row, slot))
    assert sorted(seen) == [(r, s) for r in (0, 2) for s in range(3)]


@pytest.mark.parametrize("passes", [view_passes, own_passes])
def test_shift_stays_inside_its_pass(passes) -> None:  # type: ignore[no-untyped-def]
    plain, moved = passes([row()]), passes([row()], 1)
    assert all((b.index_N - a.index_N == 1).all() for a, b in zip(plain, moved, strict=True))
    for shift in (2, -4, -9):  # a pass's own end, its own start
        with pytest.raises(OpsdError, match="out of its sequence"):
            passes([row()], shift)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20), st.integers(1, 4))
def test_groups_keep_order_and_limits(sizes: list[int], tokens: int, sequences: int) -> None:
    passes = [Pass(i, torch.zeros(0), torch.zeros(n), torch.zeros(0)) for i, n in enumerate(sizes)]
    groups = group_passes(passes, tokens, sequences)
    assert [p.row for g in groups for p in g] == list(range(len(sizes)))
    for g in groups:
        assert 1 <= len(g) <= sequences
        assert len(g) == 1 or sum(p.ids_T.numel() for p in g) <= tokens


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.booleans(), st.randoms(use_true_random=False))
def test_layout_index_finds_the_same_token(lengths: list[int], packed: bool, random) -> None:  # type: ignore[no-untyped-def]
    rows = [torch.arange(n) + 100 * r for r, n in enumerate(lengths)]
    positions = [torch.tensor([random.randrange(n) for _ in range(random.randrange(3))], dtype=torch.int64) for n in lengths]
    width = max(lengths)
    padded = torch.stack([torch.cat([x, torch.full((width - len(x),), -1)]) for x in rows])
    layout = torch.cat(rows) if packed else padded.flatten()
    want = torch.cat([x[p] for x, p in zip(rows, positions, strict=True)])
    assert torch.equal(layout[layout_index(lengths, positions, packed)], want)


def test_rows_of_splits_and_checks() -> None:
    fields = {k: jagged([row()[k], padding()[k]]) for k in row()}
    assert torch.equal(rows_of(fields)[0]["opsd_view_pos"], row()["opsd_view_pos"])
    assert rows_of(fields)[1]["opsd_position"].numel() == 0
    with pytest.raises(OpsdError, match="opsd_turn"):
        rows_of({k: v for k, v in fields.items() if k != "opsd_turn"})
    fields["opsd_view_ids"] = jagged([row()["opsd_view_ids"] + 1, padding()["opsd_view_ids"]])
    with pytest.raises(OpsdError, match="is scored against"):
        rows_of(fields)


def test_signal_of_has_one_entry_a_position() -> None:
    hidden = [torch.rand(3, 2), torch.rand(0, 2)]
    batch = {"opsd_signal": jagged(hidden), "opsd_coef": jagged([torch.ones(3), torch.zeros(0)])}
    signal = signal_of(batch, "opsd_signal", [3, 0], "student")
    assert signal.form == "exact" and torch.equal(signal.hidden_NH, hidden[0])
    assert flat(batch, "opsd_coef").tolist() == [1, 1, 1]
    with pytest.raises(OpsdError, match="one hidden state"):
        signal_of(batch, "opsd_signal", [2, 1], "student")
    with pytest.raises(OpsdError, match="scored once"):
        signal_of(batch, "opsd_base", [3, 0], "student")


def test_loss_is_a_plain_value() -> None:
    loss = OpsdLoss(anchor=True, reference="initial")
    assert pickle.loads(pickle.dumps(loss)) == loss != OpsdLoss()
    assert hash(loss) == hash(OpsdLoss(anchor=True, reference="initial"))


def test_a_position_at_the_first_token_of_a_pass_is_of_that_pass() -> None:
    """Passes of 3 and 4 tokens; positions 1, 3 and 5 of the view are token 1 of the first, 0 and 2 of the second."""
    row = {"opsd_view_ids": torch.arange(7), "opsd_view_len": torch.tensor([3, 4]), "opsd_view_pos": torch.tensor([1, 3, 5])}
    first, second = view_passes([row])
    assert (first.slots_N.tolist(), first.index_N.tolist(), first.ids_T.tolist()) == ([0], [1], [0, 1, 2])
    assert (second.slots_N.tolist(), second.index_N.tolist(), second.ids_T.tolist()) == ([1, 2], [0, 2], [3, 4, 5, 6])
