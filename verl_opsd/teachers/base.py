"""What every teacher is: something that says, under its own weights, what it thinks at the student's loss positions.

Suffixes: N loss positions of a row, T tokens of a sequence, H hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class Pass:
    """One sequence of one row, and the loss positions that it scores.

    Attributes:
        row: index of the row among the rows that are scored together.
        slots_N: int64, which of the row's loss positions this pass scores.
        ids_T: int64 token ids.
        index_N: int64, positions in ``ids_T`` whose hidden state predicts the loss token.
    """

    row: int
    slots_N: Tensor
    ids_T: Tensor
    index_N: Tensor


class Scorer(Protocol):
    """A teacher. Whatever it is made of it keeps: dropout off, no gradient, nothing truncated, and the order of positions."""

    @property
    def name(self) -> str:
        """``Signal.head_id`` of its exact signals."""

    def score(self, passes: Sequence[Pass]) -> Signal:
        """The signal of one row.

        Args:
            passes: of one row; their slots together are 0..N-1, each once (:func:`slots_of`).

        Returns:
            Entry n belongs to loss position n, whichever pass scored it and in whatever order the passes come.
        """


def slots_of(passes: Sequence[Pass]) -> Tensor:
    """int64[N] the loss positions of one row's passes, one after another.

    Raises:
        OpsdError: the passes are of several rows, or do not score each loss position once.
    """
    if not passes:
        return torch.zeros(0, dtype=torch.int64)
    slots_N = torch.cat([p.slots_N for p in passes])
    if len({p.row for p in passes}) > 1 or not torch.equal(slots_N.sort().values, torch.arange(len(slots_N))):
        raise OpsdError(
            f"passes of rows {sorted({p.row for p in passes})} that score the loss positions {slots_N.tolist()[:20]}",
            "a row's passes score each of its loss positions exactly once",
            "build the passes of one row from its teacher view",
        )
    return slots_N
