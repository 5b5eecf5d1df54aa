"""Briefs in the actors' own prompts: for evaluating a context (``opsd teacher-matrix``) and for collecting with a hint.

The hint stands where the teacher's view has it, at the end of the first system message, as its own ids between those of the message: it can
be taken out by index, and what is left are the very ids that the policy would have read and wrote.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_opsd.config import ActorBriefConfig, OpsdConfig
from verl_opsd.cooperbench.pair_briefs import agents_of, base_tree, briefs_of, patch_of, tree_texts
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import Brief, ChatMarkers, NoBrief, chat_blocks, splice
from verl_opsd.privilege.audit import gold_in_replies
from verl_opsd.privilege.hints import system_end
from verl_opsd.tokens.gateway import TokenBuilder, Tools
from verl_opsd.tokens.records import Episode


class HintedBuilder:
    """A :class:`~verl_opsd.tokens.gateway.TokenBuilder` whose whole prompts hold a hint at the end of the system message."""

    def __init__(self, inner: TokenBuilder, hint_ids: list[int], markers: ChatMarkers):
        self._inner, self._hint, self._markers = inner, np.asarray(hint_ids, np.int32), markers

    def initial(self, messages: list[dict[str, Any]], tools: Tools) -> list[int]:
        """Ids of a whole prompt with the hint; the same where a conversation is rendered again."""
        ids = np.asarray(self._inner.initial(messages, tools), np.int32)
        return splice(ids, system_end(ids, self._markers), self._hint, chat_blocks(ids, self._markers)).tolist()

    def extend(self, previous: list[dict[str, Any]], updated: list[dict[str, Any]], ids: list[int], tools: Tools) -> list[int]:
        """Ids to append after ``ids``, which hold the hint already."""
        return self._inner.extend(previous, updated, ids, tools)

    def without_reasoning(self, ids: list[int]) -> list[int]:
        """A reply's ids without its reasoning."""
        return self._inner.without_reasoning(ids)


def actor_briefs(config: ActorBriefConfig, pair: PairTask) -> dict[str, Brief]:
    """Each agent's brief for its own prompt; none where the split's agents have none.

    Raises:
        OpsdError: see :func:`verl_opsd.privilege.make_brief`, or a brief that only an episode's end would give.
    """
    if config.name == "none" or config.where not in ("both", pair.split):
        return {}
    nothing_yet = dict.fromkeys(agents_of(pair), "")
    made = briefs_of(pair, config.name, allow_answer=config.allow_answer, files=config.files, student_patch=nothing_yet)
    for agent, brief in made.items():
        if isinstance(brief, NoBrief):
            raise OpsdError(
                f"{pair.key}: no brief {config.name} for {agent} before it acts",
                "an actor reads its brief before its first reply",
                brief.way_out,
            )
    return {agent: brief for agent, brief in made.items() if isinstance(brief, Brief)}


def collected_with(opsd: OpsdConfig) -> ActorBriefConfig:
    """What the actors of the episodes that this run trains on had read: its own, or that of the run that collected the corpus."""
    if opsd.corpus is None:
        return opsd.actor_brief
    return read_by_actors(Path(opsd.corpus).expanduser().resolve())


@functools.lru_cache(maxsize=8)
def read_by_actors(run: Path) -> ActorBriefConfig:
    """What the actors of a run directory's own episodes had read; nothing where its ``meta.json`` says nothing."""
    meta = run / "meta.json"
    said = json.loads(meta.read_text()).get("opsd", {}).get("actor_brief", {}) if meta.is_file() else {}
    return ActorBriefConfig(**said)


def hints_of(config: ActorBriefConfig, pair: PairTask, episode: Episode) -> dict[str, Brief]:
    """The hints that stand in an episode's prompts, by agent.

    Args:
        config: of the run that collected the episode (:func:`collected_with`).

    Raises:
        OpsdError: the episode says that an agent had a brief of another kind than the run that collected it was configured with.
    """
    found = actor_briefs(config, pair)
    kinds = {a: found[a].kind if a in found else "none" for a in agents_of(pair)}
    said = {a: episode.brief_kinds.get(a, "none") for a in kinds}
    if kinds != said:
        raise OpsdError(
            f"episode {episode.episode_id}: its agents had briefs of the kinds {said}, the run that collected it gives {kinds}",
            "a hint is taken out by the ids that were put in, so the run that put them in must be known",
            "train on a corpus with its meta.json, under the configuration that collected it",
        )
    return found


def copying_turns(pair: PairTask, hint: Brief, replies: Mapping[int, str]) -> dict[int, list[str]]:
    """Turns whose replies hold runs of code that gold patches add and neither the task texts nor the base tree hold: what an actor copied
    from an answer. Empty for other hints.

    Args:
        replies: text by turn.
    """
    if hint.kind != "answer":
        return {}
    features = agents_of(pair)
    patches = {a: patch_of(pair, f, "gold") for a, f in features.items()}
    known = (*(pair.feature_text(f) for f in features.values()), *_base_texts(pair))
    found = {turn: gold_in_replies(patches, [text], known) for turn, text in replies.items()}
    return {turn: runs for turn, runs in found.items() if runs}


@functools.lru_cache(maxsize=32)
def _base_texts(pair: PairTask) -> tuple[str, ...]:
    base = base_tree(pair)
    return () if base is None else tree_texts(base)
