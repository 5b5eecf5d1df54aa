"""Which episode a divergence belongs to: the telemetry of a round names the row of each loss position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.records import Trajectory

#: Episode, agent, branch.
RowKey = tuple[str, str, int]


def join(
    values: Mapping[str, NDArray[Any]], names: Sequence[str] | NDArray[Any] | None, trajectories: Sequence[Trajectory]
) -> dict[RowKey, NDArray[np.float32]]:
    """Divergence at each loss position of each row, float32[N], nats; trajectories that were no row are left out.

    Args:
        values: one pass over a round's rows: ``row``, ``turn``, ``divergence``, each float32.
        names: of the rows, ``episode/agent/branch``; ``row`` is a place among them. None: the file holds none.
        trajectories: that the rows were made of, with the same loss positions.

    Raises:
        OpsdError: there are no names, or a row is no trajectory, or has other loss positions than it.
    """
    if names is None or "row" not in values:
        raise OpsdError(
            "telemetry without the names of its rows",
            "a token is coloured by the row that its divergence was measured in",
            "run again with this version for colours; the tables hold without them",
        )
    by_name = {f"{t.episode_id}/{t.agent_id}/{t.branch}": t for t in trajectories}
    order = np.argsort(values["row"], kind="stable")
    numbers, starts = np.unique(values["row"][order], return_index=True)
    found: dict[RowKey, NDArray[np.float32]] = {}
    for number, mine in zip(numbers.astype(int), np.split(order, starts[1:]), strict=False):  # without rows: one empty part
        name = str(names[number])
        t = by_name.get(name)
        # Turns, not positions: where a hint was taken out of a row it has other positions than the stored branch.
        if t is None or not np.array_equal(values["turn"][mine], t.turn_index[loss_positions(t.loss_mask) + 1]):
            raise OpsdError(
                f"telemetry of the row {name}",
                "a row is a stored branch, with its loss positions",
                "keep episodes/ and telemetry/ of one run together",
            )
        found[t.episode_id, t.agent_id, t.branch] = values["divergence"][mine].astype(np.float32)
    return found
