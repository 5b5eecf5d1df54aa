"""Plain data that the rooms of the environment pass to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl_opsd.tokens.boundary import Message
from verl_opsd.tokens.gateway import Reply, Tools
from verl_opsd.tokens.records import AgentOutcome, TurnKind


@dataclass(frozen=True)
class PairTask:
    """Two features of one task. ``features`` are sorted; agent1 gets the first."""

    dataset_dir: Path
    repo: str
    task_id: int
    features: tuple[int, int]
    split: str = "train"

    @property
    def key(self) -> str:
        """Stable name: ``repo/task<ID>/f<A>_f<B>``."""
        return f"{self.repo}/task{self.task_id}/f{self.features[0]}_f{self.features[1]}"

    @property
    def task_dir(self) -> Path:
        """Folder of the task in CooperBench's layout."""
        return self.dataset_dir / self.repo / f"task{self.task_id}"

    def feature_text(self, feature_id: int) -> str:
        """The task text that an agent sees."""
        return (self.task_dir / f"feature{feature_id}" / "feature.md").read_text()


@dataclass(frozen=True)
class PreparedTask:
    """A task made ready to run on this machine: everything a sandbox needs, by path.

    Attributes:
        base: git repository with exactly one commit (fixed author and date), the tree that agents start from.
        base_sha: that commit.
        runner: the task's ``runner.sh``.
        python_prefix: virtual environment with the tests' requirements, bound read-only at its own path; never holds a
            later release of the task's own package.
        ro_binds: further read-only (host path, path inside) pairs.
        env: environment of commands and tests (PYTHONPATH, ...).
        tree_hash: SHA-256 over the base tree and the task's files.
        near_benchmark: empty for a tree that is what its task claims; otherwise why a score on it is not a CooperBench score
            (stamped on every episode and report).
    """

    repo: str
    task_id: int
    base: Path
    base_sha: str
    runner: Path
    python_prefix: Path
    ro_binds: tuple[tuple[Path, str], ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    tree_hash: str = ""
    near_benchmark: str = ""


@dataclass(frozen=True)
class PairRun:
    """What a pair did, before grading: outcomes in the order agent1, agent2, and each agent's harness messages."""

    agents: tuple[AgentOutcome, AgentOutcome]
    messages: dict[str, list[dict[str, Any]]]
    seconds: float


class ChatSession(Protocol):
    """What an agent needs of its session at the gateway; both methods are called on the event loop."""

    async def chat(self, messages: Sequence[Message], tools: Tools = None, *, kind: TurnKind = "policy") -> Reply:
        """One model call.

        Raises:
            ContextOverflow: the prompt and a reply don't fit into the contract's context.
            InfraFault: the engine failed.
        """
        ...

    def mark(self, turn: int, kind: TurnKind) -> None:
        """Changes the kind of a recorded turn."""
        ...
