"""A round's rows in optimizer steps, and their final coefficients: the reduction over each step's global batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from verl_opsd.config import LossConfig
from verl_opsd.distill.reduction import coefficients


def update_groups(keys: Sequence[str], carries: Sequence[bool], per_update: int | None) -> list[list[int]]:
    """Rows of each optimizer step; steps count episodes.

    Args:
        keys: of the rows; rows of one episode share everything before the last underscore.
        carries: whether a row holds a position with weight.
        per_update: episodes of a step; None: all.

    Returns:
        Row numbers of each step, every row once. An episode without weight (its agents never got to reply) is no episode of
        a step of its own, which would have nothing to learn from: its rows ride along in the last one.
    """
    episodes: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        episodes.setdefault(key.rsplit("_", 1)[0], []).append(i)
    loaded = [rows for rows in episodes.values() if any(carries[i] for i in rows)]
    empty = [rows for rows in episodes.values() if not any(carries[i] for i in rows)]
    size = per_update or max(1, len(loaded))
    groups = [sum(loaded[i : i + size], []) for i in range(0, len(loaded), size)] or [[]]
    groups[-1] += sum(empty, [])
    return groups


def with_coefficients(
    rows: list[dict[str, Tensor]], keys: Sequence[str], groups: Sequence[int], loss: LossConfig
) -> list[dict[str, Tensor]]:
    """Replaces static weights by final coefficients (``tokens.rows``).

    Args:
        rows: ``opsd_coef`` and ``opsd_anchor`` hold static weights; padding rows have no position.
        keys: of the rows; rows of one episode share everything before the last underscore.
        groups: the optimizer step of each row.

    Returns:
        New rows; the coefficients of one step sum to 1 (divergence) and ``loss.anchor`` (anchor).

    Raises:
        OpsdError: no position of a step carries weight.
    """
    out = [dict(r) for r in rows]
    for g in sorted(set(groups)):
        members = [i for i, x in enumerate(groups) if x == g]
        turns = [rows[i]["opsd_turn"] for i in members]
        episodes = [keys[i].rsplit("_", 1)[0] for i in members]
        branches = [keys[i] for i in members]
        terms = [("opsd_coef", 1.0)] + ([("opsd_anchor", loss.anchor)] if loss.anchor > 0 else [])
        for name, scale in terms:
            weights = [rows[i][name] for i in members]
            final = coefficients(loss.reduction, turns, branches, episodes, weights, scale=scale)
            for i, coef in zip(members, final, strict=True):
                out[i][name] = coef
    return out
