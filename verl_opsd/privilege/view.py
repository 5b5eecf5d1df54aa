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
        placement: where the brief was put; divergences of different placements are never put in one column.
    """

    ids: Ids
    lengths: NDArray[np.int64]
    position: NDArray[np.int64]
    brief_span: NDArray[np.int64]
    placement: Placement
