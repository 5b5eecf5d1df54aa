"""What one pair gives to each behaviour metric, and what the parts of several pairs sum to.

A pair's part is a numerator and a denominator (shares and means) or values (medians). Parts are summed, so that the order of files,
and how runs are split into folders, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from verl_opsd.evaluation.behaviour import communication as com
from verl_opsd.evaluation.behaviour.conduct import Conduct, conducts
from verl_opsd.evaluation.behaviour.definitions import DEFINITIONS, Definition
from verl_opsd.evaluation.behaviour.events import Pair, stream
from verl_opsd.evaluation.behaviour.patterns import ACTIONS
from verl_opsd.evaluation.outcomes import is_empty, merge_of, patch_bytes
from verl_opsd.evaluation.shapes import MERGES
from verl_opsd.tokens.records import Episode

#: Steps in which a split that is stated counts as stated at the start.
FIRST_STEPS = 10


@dataclass(frozen=True)
class Part:
    """What one pair gives to a metric."""

    numerator: float = 0.0
    denominator: int = 0
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measured:
    """A scored pair's parts, by metric, and what the strata need."""

    episode_id: str
    messages: int
    merge: str
    features: int
    parts: dict[str, Part]


@dataclass(frozen=True)
class _Facts:
    pair: Pair
    agents: dict[str, Conduct]

    @cached_property
    def sends(self) -> tuple[com.Send, ...]:
        return self.pair.delivered

    @property
    def merge(self) -> str:
        assert self.pair.episode.grade is not None
        return merge_of(self.pair.episode.grade)

    @property
    def features(self) -> int:
        assert self.pair.episode.grade is not None
        return sum(f.passed for f in self.pair.episode.grade.features)

    @property
    def bytes(self) -> tuple[float, ...]:
        return tuple(float(patch_bytes(a)) for a in self.pair.episode.agents)


Measure = Callable[[_Facts], Part]


def measure(episodes: Iterable[Episode]) -> list[Measured]:
    """Each scored episode's part of every metric."""
    pairs = [stream(e) for e in episodes]
    out = []
    for facts in map(_Facts, pairs, conducts(pairs)):
        parts = {key: _MEASURES[key](facts) for key in DEFINITIONS}
        out.append(Measured(facts.pair.episode.episode_id, len(facts.sends), facts.merge, facts.features, parts))
    return out


def summed(definition: Definition, parts: Iterable[Part]) -> tuple[float | None, float | None, int]:
    """Value, numerator and denominator of a metric over several pairs; a median's denominator counts its values."""
    parts = list(parts)
    if definition.kind == "median":
        values = [v for p in parts for v in p.values]
        return (float(median(values)) if values else None), None, len(values)
    numerator, denominator = sum(p.numerator for p in parts), sum(p.denominator for p in parts)
    return (numerator / denominator if denominator else None), numerator, denominator


def _sends(holds: Callable[[com.Send], bool]) -> Measure:
    return lambda f: Part(sum(map(holds, f.sends)), len(f.sends))


def _texts(holds: Callable[[str], bool]) -> Measure:
    return _sends(lambda s: holds(s.text))


def _pairs(count: Callable[[_Facts], float]) -> Measure:
    return lambda f: Part(count(f), 1)


def _counted(numbers: Callable[[_Facts], tuple[int, int]]) -> Measure:
    return lambda f: Part(*numbers(f))


def _values(values: Callable[[_Facts], Iterable[float]]) -> Measure:
    return lambda f: Part(values=tuple(map(float, values(f))))


def _agents(numerator: Callable[[Conduct], float], denominator: Callable[[Conduct], int] = lambda c: 1) -> Measure:
    return lambda f: Part(sum(map(numerator, f.agents.values())), sum(map(denominator, f.agents.values())))


def _action(name: str) -> Measure:
    return _agents(lambda c: c.actions[name], lambda c: c.commands)


def _merge(status: str) -> Measure:
    return _pairs(lambda f: f.merge == status)


def _status(name: str) -> Measure:
    return lambda f: Part(sum(a.status == name for a in f.pair.episode.agents), len(f.pair.episode.agents))


def _opening(f: _Facts) -> tuple[int, int]:
    first: dict[str, com.Send] = {}
    for s in sorted(f.sends, key=lambda s: s.step):
        first.setdefault(s.sender, s)
    return sum(com.divides(s.text) for s in first.values()), len(first)


def _is_plan(send: com.Send) -> bool:
    return com.divides(send.text) and com.names_a_place(send.text)


def _plan_first(f: _Facts) -> tuple[int, int]:
    planned = 0
    for agent, done in f.agents.items():
        plans = [s.step for s in f.sends if s.sender == agent and _is_plan(s)]
        planned += bool(plans) and done.first_write is not None and min(plans) < done.first_write
    return planned, len(f.agents)


