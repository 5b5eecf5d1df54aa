"""One episode, from a pair's sessions to its record. A fault of the infrastructure is an outcome of the record, not an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.harness import run_pair
from verl_opsd.cooperbench.quarantine import Quarantine
from verl_opsd.cooperbench.types import ChatSession, PairRun, PairTask, PreparedTask
from verl_opsd.errors import InfraFault
from verl_opsd.tokens.records import BriefKind, Episode, Grade, TurnRecord


class RecordedSession(ChatSession, Protocol):
    """A session that tells its turns."""

    def records(self) -> Sequence[TurnRecord]:
        """Turns so far, in order; none where no token ids pass."""
        ...


async def run_episode(
    pair: PairTask,
    prepared: PreparedTask,
    sessions: Mapping[str, RecordedSession],
    contract: EvalContract,
    *,
    episode_id: str,
    work_dir: Path,
    agents: ThreadPoolExecutor,
    grading: GradingPool,
    allow_unsafe: bool = False,
    brief_kinds: Mapping[str, BriefKind] | None = None,
    quarantine: Quarantine | None = None,
) -> tuple[Episode, InfraFault | None]:
    """Runs and grades a pair; the episode, and the fault that ended it.

    Args:
        agents: threads of the agents, two for each pair that runs at once.
        brief_kinds: what each agent's own prompt held beyond its task.
        quarantine: a pair that is on it is not run; a fault is noted on it.

    Raises:
        OpsdError: as :func:`verl_opsd.cooperbench.harness.run_pair`.
    """
    started = time.time()
    done: PairRun | None = None
    grade: Grade | None = None
    fault: InfraFault | None = None
    try:
        if quarantine is not None and (known := quarantine.fault(pair.key)) is not None:
            raise known
        done = await run_pair(
            pair,
            prepared,
            sessions,
            contract,
            work_dir=work_dir,
            loop=asyncio.get_running_loop(),
            executor=agents,
            sandbox_backend=contract.sandbox,
            allow_unsafe=allow_unsafe,
            episode_id=episode_id,
        )
        patches = [agent.patch for agent in done.agents]
        grade = await grading.grade(pair, prepared, patches, contract, allow_unsafe=allow_unsafe)
    except InfraFault as error:
        fault = error
        if quarantine is not None:
            quarantine.note(pair.key, error)
    turns = tuple(turn for session in sessions.values() for turn in session.records())
    episode = Episode(
        episode_id=episode_id,
        repo=pair.repo,
        task_id=pair.task_id,
        features=pair.features,
        split=pair.split,
        contract_hash=contract.hash,
        outcome="scored" if fault is None else f"infra:{fault.kind}",
        turns=turns,
        agents=() if done is None else done.agents,
        grade=grade,
        brief_kinds=dict(brief_kinds or {}),
        model_version=max((turn.model_version for turn in turns), default=-1),
        near_benchmark=prepared.near_benchmark,
        t_start=started,
        t_end=time.time(),
        messages={} if done is None else done.messages,
    )
    return episode, fault
