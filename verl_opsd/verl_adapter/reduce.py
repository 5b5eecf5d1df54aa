"""Final coefficients of a round's rows: the reduction over each optimizer step's global batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from verl_opsd.config import LossConfig
from verl_opsd.distill.reduction import coefficients


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
