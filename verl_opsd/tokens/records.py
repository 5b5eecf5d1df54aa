"""Turn records, trajectories and episodes: what is known about a rollout, in exact token ids.

A branch's ids are stored once; a turn points into its branch. Units: tokens are int32 ids, times are seconds since the epoch,
log-probabilities are natural logarithms at temperature 1 unless ``sampling`` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
TurnKind = Literal["policy", "summarizer", "malformed"]
ForkReason = Literal["start", "compaction", "retry", "template_rewrite", "thinking_stripped"]
BriefKind = Literal["none", "scope", "guidance", "answer"]

#: Classes of a policy token, in the order of their codes in ``Trajectory.token_class``; -1 marks context tokens.
TOKEN_CLASSES = ("think", "message", "command", "code", "other")


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the beginning that both share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


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
    """Result of one feature's hidden tests on the merged tree.

    Attributes:
        passed: the harness' own verdict, which headlines count.
        exit_code: None where the suite did not run.
        strict: this project's verdict, which reward follows; None where nobody gave one (logs of others).
        note: why ``strict`` differs from ``passed``; empty where it does not.
    """

    feature_id: int
    passed: bool
    tests_passed: int
    tests_failed: int
    exit_code: int | None
    output: str = ""
    strict: bool | None = None
    note: str = ""

    @property
    def earned(self) -> bool:
        """Whether the feature earns reward: the strict verdict, or the harness' where there is no other."""
        return self.passed if self.strict is None else self.strict


@dataclass(frozen=True)
class Grade:
    """Grade of a pair. ``merge`` and ``strategy`` follow the harness: clean | identical | conflicts | missing_input | error, and
    which tree was tested. ``strict_strategy`` is the tree of the strict verdicts."""

    merge: str
    strategy: str | None
    apply_status: dict[str, str]
    features: tuple[FeatureGrade, FeatureGrade]
    seconds: float = 0.0
    strict_strategy: str | None = None

    @property
    def reward(self) -> float:
        """Half a point for each feature that passes by the strict verdict: 0, 0.5 or 1."""
        return 0.5 * sum(f.earned for f in self.features)

    @property
    def merge_kind(self) -> str:
        """``merge``, with empty patches apart, which the harness calls clean: ``clean_one_empty``, ``both_empty``."""
        empty = sum(status == "skipped" for status in self.apply_status.values())
        if self.merge != "clean" or not empty:
            return self.merge
        return "both_empty" if empty == 2 else "clean_one_empty"

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for each feature whose strict verdict is not the harness' own."""
        word = {True: "passes", False: "fails"}
        return tuple(
            f"feature {f.feature_id} {word[f.passed]} for the harness and {word[f.strict]} strictly: {f.note}"
            for f in self.features
            if f.strict is not None and f.strict != f.passed
        )


@dataclass(frozen=True)
class AgentOutcome:
    """How one agent's run ended.

    Attributes:
        status: Submitted | LimitsExceeded | ... as the harness names it.
        prompt_tokens, completion_tokens: read and written in all calls that were answered, those whose reply was refused as
            malformed and summaries of a history included; None where nobody counted them (logs of others).
    """

    agent_id: str
    feature_id: int
    status: str
    steps: int
    patch: str
    sent_messages: int
    opened_pr: bool
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Episode:
    """One pair of agents on one task.

    ``outcome`` is ``scored`` or ``infra:<kind>``; only a scored episode has a grade and a reward. ``brief_kinds``: what each
    agent's own prompt held beyond its task; agents that are not named had no brief.
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
    brief_kinds: dict[str, BriefKind]
    model_version: int
    near_benchmark: str = ""
    t_start: float = 0.0
    t_end: float = 0.0
    messages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def scored(self) -> bool:
        """Whether a grade exists; infrastructure faults have none."""
        return self.outcome == "scored"

    @property
    def pair_key(self) -> str:
        """Stable name of the pair, as of its task: ``repo/task<ID>/f<A>_f<B>``."""
        return f"{self.repo}/task{self.task_id}/f{self.features[0]}_f{self.features[1]}"

    @property
    def actor_brief_kind(self) -> BriefKind:
        """The strongest brief in a prompt of the pair."""
        kinds: tuple[BriefKind, ...] = get_args(BriefKind)
        return max(self.brief_kinds.values(), key=kinds.index, default="none")

    @property
    def in_standings(self) -> bool:
        """Whether it may count for a model: it was scored, and no agent read an answer."""
        return self.scored and self.actor_brief_kind != "answer"