def _identical(f: _Facts) -> bool:
    patches = {a.patch.strip() for a in f.pair.episode.agents}
    return len(patches) == 1 and "" not in patches


def _published(f: _Facts) -> tuple[int, int]:
    agents = f.pair.episode.agents
    opened = {agent for agent, done in f.agents.items() if done.opened_pr}
    return sum(bool(a.patch.strip()) or a.agent_id in opened for a in agents), len(agents)


def _empty(f: _Facts) -> tuple[int, int]:
    agents = f.pair.episode.agents
    return sum(is_empty(a, f.pair.episode.grade) for a in agents), len(agents)


_MEASURES: dict[str, Measure] = {
    "messages_per_pair": _pairs(lambda f: len(f.sends)),
    "messages_median": _values(lambda f: [len(f.sends)]),
    "message_chars": _values(lambda f: [len(s.text.strip()) for s in f.sends]),
    "near_duplicate_share": _counted(lambda f: (com.near_duplicates(f.sends), len(f.sends))),
    "division_share": _texts(com.divides),
    "question_share": _texts(com.is_question),
    "answer_rate": _counted(lambda f: com.answered_questions(f.sends)),
    "answered_promptly": _counted(lambda f: (com.answered_promptly(f.sends), len(f.sends))),
    "wait_share": _sends(lambda s: s.wait),
    "undelivered_share": _counted(lambda f: (len(f.pair.sends) - len(f.sends), len(f.pair.sends))),
    "opening_division": _counted(_opening),
    "protocol_share": _texts(com.follows_protocol),
    "plan_first": _counted(_plan_first),
    "follow_through": _counted(lambda f: com.followed_claims(f.pair)),
    "peer_mention_share": _agents(lambda c: c.mentions, lambda c: c.steps),
    "commitment_share": _agents(lambda c: c.intentions, lambda c: c.mentions),
    "acted_share": _agents(lambda c: c.acted, lambda c: c.intentions),
    "intention_gap": _agents(lambda c: c.intentions - c.acted, lambda c: c.intentions),
    "claims_per_pair": _pairs(lambda f: sum(com.is_claim(s.text) for s in f.sends)),
    "boards_per_pair": _pairs(lambda f: sum(com.is_board(s.text) for s in f.sends)),
    "split_stated": _pairs(lambda f: any(s.step < FIRST_STEPS and _is_plan(s) for s in f.sends)),
    "reviewer_wrote_nothing": _pairs(lambda f: "agent2" in f.agents and f.agents["agent2"].first_write is None),
    "handoff_identical": _pairs(_identical),
    **{f"action_{name}": _action(name) for name in ACTIONS},
    **{f"merge_{status}": _merge(status) for status in MERGES},
    "dry_runs": _agents(lambda c: c.dry_runs),
    "saw_conflict": _agents(lambda c: c.saw_conflict),
    "shim_warned": _agents(lambda c: c.shim_warned),
    "conflict_acted_on": _agents(lambda c: c.saw_conflict and c.wrote_after, lambda c: c.saw_conflict),
    "opened_pr": _agents(lambda c: c.opened_pr),
    "published": _counted(_published),
    "late_merge_check": _agents(lambda c: c.first_write is not None and c.late_check, lambda c: c.first_write is not None),
    "rechecks": _agents(lambda c: c.rechecks, lambda c: c.saw_conflict),
    "reverified": _agents(lambda c: c.reverified, lambda c: c.saw_conflict),
    "repeated_commands": _agents(lambda c: c.repeated, lambda c: c.commands),
    "same_error": _agents(lambda c: c.same_error),
    "reverts": _agents(lambda c: c.reverts),
    "longest_without_edit": _agents(lambda c: c.longest_without_edit),
    "features_passed": lambda f: Part(f.features, 2),
    "pairs_passed": _pairs(lambda f: f.features == 2),
    "pairs_any": _pairs(lambda f: f.features > 0),
    "submitted": _status("Submitted"),
    "limits_exceeded": _status("LimitsExceeded"),
    "ended_in_error": _status("Error"),
    "empty_patches": _counted(_empty),
    "patch_bytes": _values(lambda f: f.bytes),
    "patch_bytes_non_empty": _values(lambda f: [b for b in f.bytes if b]),
    "patch_kb_per_pair": _pairs(lambda f: sum(f.bytes) / 1000),
    "minutes_per_pair": _pairs(lambda f: (f.pair.episode.t_end - f.pair.episode.t_start) / 60),
    "steps": _values(lambda f: [a.steps for a in f.pair.episode.agents]),
}
assert list(_MEASURES) == list(DEFINITIONS)
