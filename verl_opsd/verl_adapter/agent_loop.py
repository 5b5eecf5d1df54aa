"""verl's agent loop for a pair: one session is one CooperBench episode, its rows are the branches of both agents."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verl_opsd.config import LossConfig, OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.grading import grade_pair
from verl_opsd.cooperbench.harness import run_pair
from verl_opsd.cooperbench.pair_briefs import agents_of, briefs_of
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.quarantine import Quarantine
from verl_opsd.cooperbench.reward import rewards
from verl_opsd.cooperbench.types import PairRun, PairTask
from verl_opsd.distill.weights import class_weight, max_prefix, position_weight, prefix_weight, segment_mask, turn_mask
from verl_opsd.errors import InfraFault
from verl_opsd.evaluation.plan import record_fault
from verl_opsd.paths import cache_dir
from verl_opsd.privilege import (
    Brief,
    ChatMarkers,
    NoBrief,
    TeacherView,
    ViewTooLong,
    none,
    require_unseen,
    stated,
    teacher_view,
)
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.build_rows import build_row, prompt_response
from verl_opsd.tokens.classes import token_classes
from verl_opsd.tokens.gateway import Gateway, Generation, TokenBuilder
from verl_opsd.tokens.records import TOKEN_CLASSES, Episode, Grade, Sampling, Trajectory, TurnRecord
from verl_opsd.tokens.rows import padding_fields
from verl_opsd.tokens.store import EpisodeStore
from verl_opsd.verl_adapter.actor_briefs import HintedBuilder, actor_briefs, copying_turns, hints_of, without_hint
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS
from verl_opsd.verl_adapter.routes import teacher_of
from verl_opsd.verl_adapter.teacher_client import TeacherClient


class OpsdOutput(AgentLoopOutput):
    """A row that carries this project's per-position fields beside verl's."""

    opsd_row: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields.update(fields.pop("opsd_row", None) or {})
        return fields


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
    grading: ThreadPoolExecutor
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
            grading=ThreadPoolExecutor(pairs, thread_name_prefix="opsd-grading"),
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


def briefs_for(opsd: OpsdConfig, pair: PairTask, episode: Episode | None = None) -> dict[str, Brief | NoBrief]:
    """Each agent's brief (``cooperbench.pair_briefs``); of an episode where there is one. Evaluation has no teacher, so no brief."""
    if pair.split != "train":
        return dict.fromkeys(agents_of(pair), none())
    patches = None if episode is None else {a.agent_id: a.patch for a in episode.agents}
    brief = opsd.brief
    return briefs_of(pair, brief.name, allow_answer=brief.allow_answer, files=brief.files, student_patch=patches)


def kept_turns(loss: LossConfig, turns: Sequence[TurnRecord]) -> set[int]:
    """Turns that carry loss: of a kind of ``turn_kinds``, and in one of the ranges ``turns``."""
    ranges = [range(*span) for span in loss.turns] if loss.turns is not None else None
    return {t.turn for t in turns if t.kind in loss.turn_kinds and (ranges is None or any(t.turn in r for r in ranges))}


def training_view(opsd: OpsdConfig, trajectory: Trajectory, brief: Brief, tokenizer: Any) -> TeacherView:
    """The teacher's view of one branch.

    Raises:
        OpsdError: the student's own first prompt holds text of the brief's answer.
        ViewTooLong: a pass is longer than ``opsd.brief.max_view_tokens``, or a reply fits into no window.
    """
    if brief.kind == "answer":
        first = int(np.argmax(trajectory.turn_index >= 0))
        whose = f"{trajectory.episode_id}/{trajectory.agent_id}"
        require_unseen(brief, tokenizer.decode(trajectory.input_ids[:first].tolist()), whose)
    return teacher_view(
        trajectory.input_ids,
        trajectory.loss_mask,
        brief.ids(tokenizer),
        opsd.brief.placement,
        ChatMarkers.from_tokenizer(tokenizer),
        user_turn=opsd.brief.user_turn,
        max_len=opsd.brief.max_view_tokens,
        window_context=opsd.brief.window_context,
    )


