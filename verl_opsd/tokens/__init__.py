"""Exact token ids: the gateway that records them, branches and trajectories, the episode store, training rows.

Names that need PyArrow or torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from verl_opsd.tokens.branches import build_trajectories, loss_positions, statistics
from verl_opsd.tokens.classes import token_classes
from verl_opsd.tokens.gateway import (
    ContextOverflow,
    Engine,
    Gateway,
    Generation,
    Reply,
    ReplyParser,
    Session,
    TokenBuilder,
    ToolCall,
)
from verl_opsd.tokens.records import (
    TOKEN_CLASSES,
    AgentOutcome,
    Episode,
    FeatureGrade,
    Grade,
    Sampling,
    Trajectory,
    TurnRecord,
)

_LAZY = {
    "EpisodeStore": "verl_opsd.tokens.store",
    "build_row": "verl_opsd.tokens.build_rows",
    "prompt_response": "verl_opsd.tokens.build_rows",
}

__all__ = [
    "TOKEN_CLASSES",
    "AgentOutcome",
    "ContextOverflow",
    "Engine",
    "Episode",
    "EpisodeStore",
    "FeatureGrade",
    "Gateway",
    "Generation",
    "Grade",
    "Reply",
    "ReplyParser",
    "Sampling",
    "Session",
    "TokenBuilder",
    "ToolCall",
    "Trajectory",
    "TurnRecord",
    "build_row",
    "build_trajectories",
    "loss_positions",
    "prompt_response",
    "statistics",
    "token_classes",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
