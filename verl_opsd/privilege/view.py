"""`TeacherView`: the teacher's token ids for one trajectory, and where each loss position is found in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from verl_opsd.tokens.records import Ids

Placement = Literal["system", "last_user"]


@dataclass(frozen=True)
class TeacherView:
    """One or more passes over one trajectory with a brief inserted.

    Attributes:
        ids: int32[T'], the passes one after another.
        lengths: int64[P], tokens of each pass.
        position: int64[N], index into ``ids`` of the position that predicts loss token n, in the trajectory's order.
        brief_span: int64[P, 2], start and end of the brief inside ``ids`` for each pass (start == end: no brief).
        holds: for each pass the half-open ranges of the branch that it holds: all up to its end, or a window (``windows.windows``).
        placement: where the brief was put; divergences of different placements are never put in one column.
    """

    ids: Ids
    lengths: NDArray[np.int64]
    position: NDArray[np.int64]
    brief_span: NDArray[np.int64]
    placement: Placement
    holds: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def windowed(self) -> int:
        """Passes that do not hold the branch from its start without a gap."""
        return sum(len(spans) != 1 or spans[0][0] != 0 for spans in self.holds)


def stated(view: TeacherView) -> str:
    """What each pass holds of the branch and how many positions it scores, in words."""
    ends = np.cumsum(view.lengths)
    counts = np.bincount(np.searchsorted(ends, view.position, side="right"), minlength=len(ends)).tolist()
    held = (" + ".join(f"{a}..{b}" for a, b in spans) for spans in view.holds)
    return ", ".join(f"tokens {h} for {n} positions" for h, n in zip(held, counts, strict=True))
