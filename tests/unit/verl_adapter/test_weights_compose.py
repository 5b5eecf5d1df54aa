"""All static weights, a threshold at collection and each reduction together, against their definitions in plain Python."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from verl_opsd.config import LossConfig, ThresholdConfig
from verl_opsd.distill.weights import class_weight, max_prefix, position_weight, segment_mask, turn_mask
from verl_opsd.verl_adapter.reduce import with_coefficients, with_threshold

CLASSES, TURNS, SEGMENTS, HALF_LIFE, PREFIX, ABOVE = {0: 1.0, 1: 0.0, 2: 0.25}, {0, 1, 3}, [[0, 9], [12, 30]], 3.0, 14, 0.05


def made_row(rng: random.Random, n: int) -> dict[str, torch.Tensor]:
    """A row of ``n`` loss positions in turns with gaps between them, with its static weights."""
    position, turn, at, number = [], [], rng.randint(0, 5), 0
    for i in range(n):
        if i and rng.random() < 0.3:
            at, number = at + rng.randint(2, 9), number + 1
        position.append(at)
        turn.append(number)
        at += 1
    row = {"opsd_position": torch.tensor(position, dtype=torch.int64), "opsd_turn": torch.tensor(turn, dtype=torch.int64)}
    row["opsd_class"] = torch.tensor(
        [0 if i == 0 else rng.randint(0, 2) for i in range(n)], dtype=torch.int64
    )  # one has weight
    weight = class_weight(row["opsd_class"], CLASSES) * turn_mask(row["opsd_turn"], TURNS)
    weight = weight * segment_mask(row["opsd_position"], SEGMENTS) * position_weight(row["opsd_turn"], HALF_LIFE)
    row["opsd_coef"] = weight * max_prefix(row["opsd_position"], row["opsd_turn"], PREFIX)
    return row | {"opsd_anchor": torch.ones(n)}


def defined_weights(row: dict[str, torch.Tensor]) -> list[float]:
    position, turn, code = (row[f"opsd_{k}"].tolist() for k in ("position", "turn", "class"))
    out = []
    for i, (p, t, c) in enumerate(zip(position, turn, code, strict=True)):
        first = turn.index(t)
        kept = t in TURNS and any(a <= p + 1 < b for a, b in SEGMENTS) and position[first] + 1 < PREFIX
        out.append(CLASSES[c] * kept * 0.5 ** ((i - first) / HALF_LIFE))
    return out


def defined_mean(
    reduction: str, rows: list[dict], keys: list[str], weights: list[list[float]], values: list[list[float]]
) -> float:
    """The mean over groups with weight of the weighted mean inside each."""
    groups = defaultdict(list)
    for row, key, ws, vs in zip(rows, keys, weights, values, strict=True):
        for turn, w, v in zip(row["opsd_turn"].tolist(), ws, vs, strict=True):
            groups[{"token": 0, "turn": (key, turn), "branch": key, "episode": key[0]}[reduction]].append((w, v))
    means = [sum(w * v for w, v in g) / sum(w for w, _ in g) for g in groups.values() if sum(w for w, _ in g) > 0]
    return sum(means) / len(means)


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("reduction", ["token", "turn", "branch", "episode"])
def test_together_they_are_their_definitions(reduction, denominator) -> None:
    loss = LossConfig(reduction=reduction, anchor=0.5, threshold=ThresholdConfig(ABOVE, "collection", denominator))
    for seed in range(12):
        rng = random.Random(seed)
        keys = [f"{e}_{b}" for e in "abc" for b in range(rng.randint(1, 3))]
        rows = [made_row(rng, rng.choice([0, 1, 3, 8]) if i else 8) for i in range(len(keys))]
        weights = [defined_weights(r) for r in rows]
        for row, want in zip(rows, weights, strict=True):
            assert row["opsd_coef"].tolist() == pytest.approx(want)
        divergence, values = ([[rng.random() * s for _ in w] for w in weights] for s in (0.1, 1.0))
        divergence[0][0] = 1.0  # one is kept

        def total(coefs, values=values) -> float:
            return sum(c * v for cs, vs in zip(coefs, values, strict=True) for c, v in zip(cs.tolist(), vs, strict=True))

        new = with_coefficients(rows, keys, [0] * len(keys), loss)
        assert total([r["opsd_coef"] for r in new]) == pytest.approx(
            defined_mean(reduction, rows, keys, weights, values), rel=1e-5
        )
        every = [[1.0] * len(w) for w in weights]  # the anchor holds where masks take the divergence out, too
        anchor = 0.5 * defined_mean(reduction, rows, keys, every, values)
        assert total([r["opsd_anchor"] for r in new]) == pytest.approx(anchor, rel=1e-5)
        above = [[float(d > ABOVE) for d in ds] for ds in divergence]
        kept = [[w * a for w, a in zip(ws, xs, strict=True)] for ws, xs in zip(weights, above, strict=True)]
        coefs, share = with_threshold(new, [torch.tensor(d) for d in divergence], keys, [0] * len(keys), loss)
        count = [sum(w > 0 for ws in which for w in ws) for which in (kept, weights)]
        assert count[0] > 0 and share == pytest.approx(count[0] / count[1])
        masked = [[v * a for v, a in zip(vs, xs, strict=True)] for vs, xs in zip(values, above, strict=True)]
        want = (
            defined_mean(reduction, rows, keys, kept, values)
            if denominator == "kept"
            else defined_mean(reduction, rows, keys, weights, masked)
        )
        assert total(coefs) == pytest.approx(want, rel=1e-5)
