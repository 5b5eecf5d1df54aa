"""In which order the rows of one or several corpora (buckets) are trained on: phases of weighted buckets, in whole batches.

A weight is the number of times that a phase's epoch goes through a bucket: 2 twice, 0.5 through a half of it, drawn anew in every
epoch. A phase ends at the end of a batch: what is missing there is padding, which carries no loss, so that no row is dropped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_opsd.errors import OpsdError

#: Bucket and row of an entry; ``PADDING`` fills a batch.
Entry = tuple[str, int]
PADDING: Entry = ("", -1)


@dataclass(frozen=True)
class Phase:
    """One phase: bucket -> weight, for a number of epochs."""

    buckets: dict[str, float]
    epochs: int = 1


def schedule(sizes: Mapping[str, int], phases: Sequence[Phase], batch: int, seed: int) -> list[Entry]:
    """Every entry of the training, in order; its length is a multiple of ``batch``.

    Args:
        sizes: rows of each bucket.
        seed: of the order inside an epoch and of the draws.

    Raises:
        OpsdError: no phase, a phase of nothing, a bucket that is not there or is never used, or a weight that is not positive.
    """
    _check(sizes, phases)
    rng = random.Random(seed)
    out: list[Entry] = []
    for phase in phases:
        entries: list[Entry] = []
        for _ in range(phase.epochs):
            epoch: list[Entry] = []
            for name, weight in sorted(phase.buckets.items()):
                whole, rest = divmod(passes(weight, sizes[name]), sizes[name])
                epoch += [(name, i) for i in range(sizes[name])] * whole
                epoch += [(name, i) for i in sorted(rng.sample(range(sizes[name]), rest))]
            rng.shuffle(epoch)
            entries += epoch
        out += [*entries, *[PADDING] * (-len(entries) % batch)]
    return out


def passes(weight: float, size: int) -> int:
    """Entries of an epoch that a weight of a bucket of ``size`` rows is, to the nearest."""
    return round(weight * size)


def _check(sizes: Mapping[str, int], phases: Sequence[Phase]) -> None:
    def refuse(what: str, rule: str) -> None:
        raise OpsdError(what, rule, "correct opsd.phases or opsd.corpora")

    if not phases:
        refuse("no phase", "a training has at least one phase")
    for number, phase in enumerate(phases):
        here = f"phase {number + 1}"
        if phase.epochs < 1 or not phase.buckets:
            refuse(f"{here} of {phase.epochs} epochs over {list(phase.buckets)}", "a phase goes at least once through a bucket")
        for name, weight in phase.buckets.items():
            if name not in sizes:
                refuse(f"{here}: bucket {name!r}", f"the buckets are {', '.join(sizes)}")
            if not 0 < weight < math.inf:
                refuse(
                    f"{here}: weight {weight} of bucket {name}", "a weight is above 0; leave a bucket out that is not wanted"
                )
            if not passes(weight, sizes[name]):
                refuse(f"{here}: weight {weight} of bucket {name} of {sizes[name]} rows", "a weight is at least one row")
    unused = sorted(set(sizes) - {name for phase in phases for name in phase.buckets})
    if unused:
        refuse(f"buckets {', '.join(unused)} in no phase", "a corpus that is named is trained on")
