"""Near duplicates: trajectories whose policy tokens are almost the same.

Similarity is Jaccard's on shingles of :data:`SHINGLE` loss tokens: shared distinct shingles over all distinct shingles of the two. A
row with fewer loss tokens is one shingle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from verl_opsd.corpus.records import CorpusRow

SHINGLE = 8


def shingles(row: CorpusRow) -> frozenset[bytes]:
    """Distinct shingles of a row's loss tokens, by their bytes."""
    ids = row.input_ids[row.loss_mask == 1]
    size = min(SHINGLE, len(ids))
    return frozenset(ids[i : i + size].tobytes() for i in range(len(ids) - size + 1))


def near_duplicates(rows: Sequence[CorpusRow], above: float) -> dict[int, tuple[int, float]]:
    """Rows that are near duplicates of an earlier row that is kept.

    Args:
        above: similarity in (0, 1] from which on a row counts as a duplicate.

    Returns:
        index of the row -> (index of the earlier row that it is most similar to, similarity).
    """
    kept: dict[int, frozenset[bytes]] = {}
    holders: defaultdict[bytes, list[int]] = defaultdict(list)
    found: dict[int, tuple[int, float]] = {}
    for i, row in enumerate(rows):
        mine = shingles(row)
        shared = Counter(j for s in mine for j in holders[s])
        best = max(((n / (len(mine) + len(kept[j]) - n), -j) for j, n in shared.items()), default=(0.0, 0))
        if best[0] >= above:
            found[i] = (-best[1], best[0])
            continue
        kept[i] = mine
        for s in mine:
            holders[s].append(i)
    return found
