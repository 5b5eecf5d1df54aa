"""Prefix recovery: the teacher, with its brief, continues the student's prefixes at several depths.

A teacher that finds its own way from where the student has got to can correct it there; one that can't, or whose way the student
finds shocking, has nothing to teach at that depth. Greedy continuations; negative log-likelihoods in nats a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl_opsd.privilege import ChatMarkers, Placement, teacher_view
from verl_opsd.probe.measure import Head, depth_bucket, nll, spikes
from verl_opsd.probe.states import Branch, BriefChoice, context_ids
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher


def prefixes(branches: Sequence[Branch], per_depth: int) -> list[tuple[Branch, int]]:
    """(branch, prompt length) of turns, at most ``per_depth`` for each depth bucket, spread over the branches in order."""
    found: dict[str, list[tuple[Branch, int]]] = {}
    for b in branches:
        t = b.trajectory
        for turn in np.unique(t.turn_index[t.turn_index >= 0]).tolist():
            start = int(np.flatnonzero(t.turn_index == turn)[0])
            found.setdefault(depth_bucket(start), []).append((b, start))
    out = []
    for places in found.values():
        step = max(1, len(places) // per_depth)
        out += places[::step][:per_depth]
    return sorted(out, key=lambda p: p[1])


def recover(
    branches: Sequence[Branch],
    student: DeviceTeacher,
    teacher: DeviceTeacher,
    tokenizer: Any,
    choice: BriefChoice,
    placement: Placement,
    per_depth: int = 4,
    tokens: int = 24,
) -> list[dict[str, Any]]:
    """One row a depth bucket: prefixes, tokens, share of continuations that end their turn, how many tokens in a row the teacher shares
    with what the student wrote, and the continuation's NLL under the teacher and under the student (mean, max, spike). A prefix that leaves no
    room for ``tokens`` more is not continued."""
    markers = ChatMarkers.from_tokenizer(tokenizer)
    rows: dict[str, dict[str, list[Any]]] = {}
    for branch, start in prefixes(branches, per_depth):
        t = branch.trajectory
        ids = t.input_ids[: start + 1]  # the first reply token marks the place that is conditioned
        mask = np.zeros(start + 1, np.int8)
        mask[start] = 1
        brief = context_ids(branch, "brief", choice, tokenizer)
        view = torch.from_numpy(
            teacher_view(ids, mask, brief, placement, markers, user_turn=choice.user_turn).ids[:-1].astype(np.int64)
        )
        if choice.max_view_tokens is not None and len(view) + tokens > choice.max_view_tokens:
            continue
        made = teacher.continue_greedily(view, tokens, markers.im_end)  # a base model's end token may be another
        end = start + int(np.argmax(np.append(t.turn_index[start:] != t.turn_index[start], True)))
        own = torch.from_numpy(t.input_ids[start : min(end, start + len(made))].astype(np.int64))
        same = int((made[: len(own)] == own).int().cumprod(0).sum())
        row = rows.setdefault(depth_bucket(start), {"ended": [], "same": [], "teacher": [], "student": []})
        row["ended"].append(int(made[-1]) == markers.im_end)
        row["same"].append(same)
        for name, model, prefix in (
            ("teacher", teacher, view),
            ("student", student, torch.from_numpy(t.input_ids[:start].astype(np.int64))),
        ):
            index = torch.arange(len(made)) + len(prefix) - 1
            head = Head.of(model, [Pass(0, torch.arange(len(made)), torch.cat([prefix, made]), index)])
            row[name].append(nll(head, made.numpy()))
    return [
        {
            "depth": depth,
            "prefixes": len(row["ended"]),
            "ended": float(np.mean(row["ended"])),
            "tokens in a row as the student": float(np.mean(row["same"])),
            "teacher": spikes(np.concatenate(row["teacher"])),
            "student": spikes(np.concatenate(row["student"])),
        }
        for depth, row in rows.items()
    ]
