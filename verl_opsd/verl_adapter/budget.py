"""What a run's episodes will take: hours, GPU-hours and sandboxes, before anything starts; refused above the limits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from omegaconf import DictConfig

from verl_opsd.config import BudgetConfig, OpsdConfig
from verl_opsd.cooperbench.grading import TEST_RUNS
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.spent import FILE, SANDBOXES
from verl_opsd.rundir import RunDir, write_json


class DryRun(Exception):
    """Everything was checked and nothing is to be started; the text is the estimate."""


@dataclass(frozen=True)
class Estimate:
    """Of the episodes alone: training steps and the teacher's passes are not in it.

    Attributes:
        train, evaluation: episodes.
        minutes: of one episode with its grade; ``bound``: these are the contract's limits, not an expectation.
        hours: of wall time. gpu_hours: of all devices of the run, which wait for episodes as well.
        sandbox_hours, sandbox_usd: over all sandboxes.
    """

    train: int
    evaluation: int
    minutes: float
    bound: bool
    hours: float
    gpus: int
    gpu_hours: float
    sandbox_hours: float
    sandbox_usd: float

    def text(self) -> str:
        """One line a figure."""
        word = "at most" if self.bound else "about"
        basis = "the contract's limits" if self.bound else "opsd.budget.minutes_per_pair"
        return "\n".join(
            (
                f"episodes: {self.train} of training, {self.evaluation} of evaluation; {word} {self.minutes:.1f} minutes each ({basis})",
                f"hours of collecting: {word} {self.hours:.2f}",
                f"GPU-hours: {word} {self.gpu_hours:.2f} ({self.gpus} devices)",
                f"sandboxes: {word} {self.sandbox_hours:.2f} hours, {self.sandbox_usd:.2f} USD",
            )
        )


def estimate(config: DictConfig, opsd: OpsdConfig, evaluation_pairs: int) -> Estimate:
    """The estimate of a composed configuration. Pairs run in waves of the contract's concurrency; a round waits for its last pair."""
    c, budget, trainer = opsd.contract, opsd.budget, config.trainer
    steps, every = int(trainer.total_training_steps), int(trainer.test_freq)
    evaluations = (steps // every if every > 0 else 0) + bool(trainer.val_before_train)
    rounds = [int(config.data.train_batch_size)] * (steps if opsd.mode == "online" else 0) + [evaluation_pairs] * evaluations
    bound = budget.minutes_per_pair is None
    minutes = (c.wall_limit_s + TEST_RUNS * c.grade_timeout_s) / 60 if bound else budget.minutes_per_pair
    assert minutes is not None
    hours = sum(math.ceil(pairs / c.concurrency) for pairs in rounds) * minutes / 60
    gpus = int(trainer.n_gpus_per_node) * int(trainer.nnodes) if opsd.scale.startswith("gpu") else 0
    gpus += opsd.teacher.devices if gpus and opsd.teacher.kind == "device" else 0
    sandbox_hours = SANDBOXES * sum(rounds) * minutes / 60
    train = sum(rounds[:steps]) if opsd.mode == "online" else 0
    return Estimate(
        train=train,
        evaluation=sum(rounds) - train,
        minutes=minutes,
        bound=bound,
        hours=hours,
        gpus=gpus,
        gpu_hours=hours * gpus,
        sandbox_hours=sandbox_hours,
        sandbox_usd=sandbox_hours * budget.sandbox_usd_per_hour,
    )


def within(found: Estimate, budget: BudgetConfig) -> list[tuple[str, float, float | None, bool]]:
    """(name, value, limit, whether it holds) of each figure that can be capped."""
    rows: list[tuple[str, float, float | None]] = [
        ("hours", found.hours, budget.max_hours),
        ("gpu_hours", found.gpu_hours, budget.max_gpu_hours),
        ("sandbox_usd", found.sandbox_usd, budget.max_sandbox_usd),
    ]
    return [(name, value, limit, limit is None or value <= limit) for name, value, limit in rows]


def require_within(found: Estimate, budget: BudgetConfig) -> None:
    """Refuses a run whose estimate is above a limit.

    Raises:
        OpsdError: naming the first such limit.
    """
    for name, value, limit, holds in within(found, budget):
        if not holds:
            raise OpsdError(
                f"an estimate of {value:.2f} {name} with opsd.budget.max_{name}={limit:g} ({found.text().replace(chr(10), '; ')})",
                "a run stays within its budget, by what the contract permits or by opsd.budget.minutes_per_pair",
                "fewer rounds or pairs, tighter limits of the contract, a measured minutes_per_pair, or a larger budget",
            )


def record(run: RunDir, found: Estimate, budget: BudgetConfig) -> None:
    """Writes the estimate into the run's evidence, beside its limits, and where the report finds it."""
    for name, value, limit, holds in within(found, budget):
        run.evidence(f"budget.{name}", value, limit, None if limit is None else holds, found.text().splitlines()[0])
    write_json(run.path / FILE, dataclasses.asdict(found))
