"""The whole `opsd` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from verl_opsd.config.build import build_section
from verl_opsd.config.contradictions import check_sections
from verl_opsd.config.loss import LossConfig
from verl_opsd.config.sections import (
    ActivationsConfig,
    ActorBriefConfig,
    BriefConfig,
    BudgetConfig,
    CanaryConfig,
    EvaluationConfig,
    GatesConfig,
    SandboxConfig,
    TasksConfig,
    WorthConfig,
)
from verl_opsd.config.teacher import TeacherConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.reward import RewardConfig


@dataclass(frozen=True)
class OpsdConfig:
    """The whole section.

    Attributes:
        varies: the one field of the contract in which a corpus, or the jobs of a sweep, may differ; null: none.
        threads: threads of each worker process on the host processor; null: Ray's default, one, or OMP_NUM_THREADS.
        dry_run: check everything, print what the episodes will take, and stop with exit code 0.
        predictions: file of predictions (``evidence.predictions``), written down before anything starts.
    """

    recipe: str
    scale: Literal["local", "smollm", "cpu8", "gpu1", "gpu2", "gpu8"]
    mode: Literal["online", "offline", "evaluate"]
    tasks: TasksConfig
    brief: BriefConfig
    teacher: TeacherConfig
    loss: LossConfig
    contract: EvalContract
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)
    worth: WorthConfig = field(default_factory=WorthConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    dry_run: bool = False
    actor_brief: ActorBriefConfig = field(default_factory=ActorBriefConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    student: Literal["", "tiny", "warm", "smollm"] = ""
    corpus: str | None = None
    varies: str | None = None
    threads: int | None = None
    predictions: str | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> OpsdConfig:
        """Builds the section from plain values.

        Raises:
            OpsdError: an unknown or missing key, a value of the wrong type, or two keys that contradict each other.
        """
        config = build_section(cls, values, "opsd")
        check_sections(config)
        return config
