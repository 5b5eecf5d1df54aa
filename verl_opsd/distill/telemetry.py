"""What the loss positions of a window of training look like: per-token values, their distribution, a summing ledger.

Values are kept whole, not sketched: about 40 bytes a loss position, 40 MB for a million, and every quantile is exact.
Merging is concatenation, and each statistic is taken over sorted values, so it is bit-equal however ranks and
micro-batches cut the same positions.

Shape suffix: N loss positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_opsd.distill.head import HeadResult
from verl_opsd.errors import OpsdError

VALUES = ("divergence", "anchor", "entropy", "agree", "student_logprob", "teacher_logprob", "weight")
COVERAGES = ("coverage_student", "coverage_teacher")


@dataclass(frozen=True)
class Telemetry:
    """Per-token values on the host, float32[N] each, and integer labels to group by, int64[N] each.

    Labels are the caller's: token class, turn, prefix depth bucket, quarter of the run (:func:`part_of_run`), epoch.
    The label ``loss`` (1 inside the mask, 0 outside) is always there: loss statistics cover the inside, drift both
    apart.
    """

    values: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]

    @classmethod
    def of(cls, result: HeadResult, coef_N: Tensor, labels: Mapping[str, Tensor]) -> Telemetry:
        """Of one forward of the head.

        Args:
            coef_N: the task's coefficients; a position is inside the loss mask where they are not 0.
            labels: int64[N] each.
        """
        values = {k: getattr(result, f"{k}_N").detach().float().cpu() for k in VALUES + COVERAGES}
        inside_N = (coef_N != 0).to(torch.int64).cpu()
        return cls(values, {**{k: v.cpu() for k, v in labels.items()}, "loss": inside_N})

    @classmethod
    def merge(cls, parts: Iterable[Telemetry]) -> Telemetry:
        """All positions of all parts.

        Raises:
            OpsdError: no part, or parts with different labels.
        """
        parts = list(parts)
        if not parts or any(set(p.labels) != set(parts[0].labels) for p in parts):
            raise OpsdError(
                f"{len(parts)} parts with labels {sorted({tuple(sorted(p.labels)) for p in parts})}",
                "parts that are merged have the same labels, and there is at least one",
                "label every part the same way",
            )
        return cls(
            {k: torch.cat([p.values[k] for p in parts]) for k in parts[0].values},
            {k: torch.cat([p.labels[k] for p in parts]) for k in parts[0].labels},
        )

    def where(self, **labels: int) -> Telemetry:
        """The positions that carry these labels."""
        keep_N = torch.ones_like(self.labels["loss"], dtype=torch.bool)
        for name, value in labels.items():
            keep_N &= self.labels[name] == value
        return Telemetry({k: v[keep_N] for k, v in self.values.items()}, {k: v[keep_N] for k, v in self.labels.items()})

    def by(self, label: str) -> dict[int, Telemetry]:
        """One part for each value of a label."""
        return {int(v): self.where(**{label: int(v)}) for v in self.labels[label].unique()}

    def summary(self) -> dict[str, float]:
        """Flat statistics; nats unless a share. What the positions do not tell (all NaN, or none) is left out."""
        inside, outside = self.where(loss=1), self.where(loss=0)
        out = {"positions": float(len(self.labels["loss"])), "loss_positions": float(len(inside.labels["loss"]))}
        out |= {f"divergence/{k}": v for k, v in distribution(inside.values["divergence"]).items()}
        for name in ("entropy", "agree", "weight", "student_logprob", "teacher_logprob", *COVERAGES):
            out |= _mean(name, inside.values[name])
        out |= {f"drift/{k}": v for k, v in distribution(self.values["anchor"]).items()}
        out |= _mean("drift/inside", inside.values["anchor"]) | _mean("drift/outside", outside.values["anchor"])
        return out


def distribution(value_N: Tensor) -> dict[str, float]:
    """mean, median, p90, p99, max, max_over_mean and top1pct_share (share of the sum that the largest 1% of positions,
    at least one, hold). Quantiles are the smallest value with at least that share of positions at or below it. NaN is
    left out; empty without values.
    """
    value_N = value_N[~value_N.isnan()].to(torch.float64).sort().values
    n = value_N.numel()
    if n == 0:
        return {}
    mean = float(value_N.sum()) / n
    top = float(value_N[n - max(1, n // 100) :].sum())

    def quantile(percent: int) -> float:
        return float(value_N[-(-n * percent // 100) - 1])

    return {
        "mean": mean,
        "median": quantile(50),
        "p90": quantile(90),
        "p99": quantile(99),
        "max": float(value_N[-1]),
        "max_over_mean": float(value_N[-1]) / mean if mean else float("nan"),
        "top1pct_share": top / float(value_N.sum()) if mean else float("nan"),
    }


def _mean(name: str, value_N: Tensor) -> dict[str, float]:
    stats = distribution(value_N)
    return {name: stats["mean"]} if stats else {}


def part_of_run(step: int, total: int, parts: int) -> int:
    """Which of ``parts`` equal parts (4: quarters, 3: thirds) of a run of ``total`` steps a step (from 0) lies in.

    Raises:
        OpsdError: the step lies outside the run.
    """
    if not 0 <= step < total:
        raise OpsdError(f"step {step} of a run of {total}", "0 <= step < total", "give the length of the whole run")
    return step * parts // total


@dataclass(frozen=True)
class Ledger:
    """Where the positions went. Everything sums, or it is refused.

    Attributes:
        states: policy calls seen; usable: those that reach the loss; dropped: the others by reason.
        reply_tokens: policy tokens of the usable states; by_class: loss positions by token class; left_out: reply
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
            if total != parts:
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
