"""The canary in training: does the policy still act like an engineer, on tasks that are not evaluated on?

Every N rounds the action mix, submissions and patches of the rounds' own training episodes are held against limits that were written
down before the run. A policy that stops writing or testing ends the run before more is spent on it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.definitions import DEFINITIONS
from verl_opsd.evaluation.behaviour.metrics import measure, summed
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore

#: Limits that ship with the package.
DEFAULT = Path(__file__).parent / "canary.yaml"

#: Measured at every check, with or without a limit.
ALWAYS = ("action_write", "action_test", "action_git_inspect", "action_coordinate", "submitted", "patch_bytes")


@dataclass(frozen=True)
class Limit:
    """Bounds of one metric, in its unit; None: no bound on that side."""

    least: float | None = None
    most: float | None = None

    def holds(self, value: float | None) -> bool:
        """Whether a value is inside; a metric without a value is not."""
        return value is not None and (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def read_limits(path: Path) -> dict[str, Limit]:
    """Limits from their YAML file.

    Raises:
        OpsdError: no such file, a metric that nobody defines, or a limit without a bound.
    """
    try:
        values: Any = yaml.safe_load(path.read_text())
        limits = {str(k): Limit(**v) for k, v in values.items()}
        bounds = [b for x in limits.values() for b in (x.least, x.most) if b is not None]
        empty = not limits or any(x.least is None and x.most is None for x in limits.values())
        if empty or not all(type(b) in (int, float) and math.isfinite(b) for b in bounds):
            raise ValueError("a metric has least, most or both, as finite numbers")
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as e:
        raise OpsdError(f"{path}: {e}", "limits are METRIC: {least: NUMBER, most: NUMBER}", "correct the file") from e
    unknown = sorted(set(limits) - set(DEFINITIONS))
    if unknown:
        raise OpsdError(
            f"{path}: {', '.join(unknown)}",
            "a limit is on a metric of `opsd behaviour`",
            f"use one of {', '.join(DEFINITIONS)}",
        )
    return limits


def write_down(run: RunDir, path: Path) -> None:
    """Records the limits and the hash of their file in the evidence, before anything starts."""
    limits = {k: vars(v) for k, v in read_limits(path).items()}
    run.evidence("canary_limits", limits, None, None, f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} of {path.name}")


def values_of(episodes: Sequence[Episode], metrics: Sequence[str]) -> dict[str, float | None]:
    """Each metric over the scored episodes."""
    found = measure(e for e in episodes if e.in_standings)
    return {key: summed(DEFINITIONS[key], [m.parts[key] for m in found])[0] for key in metrics}


def check(run: RunDir, first: int, last: int, limits: dict[str, Limit]) -> dict[str, float | None]:
    """Holds the training episodes of rounds ``first..last`` against the limits, beside those of the policy before any update.

    Returns:
        The values.

    Raises:
        OpsdError: a value outside its limit, or none at all; the run ends.
    """
    store = EpisodeStore(run.episodes)
    rounds = {i: int(i.split("-")[1]) for i in store.ids() if i.startswith("train-")}
    metrics = list(dict.fromkeys((*ALWAYS, *limits)))
    window = [store.read(i) for i, n in rounds.items() if first <= n <= last]
    base = [e for i, n in rounds.items() if n == min(rounds.values()) and (e := store.read(i)).model_version <= 0]
    values, before = values_of(window, metrics), values_of(base, metrics)
    outside = [k for k, limit in limits.items() if not limit.holds(values[k])]
    said = {k: {side: b for side, b in vars(v).items() if b is not None} for k, v in limits.items()}
    run.require(
        "canary",
        values,
        said,
        not outside,
        "look at the episodes of these rounds (`opsd behaviour RUN_DIR --split train`); a policy that left its limits is not "
        "trained on: change the loss or the teacher, or write other limits down before another run",
        f"rounds {first} to {last}, {len(window)} episodes; outside: {', '.join(outside) or 'none'}; before any update: {before}",
    )
    return values
