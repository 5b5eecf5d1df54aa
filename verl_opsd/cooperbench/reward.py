"""What a graded episode earns: half a point a feature, and shaped terms, which are off unless they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import AgentOutcome, Grade


@dataclass(frozen=True)
class RewardConfig:
    """Shaped terms, 0 by default. Together they stay below half a point, so that no sum of them is worth a feature.

    Attributes:
        clean_merge: both patches are not empty and merge clean.
        submitted: share of agents that submitted (and did not run into a limit).
        non_empty: share of agents that handed in a patch.
        steps: subtracted: mean share of the step limit that the agents used.
    """

    clean_merge: float = 0.0
    submitted: float = 0.0
    non_empty: float = 0.0
    steps: float = 0.0

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if min(values.values()) < 0 or sum(values.values()) >= 0.5:
            raise OpsdError(
                f"opsd.reward {values}",
                "shaped terms are not negative and together below 0.5: a feature that passes is always worth more",
                "lower the terms, or leave them at 0",
            )


def rewards(grade: Grade, agents: Sequence[AgentOutcome], shaped: RewardConfig, step_limit: int) -> dict[str, float]:
    """``task`` (0, 0.5 or 1), the shaped terms that are on, and their sum ``total``."""
    n = len(agents)
    terms = {
        "clean_merge": float(grade.merge_kind == "clean"),
        "submitted": sum(a.status == "Submitted" for a in agents) / n,
        "non_empty": sum(bool(a.patch.strip()) for a in agents) / n,
        "steps": -sum(a.steps for a in agents) / (n * step_limit),
    }
    found = {"task": grade.reward}
    found |= {f"shaped_{name}": weight * value for name, value in terms.items() if (weight := getattr(shaped, name)) > 0}
    return {**found, "total": sum(found.values())}
