"""Turn records, trajectories and episodes: what is known about a rollout, in exact token ids.

A branch's ids are stored once; a turn points into its branch. Units: tokens are int32 ids, times are seconds since the epoch,
log-probabilities are natural logarithms at temperature 1 unless ``sampling`` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
TurnKind = Literal["policy", "summarizer", "malformed"]
ForkReason = Literal["start", "compaction", "retry", "template_rewrite", "thinking_stripped"]
BriefKind = Literal["none", "scope", "guidance", "answer"]

#: Classes of a policy token, in the order of their codes in ``Trajectory.token_class``; -1 marks context tokens.
TOKEN_CLASSES = ("think", "message", "command", "code", "other")


@dataclass(frozen=True)
class Sampling:
    """How a reply was sampled. ``top_k=-1``: no limit."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True)
class TurnRecord:
    """One call of the model by one agent.

    The call's prompt is ``branch.ids[: start + len(new_ids)]`` and its reply follows: a turn stores only the ids that it
    added to its branch (``new_ids``, context) and the reply (``response_ids``, policy tokens, the turn-end token included
    when the model produced it).
    """

    episode_id: str
    agent_id: str
    turn: int
    branch: int
    start: int
    new_ids: Ids
    response_ids: Ids
    response_logprobs: NDArray[np.float32]
    stop_reason: str
    kind: TurnKind
    sampling: Sampling
    model_version: int
    contract_hash: str
    t_start: float
    t_end: float
    parent_branch: int = -1
    fork_position: int = 0
    fork_reason: ForkReason = "start"
    messages_ref: str = ""

    @property
    def prompt_len(self) -> int:
        """Tokens that the model read in this call."""
        return self.start + len(self.new_ids)

    @property
    def end(self) -> int:
        """Position in the branch just after the reply."""
        return self.prompt_len + len(self.response_ids)


@dataclass(frozen=True)
class Trajectory:
    """One branch of one agent: every token read and written along it.

    Shapes: all arrays have length T. ``loss_mask`` is 1 exactly on policy tokens whose loss belongs to this branch;
    ``turn_index`` is the turn that wrote a policy token, -1 on context; ``token_class`` indexes :data:`TOKEN_CLASSES`, -1
    on context; ``logprobs`` are the rollout's log-probabilities, 0 on context.
    """

    episode_id: str
    agent_id: str
    branch: int
    input_ids: Ids
    loss_mask: NDArray[np.int8]
    turn_index: NDArray[np.int32]
    token_class: NDArray[np.int8]
    logprobs: NDArray[np.float32]
    contract_hash: str
    model_version: tuple[int, int]
    parent_branch: int = -1
    fork_position: int = 0
    fork_reason: ForkReason = "start"
    n_turns: int = 0


@dataclass(frozen=True)
class FeatureGrade:
    """Result of one feature's hidden tests on the merged tree."""

    feature_id: int
    passed: bool
    tests_passed: int
    tests_failed: int
    exit_code: int | None
    output: str = ""


@dataclass(frozen=True)
class Grade:
    """Grade of a pair. ``merge`` follows the harness: clean | identical | conflicts | missing_input | error."""

    merge: str
    strategy: str | None
    apply_status: dict[str, str]
    features: tuple[FeatureGrade, FeatureGrade]
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        """Half a point for each feature that passes on the merged tree: 0, 0.5 or 1."""
        return 0.5 * sum(f.passed for f in self.features)


@dataclass(frozen=True)
class AgentOutcome:
    """How one agent's run ended. ``status``: Submitted | LimitsExceeded | ... as the harness names it."""

    agent_id: str
    feature_id: int
    status: str
    steps: int
    patch: str
    sent_messages: int
    opened_pr: bool
    error: str | None = None


@dataclass(frozen=True)
class Episode:
    """One pair of agents on one task.

    ``outcome`` is ``scored`` or ``infra:<kind>``; only a scored episode has a grade and a reward.
    """

    episode_id: str
    repo: str
    task_id: int
    features: tuple[int, int]
    split: str
    contract_hash: str
    outcome: str
    turns: tuple[TurnRecord, ...]
    agents: tuple[AgentOutcome, ...]
    grade: Grade | None
    actor_brief_kind: BriefKind
    model_version: int
    near_benchmark: str = ""
    t_start: float = 0.0
    t_end: float = 0.0
    messages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def scored(self) -> bool:
        """Whether a grade exists; infrastructure faults have none."""
        return self.outcome == "scored"
