"""What every teacher is: something that says, under its own weights, what it thinks at the student's loss positions.

Suffixes: N loss positions of a row, T tokens of a sequence, H hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


@dataclass(frozen=True)
class Voice:
    """How a teacher's signal of a row looks where it is stored and sent: one 2-D tensor, whose first dimension is the loss positions.

    Attributes:
        name: ``Signal.head_id`` of exact signals; of any teacher the name in telemetry.
        form: ``exact``: hidden states [N, H]. ``support``: float32 [N, 2K + 1], ids (-1: unused slot), log-probabilities, tail.
        width: columns.
        dtype: of the tensor.
    """

    name: str
    form: Literal["exact", "support"]
    width: int
    dtype: torch.dtype

    def pack(self, signal: Signal) -> Tensor:
        """[N, width] on the host."""
        if self.form == "exact":
            assert signal.hidden_NH is not None
            return signal.hidden_NH
        assert signal.ids_NK is not None and signal.logprobs_NK is not None and signal.tail_N is not None
        return torch.cat([signal.ids_NK.float(), signal.logprobs_NK.float(), signal.tail_N[:, None].float()], dim=-1)

    def unpack(self, rows_NW: Tensor) -> Signal:
        """The signal of rows that may be wider (:func:`on_the_wire`)."""
        if self.form == "exact":
            return Signal(hidden_NH=rows_NW[:, : self.width].to(self.dtype), head_id=self.name)
        slots = self.width // 2
        ids_NK, logprobs_NK, tail_N1 = rows_NW[:, : self.width].float().split([slots, slots, 1], dim=-1)
        return Signal(ids_NK=ids_NK.to(torch.int64), logprobs_NK=logprobs_NK, tail_N=tail_N1[:, 0])


def common(voices: Sequence[Voice]) -> tuple[int, torch.dtype]:
    """Columns and dtype of one field that holds the signals of several teachers; float32 holds every other dtype exactly."""
    dtypes = {v.dtype for v in voices}
    return max(v.width for v in voices), dtypes.pop() if len(dtypes) == 1 else torch.float32


def on_the_wire(packed_NW: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[N, width], the further columns 0."""
    return torch.nn.functional.pad(packed_NW.to(dtype), (0, width - packed_NW.shape[1]))


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
