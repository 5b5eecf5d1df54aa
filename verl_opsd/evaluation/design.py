"""What a design can show before it is run, and the noise floor: how far two runs of the same weights lie apart.

A design is a number of pairs, of seeds a pair, and how often a pair's result changes when the same weights run again. Its
model of a study: a pair passes with probability ``low`` or ``high = 1 - low``, so that two runs of it differ with probability
``discordance = 2 * low * high``; an effect moves a share of the pairs from ``low`` to ``high``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from verl_opsd.errors import OpsdError

#: Share of pairs whose result differs between two runs of the same weights, where none was measured: the field experiments that
#: this project starts from saw one pair in ten pass, and another one in the re-run.
ASSUMED_DISCORDANCE = 0.2

CANNOT: Final = "cannot be shown with this design"

_STUDIES, _FLIPS = 2000, 1999


@dataclass(frozen=True)
class Rerun:
    """One run of some weights. ``values``: pair -> score, 0 to 1; ``node``: what served it; ``seed``: of sampling."""

    values: Mapping[str, float]
    node: str
    seed: int


@dataclass(frozen=True)
class Floor:
    """How far re-runs of the same weights lie apart.

    Attributes:
        runs, pairs: re-runs, and pairs that all of them scored.
        discordance: mean squared difference of a pair between two re-runs; for passes, the share of pairs that differ.
        largest: largest difference of two re-runs' means.
        half_width: 95% half-width of the difference of two runs of the same weights on these pairs, 1.96 sqrt(discordance / pairs).
        of: what the floor holds, in words.
    """

    runs: int
    pairs: int
    discordance: float
    largest: float
    half_width: float
    of: str

    @property
    def value(self) -> float:
        """A difference up to this is inside the floor: the half-width, and at least what was seen."""
        return max(self.half_width, self.largest)


def noise_floor(reruns: Sequence[Rerun]) -> Floor:
    """The floor of two or more runs of the same weights, on the pairs that all of them scored.

    Raises:
        OpsdError: fewer than two, or no common pair.
    """
    common = sorted(set.intersection(*(set(r.values) for r in reruns))) if reruns else []
    if len(reruns) < 2 or not common:
        raise OpsdError(
            f"{len(reruns)} runs with {len(common)} common pairs",
            "a noise floor comes from at least two runs of the same weights on the same pairs",
            "run the baseline again with another seed",
        )
    scores = np.array([[r.values[p] for p in common] for r in reruns])
    couples = list(itertools.combinations(range(len(reruns)), 2))
    discordance = float(np.mean([np.mean((scores[i] - scores[j]) ** 2) for i, j in couples]))
    largest = float(max(abs(scores[i].mean() - scores[j].mean()) for i, j in couples))
    nodes, seeds = {r.node for r in reruns}, {r.seed for r in reruns}
    sampling = "sampling and serving variance" if len(seeds) > 1 else "serving variance alone (one sampling seed)"
    where = f"on one node ({nodes.pop()})" if len(nodes) == 1 else f"between {len(nodes)} nodes"
    return Floor(
        runs=len(reruns),
        pairs=len(common),
        discordance=discordance,
        largest=largest,
        half_width=1.96 * math.sqrt(discordance / len(common)),
        of=f"{len(reruns)} runs of the same weights: {sampling} {where}",
    )


@dataclass(frozen=True)
class Design:
    """A comparison of two models on the same pairs.

    Attributes:
        pairs, seeds: pairs, and runs of each pair by each model.
        base: pass rate of the baseline, 0 to 1.
        discordance: see the module; 0 to 1/2.
        alpha: two-sided level of the test of one comparison; power: wanted chance to show an effect.
        study_seed: of the simulated studies (several seeds).

    Raises:
        OpsdError: a value out of its range.
    """

    pairs: int
    seeds: int = 1
    base: float = 0.2
    discordance: float = ASSUMED_DISCORDANCE
    alpha: float = 0.05
    power: float = 0.8
    study_seed: int = 0

    def __post_init__(self) -> None:
        holds = self.pairs >= 1 and self.seeds >= 1 and 0 <= self.base <= 1 and 0 <= self.discordance <= 0.5
        if not (holds and 0 < self.alpha < 1 and 0 < self.power < 1):
            raise OpsdError(
                f"{self}",
                "pairs and seeds >= 1; base 0 to 1; discordance 0 to 1/2; alpha and power inside 0 to 1",
                "correct it",
            )

    @property
    def low(self) -> float:
        """Pass probability of a pair that mostly fails."""
        return (1 - math.sqrt(1 - 2 * self.discordance)) / 2

    @property
    def movable(self) -> float:
        """Share of the pairs that can move from ``low`` to ``high``: those that the baseline mostly fails."""
        spread = 1 - 2 * self.low
        return 1.0 if spread == 0 else min(1.0, max(0.0, 1 - (self.base - self.low) / spread))

    def effect(self, moved: float) -> float:
        """True difference of pass rates when a share ``moved`` of the pairs moves."""
        return moved * (1 - 2 * self.low)

    def shown(self, moved: float) -> float:
        """Chance that the test finds a difference when a share ``moved`` of the pairs moves.

        One seed: exact, of the exact McNemar test. Several: of the permutation test on the pairs' mean differences, from
        :data:`_STUDIES` simulated studies (standard error at most 0.011).
        """
        return self._exact(moved) if self.seeds == 1 else self._simulated(moved)

    def _exact(self, moved: float) -> float:
        from scipy.stats import binom  # half a second

        low, high = self.low, 1 - self.low
        gained = (1 - moved) * low * high + moved * high * high
        lost = (1 - moved) * low * high + moved * low * low
        if gained + lost == 0:
            return 0.0
        m, k = np.arange(self.pairs + 1)[:, None], np.arange(self.pairs + 1)[None, :]
        found = np.where(self._rejects, binom.pmf(k, m, gained / (gained + lost)), 0.0).sum(1)
        return float(found @ binom.pmf(m[:, 0], self.pairs, min(1.0, gained + lost)))

    @cached_property
    def _rejects(self) -> np.ndarray:
        """Whether exact McNemar rejects, by pairs that differ and those of them that the model gained."""
        from scipy.stats import binom  # half a second

        m, k = np.arange(self.pairs + 1)[:, None], np.arange(self.pairs + 1)[None, :]
        return (k <= m) & (2 * binom.cdf(np.minimum(k, m - k), m, 0.5) <= self.alpha)

    def _simulated(self, moved: float) -> float:
        uniform, flips = self._drawn
        low, high = self.low, 1 - self.low
        already = uniform[0] < 1 - self.movable
        moves = ~already & (uniform[1] < (moved / self.movable if self.movable else 0.0))
        rng = np.random.default_rng([self.study_seed, 1])
        base = rng.binomial(self.seeds, np.where(already, high, low))
        other = rng.binomial(self.seeds, np.where(already | moves, high, low))
        difference = (other - base).astype(np.float32)
        observed = np.abs(difference.sum(1))[:, None]
        as_far = (np.abs(difference @ flips) >= observed - 1e-4).sum(1)
        return float((((as_far + 1) / (_FLIPS + 1)) <= self.alpha).mean())

    @cached_property
    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.study_seed, 0])
        flips = rng.choice(np.array([-1, 1], np.float32), (self.pairs, _FLIPS))
        return rng.random((2, _STUDIES, self.pairs)), flips

    def smallest(self) -> float | None:
        """Smallest true difference of pass rates that is shown with the wanted power; None where no possible one is."""
        most = self.movable
        if most == 0 or self.shown(most) < self.power:
            return None
        least = 0.0
        for _ in range(20):
            middle = (least + most) / 2
            least, most = (least, middle) if self.shown(middle) >= self.power else (middle, most)
        return self.effect(most)

    def text(self, measured: Floor | None = None) -> str:
        """What the design can show, for before a run."""
        source = f"measured ({measured.of})" if measured else "assumed, no re-run of the baseline was measured"
        head = (
            f"{self.pairs} pairs x {self.seeds} seed{'s' if self.seeds > 1 else ''}, baseline {self.base:.0%}, "
            f"{self.discordance:.0%} of pairs change between runs of the same weights ({source})"
        )
        found = self.smallest()
        if found is None:
            return f"{head}: a better pass rate {CANNOT} (power {self.power:.0%} at level {self.alpha:.3g})"
        return (
            f"{head}: the smallest true difference that is shown with power {self.power:.0%} at level {self.alpha:.3g} is "
            f"{found:.0%}, {found * self.pairs:.1f} pairs"
        )