def training_row(opsd: OpsdConfig, trajectory: Trajectory, view: TeacherView, keep: set[int]) -> dict[str, torch.Tensor]:
    """The row of one branch. ``opsd_coef`` holds static weights until the trainer divides by the global denominator; the anchor's are
    1 at its positions: with ``anchor_positions=policy`` at every policy position, also where those are 0.

    Args:
        keep: turns that carry loss (:func:`kept_turns`).
    """
    anchor = torch.full((len(view.position),), float(opsd.loss.anchor > 0))
    row = build_row(trajectory, view, torch.ones_like(anchor), anchor)
    by_code = {TOKEN_CLASSES.index(name): w for name, w in dataclasses.asdict(opsd.loss.class_weights).items()}
    row["opsd_coef"] *= class_weight(row["opsd_class"], by_code) * turn_mask(row["opsd_turn"], keep)
    if opsd.loss.segments is not None:
        row["opsd_coef"] *= segment_mask(row["opsd_position"], opsd.loss.segments)
    if opsd.loss.turn_half_life is not None:
        row["opsd_coef"] *= position_weight(row["opsd_turn"], opsd.loss.turn_half_life)
    if opsd.loss.prefix_half_life is not None:
        row["opsd_coef"] *= prefix_weight(row["opsd_position"], row["opsd_turn"], opsd.loss.prefix_half_life)
    if opsd.loss.max_prefix is not None:
        row["opsd_coef"] *= max_prefix(row["opsd_position"], row["opsd_turn"], opsd.loss.max_prefix)
    if opsd.loss.anchor_positions == "loss":
        row["opsd_anchor"] *= row["opsd_coef"] != 0
    return row


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
        await asyncio.get_running_loop().run_in_executor(rt.grading, rt.run.store_episode, rt.store, episode)
        if fault is not None and rt.opsd.mode == "evaluate":
            record_fault(rt.run, episode, rt.opsd.evaluation.retries, str(fault))
            # verl waits for a row and takes means of it; no rate is made of those
            unknown = dict.fromkeys(("features_passed", "pair_passed", "features_earned", "clean_merge"), float("nan"))
            return [_empty_row(self.tokenizer, 0.0, unknown, -1, teacher_of(rt.opsd, pair))]
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
        started, fault, grade, done = time.time(), None, None, None
        prepared = load_prepared(cache_dir(), pair.repo, pair.task_id)
        try:
            if (known := rt.quarantine.fault(pair.key)) is not None:
                raise known
            done = await run_pair(
                pair,
                prepared,
                sessions,
                rt.contract,
                work_dir=rt.tmp,
                loop=asyncio.get_running_loop(),
                executor=rt.agents,
                sandbox_backend=rt.opsd.sandbox.backend,
                allow_unsafe=rt.opsd.sandbox.allow_unsafe,
                episode_id=episode_id,
            )
            grade = await asyncio.get_running_loop().run_in_executor(
                rt.grading,
                lambda: grade_pair(
                    pair,
                    prepared,
                    done.agents[0].patch,
                    done.agents[1].patch,
                    backend=rt.opsd.sandbox.backend,
                    allow_unsafe=rt.opsd.sandbox.allow_unsafe,
                    timeout_s=rt.contract.grade_timeout_s,
                ),
            )
        except InfraFault as e:
            fault = e
            rt.quarantine.note(pair.key, e)
        kinds = {a: hints[a].kind if a in hints else "none" for a in sessions}
        return _record(rt, pair, prepared.near_benchmark, episode_id, sessions, kinds, done, grade, fault, started), fault


