"""One state, three distributions: what student, teacher and briefed teacher would have said next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.privilege import ChatMarkers, Placement
from verl_opsd.probe.measure import Head, divergence
from verl_opsd.probe.states import Branch, BriefChoice, context_ids, own_passes, passes_of_view, view_of
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.tokens.branches import loss_positions

TOP = 5


def why(
    branches: Sequence[Branch],
    episode: str,
    agent: str,
    turn: int,
    student: DeviceTeacher,
    teacher: DeviceTeacher,
    tokenizer: Any,
    choice: BriefChoice,
    placement: Placement,
    tokens: int,
) -> list[dict[str, Any]]:
    """Rows for the ``tokens`` positions of a turn with the largest effect of the brief, in order: position, written, effect and pull in
    nats, and for student, teacher, briefed the five most probable tokens with their probabilities.

    Raises:
        OpsdError: no such turn with loss.
    """
    here = [b for b in branches if (b.trajectory.episode_id, b.trajectory.agent_id) == (episode, agent)]
    turns = [set(b.trajectory.turn_index[b.trajectory.loss_mask == 1].tolist()) for b in here]
    branch = next((b for b, own in zip(here, turns, strict=True) if turn in own), None)
    if branch is None:
        known = sorted(set().union(*turns))
        episodes = sorted({b.trajectory.episode_id for b in branches})
        agents = sorted({b.trajectory.agent_id for b in branches if b.trajectory.episode_id == episode})
        others = f"agents with loss there: {', '.join(agents)}" if agents else f"episodes are {', '.join(episodes[:8])}"
        raise OpsdError(
            f"turn {turn} of {episode}/{agent}",
            f"turns with loss there: {known}" if here else others,
            "name an episode of the run, an agent and one of its turns",
        )
    t, markers = branch.trajectory, ChatMarkers.from_tokenizer(tokenizer)
    position = loss_positions(t.loss_mask)
    own = Head.of(student, own_passes(t))
    bare = own if teacher is student else Head.of(teacher, own_passes(t))
    view = view_of(branch, context_ids(branch, "brief", choice, tokenizer), placement, choice, markers)
    seen = Head.of(teacher, passes_of_view(view))
    effect, pull = divergence(bare, seen)[0], divergence(own, seen)[0]
    inside = np.flatnonzero(t.turn_index[position + 1] == turn)
    chosen = np.sort(inside[np.argsort(effect[inside], kind="stable")[::-1][:tokens]])
    rows = []
    for n in chosen.tolist():
        row: dict[str, Any] = {
            "position": int(position[n]) + 1,
            "written": tokenizer.decode([int(t.input_ids[position[n] + 1])]),
        }
        row |= {"effect": float(effect[n]), "pull": float(pull[n])}
        for name, head in (("student", own), ("teacher", bare), ("briefed", seen)):
            top = head.logits(slice(n, n + 1))[0].softmax(-1).topk(TOP)
            row[name] = [(tokenizer.decode([i]), p) for i, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        rows.append(row)
    return rows
