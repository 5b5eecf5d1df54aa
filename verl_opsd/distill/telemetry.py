"""What the loss positions of a window of training look like: distributions in quantile sketches, and a ledger that sums.

Everything merges exactly: a sketch (DDSketch, of the ``ddsketch`` package) counts values in fixed logarithmic bins, and sums
are kept as integers by power of two. So ranks, micro-batches, rounds and files may be cut and ordered in any way, and every
number comes out bit-equal; memory does not grow with the number of positions.

Quantiles, and the share of the largest 1%, are within ``ACCURACY`` (relative) of the true ones; counts, means, minima and
maxima are exact (sums of float32 values, rounded once at the end).

Shape suffix: N loss positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from ddsketch import DDSketch
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError

ACCURACY = 0.01
#: Per-position values of which the mean inside the loss mask is reported.
MEANS = ("entropy", "agree", "weight", "student_logprob", "teacher_logprob", "coverage_student", "coverage_teacher")
#: Combinations of labels from which on those that do not occur are left out.
_MOST_GROUPS = 1 << 14
#: Lower bounds of the buckets of positions within a turn, of turns, and of tokens before a position.
TURN_POSITIONS = np.array([0, *(4**i for i in range(10))])
TURNS = np.array([0, *(2**i for i in range(16))])
DEPTHS = np.array([0, *(2**i for i in range(8, 24))])


def bucket(value_N: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest bound that is not above each value, int64[N]."""
    return bounds[np.searchsorted(bounds, value_N, side="right") - 1]


class ExactSum:
    """Number and exact sum of float32 values; NaN is left out."""

    def __init__(self) -> None:
        self.count = 0
        self._by_exponent: dict[int, int] = {}  # integers of 24 bits and more, times 2 ** (exponent - 24)

    def add(self, value_N: NDArray[Any]) -> None:
        """Adds values.

        Raises:
            OpsdError: one is infinite.
        """
        _one_group(len(value_N)).count(value_N, [[self]])

    def add_sums(self, count: int, low: int, sums: NDArray[np.float64]) -> None:
        """Adds ``count`` values, given the sums of their integers by exponent, from ``low`` on."""
        self.count += count
        for i in np.flatnonzero(sums).tolist():
            self._by_exponent[low + i] = self._by_exponent.get(low + i, 0) + int(sums[i])

    def merge(self, other: ExactSum) -> None:
        """Adds what ``other`` has seen."""
        self.count += other.count
        for exponent, total in other._by_exponent.items():
            self._by_exponent[exponent] = self._by_exponent.get(exponent, 0) + total

    @property
    def total(self) -> float:
        """The sum, rounded once."""
        return float(sum((Fraction(s) * Fraction(2) ** (e - 24) for e, s in self._by_exponent.items()), Fraction(0)))

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self.total / self.count if self.count else None


