"""The states that a probe looks at: branches of recorded episodes, their pairs, and the teacher's contexts for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_opsd.cooperbench.dataset import dataset_folder
from verl_opsd.cooperbench.pair_briefs import briefs_of, pair_elsewhere
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import Brief, ChatMarkers, NoBrief, Placement, TeacherView, UserTurn, ViewTooLong, teacher_view
from verl_opsd.privilege.hints import without_hint
from verl_opsd.rundir import RunDir
from verl_opsd.teachers.base import Pass
from verl_opsd.tokens.branches import build_trajectories, loss_positions
from verl_opsd.tokens.classes import token_classes
from verl_opsd.tokens.records import Episode, Trajectory
from verl_opsd.tokens.store import EpisodeStore

#: Contexts of the teacher: the brief and what it is held against.
ARMS = ("brief", "wrong_task", "shuffled", "content_free")
#: Tokens that stand behind the last scored one in the identity control; what a causal model must not see.
FOREIGN = 7
FILLER = "This note holds nothing about the task and asks for nothing. "


@dataclass(frozen=True)
class Branch:
    """One branch with loss positions, and the pair that it belongs to."""

    trajectory: Trajectory
    pair: PairTask
    patch: str

    @property
    def name(self) -> str:
        """``episode/agent/branch``."""
        t = self.trajectory
        return f"{t.episode_id}/{t.agent_id}/{t.branch}"


@dataclass(frozen=True)
class BriefChoice:
    """Which brief is probed and how its views are read, as in ``opsd.brief``; a longer view is scored in windows where ``window_context``
    is set."""

    name: str
    allow_answer: bool = False
    files: str | None = None
    user_turn: UserTurn = "block"
    max_view_tokens: int | None = None
    window_context: int | None = None


def read_branches(
    run: RunDir,
    dataset: str,
    tokenizer: Any,
    episodes: int | None = None,
    hints: Callable[[PairTask, Episode], Mapping[str, Brief]] = lambda pair, episode: {},
    without: Collection[str] = (),
    only: str | None = None,
) -> list[Branch]:
    """Branches with loss positions of the first scored training episodes of a run, in the order of their ids.

    Args:
        without: episodes that are not read. only: the one that is; None: all.
        hints: the briefs that stand in an episode's prompts, by agent; they are taken out, as before training.

    Raises:
        OpsdError: no episodes, fewer than were asked for, one that can't be read, or one in ``without`` that is not there.
    """
    if not run.episodes.is_dir():
        raise OpsdError(
            f"{run.path} holds no episodes", "a probe reads recorded episodes", "name the directory of a `+recipe=opd` run"
        )
    root = dataset_folder(dataset, "opsd.tasks.dataset")
    out: list[Branch] = []
    seen, markers = 0, ChatMarkers.from_tokenizer(tokenizer)
    store = EpisodeStore(run.episodes)
    if unknown := set(without) - set(store.ids()):
        raise OpsdError(
            f"--leave-out {' '.join(sorted(unknown))}: {run.path} holds no such episode",
            "what is left out is named",
            "correct the name",
        )
    for episode in [only] if only is not None else store.ids():
        if episode in without or (episodes is not None and seen == episodes):
            continue
        e = store.read(episode)
        if e.split != "train" or not e.scored:
            continue
        seen += 1
        pair = PairTask(root, e.repo, e.task_id, e.features, e.split)
        patches = {a.agent_id: a.patch for a in e.agents}
        read = hints(pair, e)
        for agent in sorted({t.agent_id for t in e.turns}):
            turns = [t for t in e.turns if t.agent_id == agent]
            for t in build_trajectories(turns, classify=lambda ids: token_classes(ids.tolist(), tokenizer.decode)):
                if t.loss_mask.any():
                    t = without_hint(t, read[agent].ids(tokenizer), markers) if agent in read else t
                    out.append(Branch(t, pair, patches.get(agent, "")))
    if not out or (episodes is not None and seen < episodes):
        raise OpsdError(
            f"{run.path} holds {seen} scored training episodes",
            "the probe looks at as many as were asked for",
            "collect more, or ask for fewer",
        )
    return out


def context_ids(branch: Branch, arm: str, choice: BriefChoice, tokenizer: Any) -> list[int]:
    """Ids of a context for one branch; all arms are as long as the brief, up to the seams of words.

    Args:
        arm: ``brief``; ``wrong_task``, the brief of a pair of another repository; ``shuffled``, its words in a fixed random order;
            ``content_free``, a sentence that says nothing, repeated.

    Raises:
        OpsdError: an unknown arm, or no such brief for this branch.
    """
    if arm not in ARMS:
        raise OpsdError(f"arm {arm!r}", f"arms are {', '.join(ARMS)}", "choose some of them")
    agent = branch.trajectory.agent_id
    pair = pair_elsewhere(branch.pair) if arm == "wrong_task" else branch.pair
    patches = None if arm == "wrong_task" else {agent: branch.patch}
    brief = briefs_of(pair, choice.name, allow_answer=choice.allow_answer, files=choice.files, student_patch=patches)[agent]
    if isinstance(brief, NoBrief):
        raise brief
    ids = brief.ids(tokenizer)
    if arm == "shuffled":
        words = brief.text.split()
        random.Random(brief.hash).shuffle(words)
        return _encode(tokenizer, "\n\n" + " ".join(words))
    if arm == "content_free":
        times = len(ids) // 4 + 1
        while len(filler := _encode(tokenizer, "\n\n" + FILLER * times)) < len(ids):  # a tokenizer may know long phrases
            times *= 2
        return filler[: len(ids)]
    return ids


def coinciding(branches: Sequence[Branch], arms: Sequence[str], choice: BriefChoice, tokenizer: Any) -> dict[str, int]:
    """By arm that has any: branches at which it is the brief itself, token by token. A brief that is the same for all tasks is also that of
    a wrong task; such an arm controls nothing."""
    found = {}
    for arm in arms:
        if arm != "brief":
            same = (context_ids(b, arm, choice, tokenizer) == context_ids(b, "brief", choice, tokenizer) for b in branches)
            found[arm] = sum(same)
    return {arm: n for arm, n in found.items() if n}


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def view_of(branch: Branch, ids: Sequence[int], placement: Placement, choice: BriefChoice, markers: ChatMarkers) -> TeacherView:
    """The teacher's view of a branch with a context; without ids the branch itself.

    Raises:
        ViewTooLong: see :func:`verl_opsd.privilege.teacher_view`.
    """
    return teacher_view(
        branch.trajectory.input_ids,
        branch.trajectory.loss_mask,
        ids,
        placement,
        markers,
        user_turn=choice.user_turn,
        max_len=choice.max_view_tokens,
        window_context=choice.window_context,
    )


def split_fitting(
    branches: Sequence[Branch],
    choice: BriefChoice,
    arms: Sequence[str],
    placements: Sequence[Placement],
    tokenizer: Any,
    positions: int | None,
) -> tuple[list[Branch], dict[str, int]]:
    """The branches that can be scored under every context, so that all tables are of the same tokens, and how many can't, by reason.

    Args:
        positions: that both models have; None: not known.

    Raises:
        OpsdError: none is left, or see :func:`context_ids`.
    """
    markers = ChatMarkers.from_tokenizer(tokenizer)
    out: list[Branch] = []
    left_out = {"no brief": 0, "view too long": 0}
    for branch in branches:
        try:
            if positions is not None and len(branch.trajectory.input_ids) + FOREIGN > positions:
                raise ViewTooLong(
                    f"a branch of {len(branch.trajectory.input_ids)} tokens", "it fits the models", "leave it out"
                )
            for arm in arms:
                ids = context_ids(branch, arm, choice, tokenizer)
                for placement in placements if arm == "brief" else placements[:1]:
                    view_of(branch, ids, placement, choice, markers)
            out.append(branch)
        except NoBrief:
            left_out["no brief"] += 1
        except ViewTooLong:
            left_out["view too long"] += 1
    if not out:
        raise OpsdError(
            f"none of {len(branches)} branches can be probed: {left_out}",
            "a branch has a brief, and its views fit both models; nothing is truncated",
            "choose another brief or a model with a longer context, or have views scored in windows (opsd.brief.too_long=window)",
        )
    return out, left_out


def passes_of_view(view: TeacherView) -> list[Pass]:
    """The passes of a view, for a scorer."""
    ends = np.cumsum(view.lengths)
    owner = np.searchsorted(ends, view.position, side="right")
    out = []
    for p, (length, end) in enumerate(zip(view.lengths.tolist(), ends.tolist(), strict=True)):
        slots = np.flatnonzero(owner == p)
        if len(slots):
            ids = torch.from_numpy(view.ids[end - length : end].astype(np.int64))
            out.append(Pass(0, torch.from_numpy(slots), ids, torch.from_numpy(view.position[slots] - (end - length))))
    return out


def own_passes(trajectory: Trajectory, shifts: Sequence[int] = (0,), by_turn: bool = False) -> list[Pass]:
    """Passes over a branch's own ids.

    Args:
        shifts: tokens by which the scored positions are moved (anything but 0 is a negative control); the slots of one shift come
            behind those of the one before.
        by_turn: one pass a turn, cut behind the turn's last scored token and followed by a few foreign tokens, instead of one over the
            branch: a causal model that is scored right gives the same.
    """
    position, ids = loss_positions(trajectory.loss_mask), torch.from_numpy(trajectory.input_ids.astype(np.int64))
    index = np.concatenate([position + s for s in shifts])
    if not by_turn:
        return [Pass(0, torch.arange(len(index)), ids, torch.from_numpy(index))]
    turns = np.tile(trajectory.turn_index[position + 1], len(shifts))
    groups = [np.flatnonzero(turns == t) for t in np.unique(turns)]
    cut = [torch.cat([ids[: int(index[g].max()) + 2], ids[:FOREIGN]]) for g in groups]
    return [Pass(0, torch.from_numpy(g), c, torch.from_numpy(index[g])) for g, c in zip(groups, cut, strict=True)]
