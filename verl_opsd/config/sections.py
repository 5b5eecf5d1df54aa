"""Sections of the configuration: which tasks, what the teacher reads, and what a run may do and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TasksConfig:
    """Which pairs are trained on and which are evaluated.

    Attributes:
        dataset: ``pocket`` (ships with the package) or a folder in CooperBench's layout.
        train, eval: names or paths of subsets; an evaluation has no ``train``.
        test: the locked test split, which no run trains or evaluates on; null: there is none.
        look: why this run may evaluate on the locked split; recorded in its evidence. null: it may not.
        prepare: prepare and qualify missing tasks before the run; only for ``pocket``, where it takes seconds.
        disjoint: what no two of the three splits may share: ``repo``, ``task`` or ``feature``.
        max_train, max_eval: the first pairs of a subset only; null takes all.
    """

    dataset: str
    train: str | None
    eval: str
    test: str | None = None
    look: str | None = None
    prepare: bool = False
    disjoint: Literal["repo", "task", "feature"] = "repo"
    max_train: int | None = None
    max_eval: int | None = None


@dataclass(frozen=True)
class BriefConfig:
    """The teacher's privileged context and where it stands in the teacher's view.

    Attributes:
        name: a registered brief, or several joined by ``+``.
        files: folder of authored workflows, one a pair; for the brief ``workflow`` and no other.
        max_view_tokens: tokens of one pass of the teacher; null: the positions that the scoring model has.
        too_long: what happens to a branch whose view is longer: ``refuse`` stops at launch where one may come, ``leave_out`` gives
            the branch no row and records it, ``window`` scores it in windows and records what each holds (``privilege.windows``).
        window_context: of ``window``, tokens of the branch that a window holds before its first scored reply, at least.
    """

    name: str
    placement: Literal["system", "last_user"] = "system"
    user_turn: Literal["block", "message"] = "block"
    allow_answer: bool = False
    files: str | None = None
    max_view_tokens: int | None = None
    too_long: Literal["refuse", "leave_out", "window"] = "refuse"
    window_context: int | None = None


@dataclass(frozen=True)
class ActorBriefConfig:
    """A brief in the actors' own prompts, for evaluating a context or collecting with a hint; ``none``: there is none.

    Attributes:
        name: a registered brief, or several joined by ``+``.
        where: which episodes: ``eval``, ``train``, ``both``. Before training a hint is taken out of the ids again.
        allow_answer: let it hold answers; such episodes count in no standings.
        files: as in ``BriefConfig``.
    """

    name: str = "none"
    where: Literal["eval", "train", "both"] = "eval"
    allow_answer: bool = False
    files: str | None = None


@dataclass(frozen=True)
class ActivationsConfig:
    """Which layers of the student keep their activations for backward. The others are checkpointed: they keep their input and run
    forward twice.

    Attributes:
        keep: ``verl``: all or none, as actor_rollout_ref.model.enable_gradient_checkpointing says. ``none``; ``linear_attention`` or
            ``full_attention``, every layer of that kind; ``auto``, as many layers as the devices hold by the planner's formulas
            (``opsd plan``) at the longest forward.
        offload: inputs of checkpointed layers wait in the host's memory; null: only where ``auto`` does not fit without.
        device_gb: of ``auto``, memory of a device, 1e9 bytes; null: of the smallest one that a student's rank has.
    """

    keep: Literal["verl", "none", "linear_attention", "full_attention", "auto"] = "verl"
    offload: bool | None = None
    device_gb: float | None = None


@dataclass(frozen=True)
class GatesConfig:
    """Thresholds written down before the run; all fail closed. Divergences in nats a token, means over loss positions;
    ``publish_follow_min`` and ``publish_rehearsal_max`` are shares of 1, for rollout servers of verl's; ``publish_late_tokens`` is the length of a
    sequence, of the whole context where that is shorter; ``identity_end_max`` is of runs whose teacher is the student's own
    base without a brief; ``device_identity_max`` is of a device teacher that is the student's own model."""

    identity_max: float = 1e-6
    device_identity_max: float = 1e-6
    shifted_min: float = 1e-3
    brief_effect_min: float = 1e-6
    publish_kl_max: float = 1e-6
    identity_end_max: float = 1e-6
    publish_follow_min: float = 0.5
    publish_rehearsal_max: float = 0.1
    publish_late_max: float = 1e-6
    publish_late_tokens: int = 2048


@dataclass(frozen=True)
class WorthConfig:
    """The worth-distilling gate: ``matrix`` is a file of ``opsd teacher-matrix``; ``override`` goes on without it or in spite of it, and
    is recorded with its reason."""

    matrix: str | None = None
    override: str | None = None


@dataclass(frozen=True)
class SandboxConfig:
    """Where agents' commands and hidden tests run.

    Attributes:
        allow_unsafe: permits ``process``, which isolates nothing.
        graders: processes that grade, of each agent-loop worker; null: one for each pair at once, at most one a processor.
    """

    backend: Literal["bubblewrap", "process", "docker"] = "bubblewrap"
    allow_unsafe: bool = False
    graders: int | None = None


@dataclass(frozen=True)
class BudgetConfig:
    """What a run's episodes may cost, by an estimate before the start.

    Attributes:
        minutes_per_pair: that an episode with its grade takes, measured; null: what the contract's limits permit at most.
        sandbox_usd_per_hour: price of one sandbox.
        max_hours, max_gpu_hours, max_sandbox_usd: a run whose estimate is above one is refused; null: no limit.
    """

    minutes_per_pair: float | None = None
    sandbox_usd_per_hour: float = 0.0
    max_hours: float | None = None
    max_gpu_hours: float | None = None
    max_sandbox_usd: float | None = None


@dataclass(frozen=True)
class EvaluationConfig:
    """Full-set evaluation (mode ``evaluate``).

    Attributes:
        seeds: runs of each pair.
        retries: how often an episode that an infrastructure fault ended runs again before it is reported as void.
        alone: grade each patch alone on both suites too: who did the work.
    """

    seeds: int = 1
    retries: int = 2
    alone: bool = True


@dataclass(frozen=True)
class CanaryConfig:
    """Limits on how the policy acts while it is trained (``evaluation.canary``).

    Attributes:
        every: rounds between checks, each over the training episodes of these rounds; null: no check.
        limits: file of limits; null: the one that ships with the package.
    """

    every: int | None = None
    limits: str | None = None
