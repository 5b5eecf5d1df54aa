"""verl's agent loop for a pair: one session is one CooperBench episode, its rows are the branches of both agents."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.episode import run_episode
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.pair_briefs import agents_of
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.quarantine import Quarantine
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import InfraFault
from verl_opsd.evaluation.plan import record_fault
from verl_opsd.paths import cache_dir
from verl_opsd.privilege import ChatMarkers
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.gateway import Gateway, Generation, TokenBuilder
from verl_opsd.tokens.records import Episode, Sampling
from verl_opsd.tokens.store import EpisodeStore
from verl_opsd.verl_adapter.actor_briefs import HintedBuilder, actor_briefs
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder, model_type_of
from verl_opsd.verl_adapter.episode_rows import empty_row, episode_outputs
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS
from verl_opsd.verl_adapter.routes import teacher_of
from verl_opsd.verl_adapter.teacher_client import TeacherClient


class VerlEngine:
    """The gateway's engine over verl's server client (vLLM, SGLang or the embedded server)."""

    def __init__(self, client: Any, rollout_name: str, timeout_s: float, pair_key: str, attempt: int = 0):
        self._client, self._own, self._timeout_s = client, rollout_name in OWN_BACKENDS, timeout_s
        self._pair_key, self._again = pair_key, f"~{attempt}" if attempt else ""

    async def generate(self, prompt_ids: list[int], *, session: str, turn: int, sampling: Sampling) -> Generation:
        """One reply. Our own servers also get the session, which keys their cache, random numbers and scripts."""
        episode, agent = session.rsplit("/", 1)
        session = f"{episode}{self._again}/{agent}"
        own = {"session": f"{self._pair_key}|{session.replace('/', '|')}", "turn": turn} if self._own else {}
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "logprobs": True,
        }
        call = self._client.generate(request_id=session, prompt_ids=prompt_ids, sampling_params=params, **own)
        out = await asyncio.wait_for(call, self._timeout_s)
        version = out.extra_fields.get("global_steps")
        return Generation(
            token_ids=list(out.token_ids),
            logprobs=list(out.log_probs or []),
            stop_reason=str(out.stop_reason),
            model_version=-1 if version is None else int(version),
        )


@dataclass
class Runtime:
    """What all episodes of one agent-loop worker process share."""

    opsd: OpsdConfig
    run: RunDir
    contract: EvalContract
    store: EpisodeStore
    quarantine: Quarantine
    slots: asyncio.Semaphore
    agents: ThreadPoolExecutor
    grading: GradingPool
    tmp: Path
    teachers: TeacherClient

    @classmethod
    def create(cls, config: Any) -> Runtime:
        opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
        run = RunDir.from_env()
        contract = run.contract()
        workers = config.actor_rollout_ref.rollout.agent.num_workers
        pairs = max(1, contract.concurrency // workers)
        return cls(
            opsd=opsd,
            run=run,
            contract=contract,
            store=EpisodeStore(run.episodes, contract),
            quarantine=Quarantine(run.path),
            slots=asyncio.Semaphore(pairs),
            agents=ThreadPoolExecutor(2 * pairs, thread_name_prefix="opsd-agent"),
            grading=GradingPool(GradingPool.size(pairs, opsd.sandbox.graders)),
            tmp=Path(os.environ["OPSD_TMP"]),
            teachers=TeacherClient(opsd),
        )


_RUNTIMES: dict[str, Runtime] = {}


def runtime(config: Any) -> Runtime:
    """The runtime of this process for the run that it belongs to."""
    key = str(RunDir.from_env().path)
    if key not in _RUNTIMES:
        _RUNTIMES[key] = Runtime.create(config)
    return _RUNTIMES[key]


@register("opsd_pair")
class OpsdPairLoop(AgentLoopBase):
    """Runs one pair through the harness, grades it, stores the episode, and returns one output a branch."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        rt = runtime(self.config)
        info = kwargs["extra_info"]
        fields = dict(info["pair"])
        pair = PairTask(
            **{**fields, "dataset_dir": Path(fields["dataset_dir"]), "features": tuple(map(int, fields["features"]))}
        )
        episode_id = f"{pair.split}-{int(kwargs['global_steps']):05d}-{int(info['index']):05d}-{int(kwargs['session_id'])}"
        async with rt.slots:
            episode, fault = await self._episode(rt, pair, episode_id)
            for attempt in range(1, 1 + (rt.opsd.evaluation.retries if rt.opsd.mode == "evaluate" else 0)):
                if fault is None:
                    break
                record_fault(rt.run, episode, attempt - 1, str(fault))
                episode, fault = await self._episode(rt, pair, episode_id, attempt)
        # Rows come before the record: an episode that can't become rows is not on record, and the trainer misses it.
        outputs = episode_outputs(rt.opsd, pair, episode, self.tokenizer) if fault is None else []
        if pair.split == "train":
            await rt.teachers.add_signals(outputs)
        await asyncio.to_thread(rt.run.store_episode, rt.store, episode)
        if fault is not None and rt.opsd.mode == "evaluate":
            record_fault(rt.run, episode, rt.opsd.evaluation.retries, str(fault))
            # verl waits for a row and takes means of it; no rate is made of those
            unknown = dict.fromkeys(("features_passed", "pair_passed", "features_earned", "clean_merge"), float("nan"))
            return [empty_row(self.tokenizer, 0.0, unknown, -1, teacher_of(rt.opsd, pair))]
        if fault is not None:
            raise fault
        return outputs

    async def _episode(
        self, rt: Runtime, pair: PairTask, episode_id: str, attempt: int = 0
    ) -> tuple[Episode, InfraFault | None]:
        """One episode, and the infrastructure fault that ended it; a further ``attempt`` shares nothing with the ones before."""
        engine = VerlEngine(self.server_manager, self.rollout_config.name, rt.contract.wall_limit_s, pair.key, attempt)
        builder: TokenBuilder = VerlTokenBuilder(self.tokenizer, model_type_of(self.config.actor_rollout_ref.model.path))
        parser = VerlReplyParser(self.tokenizer, rt.contract.tool_parser)
        hints, sessions = actor_briefs(rt.opsd.actor_brief, pair), {}
        for agent in agents_of(pair):
            hinted = builder
            if agent in hints:
                ids = hints[agent].ids(self.tokenizer)
                hinted = HintedBuilder(builder, ids, ChatMarkers.from_tokenizer(self.tokenizer))
            sessions[agent] = Gateway(engine, hinted, parser, rt.contract).session(episode_id, agent)
        kinds = {a: hints[a].kind if a in hints else "none" for a in sessions}
        return await run_episode(
            pair,
            load_prepared(cache_dir(), pair.repo, pair.task_id),
            sessions,
            rt.contract,
            episode_id=episode_id,
            work_dir=rt.tmp,
            agents=rt.agents,
            grading=rt.grading,
            allow_unsafe=rt.opsd.sandbox.allow_unsafe,
            brief_kinds=kinds,
            quarantine=rt.quarantine,
        )
