"""An episode's rows: every branch of both agents with the teacher's view and the static weights of its loss positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_opsd.config import LossConfig, OpsdConfig
from verl_opsd.cooperbench.pair_briefs import agents_of, briefs_of
from verl_opsd.cooperbench.reward import rewards
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.distill.weights import class_weight, max_prefix, position_weight, prefix_weight, segment_mask, turn_mask
from verl_opsd.privilege import (
    Brief,
    ChatMarkers,
    NoBrief,
    TeacherView,
    ViewTooLong,
    chat_blocks,
    none,
    require_unseen,
    stated,
    teacher_view,
)
from verl_opsd.privilege.hints import without_hint
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.build_rows import build_row, prompt_response
from verl_opsd.tokens.classes import token_classes
from verl_opsd.tokens.records import TOKEN_CLASSES, Episode, Ids, Trajectory, TurnRecord
from verl_opsd.tokens.rows import padding_fields, row_name
from verl_opsd.verl_adapter.actor_briefs import collected_with, copying_turns, hints_of
from verl_opsd.verl_adapter.routes import teacher_of


class OpsdOutput(AgentLoopOutput):
    """A row that carries this project's per-position fields beside verl's."""

    opsd_row: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields.update(fields.pop("opsd_row", None) or {})
        return fields


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


def own_prompt(trajectory: Trajectory, markers: ChatMarkers) -> Ids:
    """What the harness told an agent before it acted. A branch that forks from another one begins with history, or with a summary of it:
    there its system message and first user message."""
    if trajectory.parent_branch < 0:
        return trajectory.input_ids[: int(np.argmax(trajectory.turn_index >= 0))]
    first = next((b.close for b in chat_blocks(trajectory.input_ids, markers) if b.role == "user"), 0)
    return trajectory.input_ids[:first]


def training_view(
    opsd: OpsdConfig, trajectory: Trajectory, brief: Brief, tokenizer: Any, scored: bool = True, told: Sequence[str] = ()
) -> TeacherView:
    """The teacher's view of one branch.

    Args:
        scored: False: nobody reads the view (evaluation), so no limit binds it.
        told: the agent's task text, for :func:`require_unseen`.

    Raises:
        OpsdError: the student's own first prompt holds text of the brief's answer.
        ViewTooLong: a pass is longer than ``opsd.brief.max_view_tokens``, or a reply fits into no window.
    """
    markers = ChatMarkers.from_tokenizer(tokenizer)
    if brief.kind == "answer":
        whose = f"{trajectory.episode_id}/{trajectory.agent_id}"
        require_unseen(brief, tokenizer.decode(own_prompt(trajectory, markers).tolist()), whose, told)
    return teacher_view(
        trajectory.input_ids,
        trajectory.loss_mask,
        brief.ids(tokenizer),
        opsd.brief.placement,
        markers,
        user_turn=opsd.brief.user_turn,
        max_len=opsd.brief.max_view_tokens if scored else None,
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
    hints = hints_of(collected_with(opsd), pair, episode) if pair.split == "train" else {}
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
                view = training_view(
                    opsd, branch, brief, tokenizer, pair.split == "train", [pair.feature_text(agents_of(pair)[agent])]
                )
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
                    opsd_row=training_row(opsd, branch, view, keep)
                    | {"opsd_name": row_name(episode.episode_id, agent, branch.branch)}
                    | teacher,
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
    return outputs or [empty_row(tokenizer, earned["total"], info, episode.model_version, teacher)]


def empty_row(
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
        opsd_row=padding_fields(torch.tensor([end, end])) | {"opsd_name": torch.zeros(0, dtype=torch.int64)} | teacher,
        extra_fields=_extra((version, version), info),
    )


def _extra(version: tuple[int, int], reward_info: dict[str, Any]) -> dict[str, Any]:
    return {"min_global_steps": version[0], "max_global_steps": version[1], "reward_extra_info": dict(reward_info)}
