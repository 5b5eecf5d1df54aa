"""Metrics over the commands and steps of a pair: endgame, merge checks, loops, and what became of intentions."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_opsd.evaluation.behaviour.actions import label
from verl_opsd.evaluation.behaviour.events import Command, Pair
from verl_opsd.evaluation.behaviour.patterns import (
    ACTIONS,
    CONFLICT,
    DRY_RUN,
    INTENTION,
    PEER,
    PR_CREATE,
    REVERT,
    SHIM_WARNING,
)

#: An agent's last steps in which a merge check counts as late.
LATE_STEPS = 15


@dataclass(frozen=True)
class Conduct:
    """What one agent did.

    Attributes:
        actions: label -> commands with it. commands, steps: how many.
        first_write: step of the first command that writes; None without one.
        dry_runs: merges that were tried without being made. saw_conflict, shim_warned, opened_pr: by observations.
        late_check: a dry run, or ``gh pr create``, in the last 15 steps.
        rechecks, reverified, wrote_after: after the first conflict seen: dry runs, one of them clean, a command that writes.
        repeated: commands that repeat an earlier one with no write in between.
        same_error: largest number of failures that end in the same line. reverts: commands that take back work.
        longest_without_edit: steps.
        mentions, intentions, acted: steps that speak of the peer; that speak of writing to the peer next; those of these that
            did, in the same or the next step.
    """

    actions: dict[str, int]
    commands: int
    steps: int
    first_write: int | None
    dry_runs: int
    saw_conflict: bool
    shim_warned: bool
    opened_pr: bool
    late_check: bool
    rechecks: int
    reverified: bool
    wrote_after: bool
    repeated: int
    same_error: int
    reverts: int
    longest_without_edit: int
    mentions: int
    intentions: int
    acted: int


def conducts(pairs: Sequence[Pair]) -> list[dict[str, Conduct]]:
    """What each agent of each pair did. All commands are labelled at once: a pattern takes longer to compile than to match."""
    flats = [{a: [(s.i, c) for s in steps for c in s.commands] for a, steps in p.steps.items()} for p in pairs]
    labels = label([c.text for of_pair in flats for flat in of_pair.values() for _, c in flat])
    out: list[dict[str, Conduct]] = []
    start = 0
    for pair, of_pair in zip(pairs, flats, strict=True):
        found = {}
        for agent, flat in of_pair.items():
            mine = {name: values[start : start + len(flat)] for name, values in labels.items()}
            found[agent] = _conduct(pair, agent, flat, mine)
            start += len(flat)
        out.append(found)
    return out


def _conduct(pair: Pair, agent: str, flat: list[tuple[int, Command]], labels: Mapping[str, NDArray[np.bool_]]) -> Conduct:
    steps = pair.steps[agent]
    at = np.array([i for i, _ in flat], int)
    writes = at[labels["write"]]
    dry = [(k, i) for k, (i, c) in enumerate(flat) if "merge" in c.text and DRY_RUN.search(c.text)]
    conflicts = [k for k, (_, c) in enumerate(flat) if CONFLICT in c.output]
    first = conflicts[0] if conflicts else len(flat)
    later = [k for k, _ in dry if k > first]
    late = len(steps) - LATE_STEPS
    checks = [i for _, i in dry] + [i for i, c in flat if "gh" in c.text and PR_CREATE.search(c.text)]
    mentions, intentions, acted = _intentions(pair, agent)
    opened = f"opened PR for {agent}"
    return Conduct(
        actions={name: int(labels[name].sum()) for name in ACTIONS},
        commands=len(flat),
        steps=len(steps),
        first_write=int(writes[0]) if len(writes) else None,
        dry_runs=len(dry),
        saw_conflict=bool(conflicts),
        shim_warned=any(SHIM_WARNING in c.output for _, c in flat),
        opened_pr=any(opened in c.output for _, c in flat)
        or any(a.opened_pr for a in pair.episode.agents if a.agent_id == agent),
        late_check=any(i >= late for i in checks),
        rechecks=len(later),
        reverified=any(CONFLICT not in flat[k][1].output for k in later),
        wrote_after=bool(labels["write"][first + 1 :].any()),
        repeated=_repeated(flat, labels["write"]),
        same_error=max(Counter(filter(None, (_error(c) for _, c in flat))).values(), default=0),
        reverts=sum("git" in c.text and bool(REVERT.search(c.text)) for _, c in flat),
        longest_without_edit=_longest_gap(sorted(set(writes.tolist())), len(steps)),
        mentions=mentions,
        intentions=intentions,
        acted=acted,
    )


def _repeated(flat: list[tuple[int, Command]], writes: NDArray[np.bool_]) -> int:
    seen: set[str] = set()
    count = 0
    for (_, command), wrote in zip(flat, writes.tolist(), strict=True):
        text = " ".join(command.text.split())
        count += text in seen
        if wrote:
            seen.clear()
        seen.add(text)
    return count


def _error(command: Command) -> str:
    """What a failed command's output ends in, digits as 0; '' for one that succeeded or said nothing."""
    if not command.returncode:
        return ""
    tail = command.output.rstrip()
    return re.sub(r"\d+", "0", tail[tail.rfind("\n") + 1 :][:200].strip())


def _longest_gap(writes: list[int], steps: int) -> int:
    edges = [-1, *writes, steps]
    return max(b - a - 1 for a, b in itertools.pairwise(edges))


def _intentions(pair: Pair, agent: str) -> tuple[int, int, int]:
    sent = {s.step for s in pair.sends if s.sender == agent}
    mentions = intentions = acted = 0
    for step in pair.steps[agent]:
        if PEER.search(step.text):
            mentions += 1
            if INTENTION.search(step.text):
                intentions += 1
                acted += bool({step.i, step.i + 1} & sent)
    return mentions, intentions, acted
