"""Which episode a divergence belongs to: the telemetry of a round holds loss positions row after row, without the rows' names.

A row is told by what it is: positions and turns of its branch, in order, and where several fit by the log-probabilities of its
tokens, which the student still gives nearly as it did when it sampled them. Suffix: N loss positions of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.records import Trajectory

#: Episode, agent, branch.
RowKey = tuple[str, str, int]


def join(values: Mapping[str, NDArray[Any]], trajectories: Sequence[Trajectory]) -> dict[RowKey, NDArray[np.float32]]:
    """Divergence at each loss position of each row, float32[N], nats; trajectories that were no row are left out.

    Args:
        values: one pass over a round's rows: ``position``, ``turn``, ``student_logprob``, ``divergence``, each float32.
        trajectories: that the rows were made of, with the same loss positions.

    Raises:
        OpsdError: a stretch of the telemetry is no trajectory's.
    """
    stream_position, stream_turn = (values[k].astype(np.int64) for k in ("position", "turn"))
    waiting: dict[tuple[int, int], list[tuple[Trajectory, NDArray[Any], NDArray[Any]]]] = defaultdict(list)
    for t in trajectories:
        position_N = loss_positions(t.loss_mask)
        if len(position_N):
            turn_N = t.turn_index[position_N + 1]
            waiting[int(position_N[0]), int(turn_N[0])].append((t, position_N, turn_N))
    found: dict[RowKey, NDArray[np.float32]] = {}
    at = 0
    while at < len(stream_position):
        here = waiting.get((int(stream_position[at]), int(stream_turn[at])), [])
        fits = [
            i
            for i, (_, p, turn) in enumerate(here)
            if np.array_equal(stream_position[at : at + len(p)], p) and np.array_equal(stream_turn[at : at + len(p)], turn)
        ]
        if not fits:
            raise OpsdError(
                f"telemetry from loss position {at} on",
                "a round's telemetry holds its rows one after another, and a row is a stored branch",
                "keep episodes/ and telemetry/ of one run together",
            )

        def gap(i: int, at: int = at, here: Any = here) -> float:
            t, p, _ = here[i]
            return float(np.abs(values["student_logprob"][at : at + len(p)] - t.logprobs[p + 1]).mean())

        t, position_N, _ = here.pop(min(fits, key=gap))
        found[t.episode_id, t.agent_id, t.branch] = values["divergence"][at : at + len(position_N)].astype(np.float32)
        at += len(position_N)
    return found
