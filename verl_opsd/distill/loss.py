"""`LossSpec`: which divergence, on which support, under which data-dependent weights. Validated when it is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossSpec:
    """The per-token loss. The default is exact reverse KL, KL(student || teacher), over the full vocabulary."""

    divergence: str = "reverse_kl"
