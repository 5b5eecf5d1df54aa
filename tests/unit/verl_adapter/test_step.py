"""A micro-batch's record: positions of a turn, and what is kept, by hand."""

from __future__ import annotations

import pytest
import torch

from verl_opsd.distill.head import HeadResult
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.policy import PpoClip
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import Threshold
from verl_opsd.errors import OpsdError
from verl_opsd.teachers.base import Voice
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.passes import jagged
from verl_opsd.verl_adapter.step import OutsideTeacher, kept_coefficient, loss_task, metrics_of, turn_position

ROWS = {
    "opsd_coef": [[0.1, 0.2, 0.3], [], [0.4]],
    "opsd_class": [[0, 1, 1], [], [4]],
    "opsd_turn": [[2, 2, 3], [], [3]],
    "opsd_position": [[7, 8, 20], [], [21]],
    "opsd_row": [[4], [9], [1]],
}


def batch() -> dict[str, torch.Tensor]:
    dtypes = {"opsd_coef": torch.float32}
    return {k: jagged([torch.tensor(x, dtype=dtypes.get(k, torch.int64)) for x in rows]) for k, rows in ROWS.items()}


def test_positions_of_a_turn_start_at_each_turn_and_each_row() -> None:
    assert turn_position(torch.tensor([0, 0, 0, 2, 2, 5])).tolist() == [0, 1, 2, 0, 1, 0]
    assert turn_position(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_record_has_one_entry_a_position_in_order() -> None:
    names = [f for f in HeadResult.__dataclass_fields__]
    result = HeadResult(**{name: torch.arange(4) + 10.0 * i for i, name in enumerate(names)})
    got = metrics_of(batch(), result, step=5)
    assert got["opsd/turn_position"] == [0, 1, 0, 0]  # the second row of turn 3 is another row
    assert got["opsd/position"] == [7, 8, 20, 21] and got["opsd/step"] == [5] * 4 and got["opsd/class"] == [0, 1, 1, 4]
    assert got["opsd/row"] == [4, 4, 4, 1] and "opsd/teacher" not in got
    for i, name in enumerate(names):
        assert got[f"opsd/{name.removesuffix('_N')}"] == [10.0 * i + n for n in range(4)]


def test_kept_coefficients_are_those_above_the_threshold() -> None:
    nan = torch.full((4,), torch.nan)
    result = HeadResult(torch.tensor([0.05, 0.06, 0.01, 0.2]), *[nan] * 8)
    assert abs(kept_coefficient(batch(), result, 0.05).item() - 0.6) < 1e-6


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (LossSpec(support="teacher_topk", top_k=1), "signal"),
        (LossSpec(support="signal"), "signal"),
        (LossSpec(divergence="k2"), "full"),
        (LossSpec(), None),
        (LossSpec(support="student_topk", top_k=1), None),
        (LossSpec(support="union_topk", top_k=1), None),
        (LossSpec(support="teacher_topk", top_k=2), None),
    ],
    ids=str,
)
def test_a_given_support_is_taken_for_no_other(spec: LossSpec, asked: str | None) -> None:
    """A teacher that gives its most probable token, and the sampled one, under losses that ask for that, and for what it can't give."""
    voice = Voice("top", "support", 5, torch.float32)
    ids, half = torch.tensor([[3, 4]] * 4), torch.full((4, 2), 0.25).log()
    signal = voice.pack(Signal(ids_NK=ids, logprobs_NK=half, tail_N=torch.full((4,), 0.5).log()))
    zero = [[0.0] * len(x) for x in ROWS["opsd_coef"]]
    rows = batch() | {f"opsd_{k}": jagged([torch.tensor(x) for x in zero]) for k in ("anchor", "reward", "behaviour")}
    rows |= {"input_ids": jagged([torch.full((23,), 3)] * 3), "opsd_signal": jagged(list(signal.split([3, 0, 1])))}
    made = (rows, OpsdLoss(spec, teacher="device"), [OutsideTeacher(voice, None)], ("student", None), 1, True)
    if asked is None:
        with pytest.raises(OpsdError, match="which gives its 1 most probable tokens"):
            loss_task(*made)
        return
    task = loss_task(*made)
    assert task.loss.support == asked and task.teacher is not None and torch.equal(task.teacher.ids_NK, ids)


@pytest.mark.parametrize(("term", "asked"), [("anchor", {"anchor": True}), ("reward", {"task_reward": PpoClip()})])
def test_a_mean_over_kept_positions_takes_no_term_with_a_denominator_of_its_own(term: str, asked: dict) -> None:
    spec = LossSpec(weights=(Threshold(0.05),))
    rows = batch() | {
        f"opsd_{k}": jagged([torch.full((len(x),), float(k == term)) for x in ROWS["opsd_coef"]]) for k in ("anchor", "reward")
    }
    rows |= {"input_ids": jagged([torch.full((23,), 3)] * 3)}
    with pytest.raises(OpsdError, match=f"rows with opsd_{term} under a loss that is divided by the kept positions"):
        loss_task(rows, OpsdLoss(spec, divide_by_kept=True, **asked), ("student", None), ("student", None), 1, True)