class Distribution(DDSketch):  # type: ignore[misc]
    """A sketch of values with their exact sum."""

    def __init__(self) -> None:
        super().__init__(ACCURACY)
        self.exact = ExactSum()

    def add_all(self, value_N: NDArray[Any]) -> None:
        """Adds values; NaN is left out."""
        _one_group(len(value_N)).sketch(value_N, [[self]])

    def add_bins(self, negative: bool, low: int, counts: NDArray[np.int64]) -> None:
        """Adds values above 0, or below, given their numbers by bin, from ``low`` on: a bin is touched once, not once a value."""
        store, found = self._negative_store if negative else self._store, np.flatnonzero(counts).tolist()
        if not found:
            return
        store._get_index(low + found[0]), store._get_index(low + found[-1])  # makes room for both ends
        for i, count in zip(found, counts[found].tolist(), strict=True):
            store.bins[low + i - store.offset] += float(count)
        store.count += float(counts.sum())

    def add_ends(self, zeros: int, count: int, least: float, most: float) -> None:
        """Adds the number of zeros, of all values, and the smallest and the largest."""
        self._zero_count += float(zeros)
        self._count += float(count)
        self._min, self._max = min(self._min, least), max(self._max, most)

    def merge(self, sketch: Distribution) -> None:  # type: ignore[override]
        """Adds what ``sketch`` has seen."""
        super().merge(sketch)
        self.exact.merge(sketch.exact)

    def quantile(self, share: float) -> float:
        """The value at rank ``share * (count - 1)``, from below; within ``ACCURACY``."""
        value = self.get_quantile_value(share)
        assert value is not None  # there are values
        return float(min(max(value, self._min), self._max))

    def _largest(self, count: float) -> float:
        """Sum of the largest ``count`` values, each as its bin's."""
        total = 0.0
        for i in range(len(self._store.bins) - 1, -1, -1):
            taken = min(count, self._store.bins[i])
            total += taken * self._mapping.value(i + self._store.offset)
            count -= taken
            if count <= 0:
                break
        return total

    def stats(self) -> dict[str, float | None]:
        """mean, median, p90, p99, max, max_over_mean, and top1pct_share: share of the sum that the largest 1% of values (at least
        one) hold; the last two None where the sum is not above 0, the share also where values are of both signs (estimates from
        sampled tokens), whose parts may exceed the whole. Empty without values."""
        n, total, mean = self.exact.count, self.exact.total, self.exact.mean
        if mean is None:
            return {}
        return {
            "mean": mean,
            "median": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self._max,
            "max_over_mean": self._max / mean if mean > 0 else None,
            # a bin's value may be above those in it, by ACCURACY
            "top1pct_share": min(1.0, self._largest(max(1, n // 100)) / total) if total > 0 and self._min >= 0 else None,
        }


_MULTIPLIER = Distribution()._mapping._multiplier


@dataclass(frozen=True)
class Groups:
    """Positions by the combination of their labels: values are looked at once, and then counted into the cells of every label.

    Attributes:
        group_N: of each position, from 0, int64[N].
        places: for each label the place of each group's cell, int64[groups].
    """

    group_N: NDArray[np.int64]
    places: Sequence[NDArray[np.int64]]

    def keep(self, keep_N: NDArray[np.bool_]) -> Groups:
        """The same groups of a part of the positions."""
        return Groups(self.group_N[keep_N], self.places)

    def count(self, value_N: NDArray[Any], cells: Sequence[Sequence[ExactSum]]) -> None:
        """Adds values to the sums of each label's cells; NaN is left out.

        Raises:
            OpsdError: one is infinite.
        """
        value_N, group_N = self._known(value_N)
        if not len(value_N):
            return
        groups = len(self.places[0])
        mantissa_N, exponent_N = np.frexp(value_N)
        low, width = int(exponent_N.min()), int(np.ptp(exponent_N)) + 1
        sums = np.bincount(group_N * width + (exponent_N - low), np.rint(mantissa_N * 2.0**24), groups * width)
        counts = np.bincount(group_N, minlength=groups)
        for place_G, own in zip(self.places, cells, strict=True):
            by_cell, count = np.zeros((len(own), width)), np.zeros(len(own), np.int64)
            np.add.at(by_cell, place_G, sums.reshape(groups, width))
            np.add.at(count, place_G, counts)
            for i, cell in enumerate(own):
                cell.add_sums(int(count[i]), low, by_cell[i])

    def sketch(self, value_N: NDArray[Any], cells: Sequence[Sequence[Distribution]]) -> None:
        """Adds values to each label's cells, as :meth:`count`."""
        self.count(value_N, [[d.exact for d in own] for own in cells])
        value_N, group_N = self._known(value_N)
        groups = len(self.places[0])
        signs = []
        for negative, sign_N in ((False, value_N > 0), (True, value_N < 0)):
            if sign_N.any():
                key_N = np.ceil(np.log2(np.abs(value_N[sign_N])) * _MULTIPLIER).astype(np.int64)
                low = int(key_N.min())
                signs.append((negative, group_N[sign_N], low, int(key_N.max()) - low + 1, key_N - low))
        least, most = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(least, group_N, value_N)
        np.maximum.at(most, group_N, value_N)
        zeros, counts = (np.bincount(part_N, minlength=groups) for part_N in (group_N[value_N == 0], group_N))
        for place_G, own in zip(self.places, cells, strict=True):
            for negative, part_N, low, width, bin_N in signs:
                bins = np.bincount(place_G[part_N] * width + bin_N, minlength=len(own) * width).reshape(len(own), width)
                for i, cell in enumerate(own):
                    cell.add_bins(negative, low, bins[i])
            for i, cell in enumerate(own):
                mine_G = place_G == i
                cell.add_ends(
                    int(zeros[mine_G].sum()), int(counts[mine_G].sum()), float(least[mine_G].min()), float(most[mine_G].max())
                )

    def _known(self, value_N: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        known_N = ~np.isnan(value_N)
        if np.isinf(value_N).any():
            raise OpsdError("an infinite value", "statistics are over finite values", "look at what produced it")
        return value_N[known_N].astype(np.float64) + 0.0, self.group_N[known_N]  # no negative zero


def _one_group(n: int) -> Groups:
    return Groups(np.zeros(n, np.int64), [np.zeros(1, np.int64)])


@dataclass
class Cell:
    """Statistics of one group of positions: of the loss inside the mask, of drift inside and outside apart."""

    divergence: Distribution = field(default_factory=Distribution)
    drift_inside: Distribution = field(default_factory=Distribution)
    drift_outside: Distribution = field(default_factory=Distribution)
    means: dict[str, ExactSum] = field(default_factory=lambda: {k: ExactSum() for k in MEANS})
    positions: int = 0
    loss_positions: int = 0

    def merge(self, other: Cell) -> None:
        """Adds what ``other`` has seen."""
        self.positions += other.positions
        self.loss_positions += other.loss_positions
        for name in ("divergence", "drift_inside", "drift_outside"):
            getattr(self, name).merge(getattr(other, name))
        for name, total in self.means.items():
            total.merge(other.means[name])

    def summary(self) -> dict[str, Any]:
        """``positions``, ``loss_positions``, ``divergence`` and ``drift`` as :meth:`Distribution.stats` (drift with the means
        ``inside`` and ``outside`` the mask), and a mean for each of ``MEANS``. Nats unless a share. What the positions do not tell is
        left out."""
        out: dict[str, Any] = {"positions": self.positions, "loss_positions": self.loss_positions}
        out["divergence"] = self.divergence.stats()
        out |= {k: total.mean for k, total in self.means.items() if total.count}
        drift = Distribution()
        drift.merge(self.drift_inside)
        drift.merge(self.drift_outside)
        if drift.exact.count:
            sides = {"inside": self.drift_inside.exact.mean, "outside": self.drift_outside.exact.mean}
            out["drift"] = drift.stats() | sides
        return out


class Telemetry:
    """Cells of a window of training: one of all positions, and one for each value of each label."""

    def __init__(self) -> None:
        self.all = Cell()
        self.by: dict[str, dict[int, Cell]] = {}

    def add(self, values: Mapping[str, NDArray[Any]], labels: Mapping[str, NDArray[Any]]) -> None:
        """Adds positions.

        Args:
            values: float32[N] each: ``coef`` (the coefficient in the loss), ``divergence``, ``anchor`` (divergence from the student's
                own base) and ``MEANS``; NaN where unknown. A position is inside the loss mask where its coefficient and its
                data-dependent weight are not 0.
            labels: int64[N] each.
        """
        inside_N = (values["coef"] != 0) & (values["weight"] != 0)
        group_N, places, cells = np.zeros(len(inside_N), np.int64), [np.zeros(1, np.int64)], [[Cell()]]
        alike: list[tuple[str, int]] = []  # labels with one code: they count what the whole does
        for label, code_N in labels.items():
            self.by.setdefault(label, {})
            codes = code_N[:1] if (code_N == code_N[:1]).all() else np.unique(code_N)
            if len(codes) < 2:
                alike += [(label, code) for code in codes.tolist()]
                continue
            group_N = group_N * len(codes) + np.searchsorted(codes, code_N)
            places = [np.repeat(p, len(codes)) for p in places] + [np.tile(np.arange(len(codes)), len(places[0]))]
            cells.append([self.by[label].setdefault(code, Cell()) for code in codes.tolist()])
            if len(places[0]) > _MOST_GROUPS:
                kept, group_N = np.unique(group_N, return_inverse=True)
                places = [p[kept] for p in places]
        groups = Groups(group_N, places)
        inside, outside = groups.keep(inside_N), groups.keep(~inside_N)
        for place_G, own in zip(places, cells, strict=True):
            positions, loss = (np.bincount(place_G[g.group_N], minlength=len(own)).tolist() for g in (groups, inside))
            for i, cell in enumerate(own):
                cell.positions += positions[i]
                cell.loss_positions += loss[i]
        inside.sketch(values["divergence"][inside_N], [[c.divergence for c in own] for own in cells])
        inside.sketch(values["anchor"][inside_N], [[c.drift_inside for c in own] for own in cells])
        outside.sketch(values["anchor"][~inside_N], [[c.drift_outside for c in own] for own in cells])
        for name in MEANS:
            inside.count(values[name][inside_N], [[c.means[name] for c in own] for own in cells])
        whole = cells[0][0]
        self.all.merge(whole)
        for label, code in alike:
            self.by[label].setdefault(code, Cell()).merge(whole)

    def merge(self, other: Telemetry) -> None:
        """Adds what ``other`` has seen."""
        self.all.merge(other.all)
        for label, cells in other.by.items():
            mine = self.by.setdefault(label, {})
            for code, cell in cells.items():
                mine.setdefault(code, Cell()).merge(cell)

    def summary(self) -> dict[str, Any]:
        """``all``, and under ``by`` for each label the cells by code, as text, in order."""
        by = {label: {str(c): cells[c].summary() for c in sorted(cells)} for label, cells in self.by.items()}
        return {"all": self.all.summary(), "by": by}


def parts(start: int, size: int, total: int, count: int) -> NDArray[np.int64]:
    """Which of ``count`` equal parts of ``total`` positions (4: quarters) the positions ``start..start + size`` lie in, int64[size].

    Where ``total`` can't be divided the first parts get one position more.
    """
    sizes = [total // count + (i < total % count) for i in range(count)]
    return np.searchsorted(np.cumsum(sizes), np.arange(start, start + size), side="right")


@dataclass(frozen=True)
class Ledger:
    """Where the positions went. Everything sums and nothing is below 0, or it is refused.

    Attributes:
        states: policy calls seen; usable: those that may carry loss; dropped: the others by reason.
        reply_tokens: policy tokens of the branches that became rows; by_class: loss positions by token class; left_out: reply
            tokens without loss, by reason.
    """

    states: int = 0
    usable: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    reply_tokens: int = 0
    by_class: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for total, parts, names in (
            (self.states, self.usable + sum(self.dropped.values()), "states = usable + dropped"),
            (self.reply_tokens, self.loss_positions + sum(self.left_out.values()), "reply tokens = loss + left out"),
        ):
            if total != parts or min(self.usable, *self.by_class.values(), *self.left_out.values(), *self.dropped.values()) < 0:
                raise OpsdError(f"ledger: {total} against {parts}", names, "count each state and token under one reason")

    @property
    def loss_positions(self) -> int:
        """Loss positions of all classes."""
        return sum(self.by_class.values())

    def __add__(self, other: Ledger) -> Ledger:
        def add(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
            return {k: a.get(k, 0) + b.get(k, 0) for k in sorted({*a, *b})}

        return Ledger(
            self.states + other.states,
            self.usable + other.usable,
            add(self.dropped, other.dropped),
            self.reply_tokens + other.reply_tokens,
            add(self.by_class, other.by_class),
            add(self.left_out, other.left_out),
        )
