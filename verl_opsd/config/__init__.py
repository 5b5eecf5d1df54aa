"""The `opsd` section of the configuration: frozen dataclasses, unknown keys and contradictions are refused."""

from verl_opsd.config.build import build_section
from verl_opsd.config.loss import ClassWeights, GateConfig, LossConfig, ThresholdConfig
from verl_opsd.config.opsd import OpsdConfig
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
from verl_opsd.config.teacher import MemberConfig, ModelTeacher, TeacherConfig

__all__ = [
    "ActivationsConfig",
    "ActorBriefConfig",
    "BriefConfig",
    "BudgetConfig",
    "CanaryConfig",
    "ClassWeights",
    "EvaluationConfig",
    "GateConfig",
    "GatesConfig",
    "LossConfig",
    "MemberConfig",
    "ModelTeacher",
    "OpsdConfig",
    "SandboxConfig",
    "TasksConfig",
    "TeacherConfig",
    "ThresholdConfig",
    "WorthConfig",
    "build_section",
]
