"""Final coefficients of a round's rows: the reduction over each optimizer step's global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_opsd.config import LossConfig


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
    """
    out = [dict(r) for r in rows]
    for g in sorted(set(groups)):
        members = [i for i, x in enumerate(groups) if x == g]
        for name, scale in (("opsd_coef", 1.0), ("opsd_anchor", loss.anchor)):
            total = sum(float(rows[i][name].sum()) for i in members)
            for i in members:
                out[i][name] = (rows[i][name] * (scale / total if total else 0.0)).to(torch.float32)
    return out