def episode_outputs(opsd: OpsdConfig, pair: PairTask, episode: Episode, tokenizer: Any) -> list[AgentLoopOutput]:
    """The rows of a scored episode: every branch of both agents that holds policy tokens, in the order agent1, agent2."""
    assert episode.grade is not None
    grade = episode.grade
    earned = rewards(grade, episode.agents, opsd.reward, opsd.contract.step_limit)
    info = {
        "reward": earned["total"],
        **{name: value for name, value in earned.items() if name.startswith("shaped_")},
        "features_passed": sum(f.passed for f in grade.features),
        "pair_passed": int(all(f.passed for f in grade.features)),
        "features_earned": sum(f.earned for f in grade.features),
        "clean_merge": int(grade.merge_kind == "clean"),
    }
    outputs: list[AgentLoopOutput] = []
    teacher = teacher_of(opsd, pair)
    left_out: dict[str, str] = {}
    windows: list[str] = []
    hints = hints_of(opsd, pair, episode) if pair.split == "train" else {}
    markers = ChatMarkers.from_tokenizer(tokenizer)
    for agent, brief in briefs_for(opsd, pair, episode).items():
        turns = [t for t in episode.turns if t.agent_id == agent]
        if isinstance(brief, NoBrief):
            RunDir.from_env().evidence("no_brief", agent, None, None, f"{episode.episode_id}: {brief.what}")
            left_out |= {f"{agent}/{t.branch}": "no brief" for t in turns}
            continue
        keep = kept_turns(opsd.loss, turns)
        if agent in hints:
            texts = {t.turn: tokenizer.decode(t.response_ids.tolist()) for t in turns}
            copied = copying_turns(pair, hints[agent], texts)
            keep -= set(copied)
            detail = f"{episode.episode_id}/{agent}: turns that copy code of the hint {hints[agent].name} carry no loss: {sorted(copied)}"
            RunDir.from_env().evidence("hint_copied", len(copied), None, None, detail)
        branches = build_trajectories(turns, classify=lambda ids: token_classes(ids.tolist(), tokenizer.decode))
        for branch in branches:
            if not branch.loss_mask.any():
                continue
            if agent in hints:
                branch = without_hint(branch, hints[agent].ids(tokenizer), markers)
            prompt, response, mask, logprobs = prompt_response(branch)
            try:
                view = training_view(opsd, branch, brief, tokenizer)
            except ViewTooLong:
                if opsd.brief.too_long != "leave_out":
                    raise
                left_out[f"{agent}/{branch.branch}"] = "view too long"
                continue
            if view.windowed:
                windows.append(f"{agent} branch {branch.branch}: {stated(view)}")
            outputs.append(
                OpsdOutput(
                    prompt_ids=prompt,
                    response_ids=response,
                    response_mask=mask,
                    response_logprobs=logprobs,
                    reward_score=earned["total"],
                    num_turns=branch.n_turns,
                    metrics=AgentLoopMetrics(),
                    opsd_row=training_row(opsd, branch, view, keep) | teacher,
                    extra_fields=_extra(branch.model_version, info),
                )
            )
    if too_long := sum(reason == "view too long" for reason in left_out.values()):
        where = f"branches of {episode.episode_id}"
        RunDir.from_env().evidence("view_too_long", too_long, opsd.brief.max_view_tokens, None, where)
    if pair.split == "train":
        RunDir.from_env().write_left_out(episode.episode_id, left_out)
    if windows:
        detail = f"branches of {episode.episode_id} in windows; {'; '.join(windows)}"
        RunDir.from_env().evidence("view_windows", len(windows), opsd.brief.max_view_tokens, None, detail)
    return outputs or [_empty_row(tokenizer, earned["total"], info, episode.model_version, teacher)]


def _empty_row(
    tokenizer: Any, reward: float, info: dict[str, Any], version: int, teacher: dict[str, torch.Tensor]
) -> AgentLoopOutput:
    """A pair that produced no policy token still has a grade: one row without any loss position."""
    end = tokenizer.eos_token_id
    return OpsdOutput(
        prompt_ids=[end],
        response_ids=[end],
        response_mask=[0],
        response_logprobs=[0.0],
        reward_score=reward,
        num_turns=0,
        metrics=AgentLoopMetrics(),
        opsd_row=padding_fields(torch.tensor([end, end])) | teacher,
        extra_fields=_extra((version, version), info),
    )


def model_type_of(path: str) -> str:
    """The root ``model_type`` of a model folder or hub name."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).model_type


def _extra(version: tuple[int, int], reward_info: dict[str, Any]) -> dict[str, Any]:
    return {"min_global_steps": version[0], "max_global_steps": version[1], "reward_extra_info": dict(reward_info)}


def _record(
    rt: Runtime,
    pair: PairTask,
    near_benchmark: str,
    episode_id: str,
    sessions: dict[str, Any],
    kinds: dict[str, Any],
    done: PairRun | None,
    grade: Grade | None,
    fault: InfraFault | None,
    started: float,
) -> Episode:
    turns = tuple(t for s in sessions.values() for t in s.records())
    return Episode(
        episode_id=episode_id,
        repo=pair.repo,
        task_id=pair.task_id,
        features=pair.features,
        split=pair.split,
        contract_hash=rt.contract.hash,
        outcome="scored" if fault is None else f"infra:{fault.kind}",
        turns=turns,
        agents=() if done is None else done.agents,
        grade=grade,
        brief_kinds=kinds,
        model_version=max((t.model_version for t in turns), default=-1),
        near_benchmark=near_benchmark,
        t_start=started,
        t_end=time.time(),
        messages={} if done is None else done.messages,
    )
