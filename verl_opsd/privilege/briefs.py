"""Briefs: what the teacher knows and the student does not, declared by kind and composed of sections.

Kinds, weakest first: ``none``; ``scope`` (who the peer is, what it works on); ``guidance`` (how to work); ``answer``
(tests, gold patches, per-task workflows), which only an explicit ``allow_answer=True`` admits. A brief is of its strongest
section's kind. The built-in briefs are in ``library``, their texts in the data files of ``texts/``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import BriefKind

KINDS: tuple[BriefKind, ...] = ("none", "scope", "guidance", "answer")
#: What an answer section holds: hidden tests, a gold patch, or text written with the answer at hand.
Answer = Literal["tests", "gold", "workflow"]
Side = Literal["first", "second"]


@dataclass(frozen=True)
class Section:
    """One part of a brief. ``private``: text that the student must not have seen (an introduction is not private).

    Its ``repr`` shows an answer's length and hash only, so that no log, report or traceback holds the text.

    Raises:
        OpsdError: an answer that does not say of which sort it is, or the sort of an answer on anything else.
    """

    name: str
    kind: BriefKind
    text: str
    private: bool = True
    answer: Answer | None = None

    def __post_init__(self) -> None:
        if (self.kind == "answer") != (self.answer is not None):
            raise OpsdError(
                f"section {self.name!r} of kind {self.kind!r} with answer={self.answer!r}",
                "an answer section, and no other, says whether it holds tests, gold or a workflow",
                'Section(name, "answer", text, answer="tests")',
            )

    @property
    def shown(self) -> str:
        """The text; for an answer a line that stands for it."""
        if self.kind != "answer":
            return self.text
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return f"[{self.answer}: {len(self.text)} characters, sha256 {digest[:12]}]"

    def __repr__(self) -> str:
        return f"Section({self.name!r}, {self.kind!r}, {self.shown!r}, private={self.private}, answer={self.answer!r})"


@dataclass(frozen=True, repr=False)
class Brief:
    """Privileged context as text.

    Raises:
        OpsdError: the kind is not its strongest section's, two sections share a name, or it is ``answer`` and
            ``allow_answer`` is not set.
    """

    name: str
    kind: BriefKind
    text: str
    sections: tuple[Section, ...]
    allow_answer: bool = False

    def __post_init__(self) -> None:
        strongest = max((s.kind for s in self.sections), key=KINDS.index, default="none")
        if self.kind != strongest or self.text != _join(self.sections):
            raise OpsdError(
                f"brief {self.name!r} of kind {self.kind!r} with sections of kind {strongest!r}",
                "a brief's kind and text are those of its sections",
                "build briefs with compose(*sections)",
            )
        names = [s.name for s in self.sections]
        if len(set(names)) != len(names):
            raise OpsdError(
                f"brief {self.name!r} holds {sorted({n for n in names if names.count(n) > 1})} twice",
                "each section stands once in a brief",
                "leave out the part that another part brings (a role brings peer_spec)",
            )
        if self.kind == "answer" and not self.allow_answer:
            raise OpsdError(
                f"brief {self.name!r} holds an answer ({[s.name for s in self.sections if s.kind == 'answer']})",
                "answers are admitted only explicitly, and every report names them",
                "set allow_answer=True if this run is meant to distil from answers",
            )

    def __repr__(self) -> str:
        return f"Brief({self.name!r}, {self.kind!r}, {list(self.sections)!r}, allow_answer={self.allow_answer})"

    @property
    def shown(self) -> str:
        """The text with its answers left out: what reports may hold."""
        return "\n\n".join(s.shown for s in self.sections if s.text)

    @property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) over name, kind and sections."""
        parts = [self.name, self.kind, [[s.name, s.kind, s.text, s.private, s.answer] for s in self.sections]]
        return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids for a splice behind a message's text: a blank line, then the brief, no control tokens."""
        if not self.text:
            return []
        return list(tokenizer.encode(f"\n\n{self.text}", add_special_tokens=False, split_special_tokens=True))


def compose(*parts: Section | Brief, name: str | None = None, allow_answer: bool = False) -> Brief:
    """One brief of sections and briefs, in order. ``name`` defaults to the parts' names joined by ``+``."""
    sections = tuple(s for part in parts for s in (part.sections if isinstance(part, Brief) else (part,)))
    kind: BriefKind = max((s.kind for s in sections), key=KINDS.index, default="none")
    joined = "+".join(part.name for part in parts) or "none"
    return Brief(joined if name is None else name, kind, _join(sections), sections, allow_answer)


def _join(sections: Iterable[Section]) -> str:
    return "\n\n".join(s.text for s in sections if s.text)


@dataclass(frozen=True)
class TaskFacts:
    """What briefs that belong to one task are made of. Nothing is read before a brief asks for it.

    Attributes:
        key: of the pair, ``repo/task<ID>/f<A>_f<B>``.
        material: (agent id, ``tests`` or ``gold``) -> the patch with that agent's hidden tests or its gold solution.
        files: folder of authored workflow files.
        student_patch: agent id -> the patch that the agent ended with; None before there is an episode.
        elsewhere: task texts by agent id of a pair of another task, for the control brief ``wrong_task``.
    """

    key: str
    material: Callable[[str, Literal["tests", "gold"]], str] | None = None
    files: Path | None = None
    student_patch: Mapping[str, str] | None = None
    elsewhere: Callable[[], Mapping[str, str]] | None = None


@dataclass(frozen=True)
class Case:
    """For whom a brief is made.

    Attributes:
        agent_id: whose teacher reads it.
        peers: task text of each other agent by its id.
        task: facts about the task; None where only a general brief can be made.
    """

    agent_id: str
    peers: Mapping[str, str]
    task: TaskFacts | None = None

    @property
    def agents(self) -> tuple[str, ...]:
        """All agents, sorted by id: an order that every agent knows."""
        return tuple(sorted({self.agent_id, *self.peers}))

    @property
    def side(self) -> Side:
        """``first`` for the lower id of a pair: the student can derive it from the two ids that it holds.

        Raises:
            OpsdError: not a pair.
        """
        if len(self.agents) != 2:
            raise OpsdError(f"sides of {list(self.agents)}", "sides are those of a pair", "use a brief without sides")
        return "first" if self.agents[0] == self.agent_id else "second"

    @property
    def peer(self) -> str:
        """The other agent of a pair."""
        return self.agents[1] if self.side == "first" else self.agents[0]

    def facts(self, name: str) -> TaskFacts:
        """The task's facts, for a brief that needs them.

        Raises:
            OpsdError: there are none.
        """
        if self.task is None:
            raise OpsdError(f"brief {name} for {self.agent_id} without a task", "it belongs to one task", "pass task=")
        return self.task


#: Makes a brief for one agent.
BriefMaker = Callable[[Case], Brief]
_MAKERS: dict[str, BriefMaker] = {}


def register_brief(name: str, maker: BriefMaker) -> None:
    """Adds a brief that configs can name.

    Raises:
        OpsdError: the name is taken or holds ``+``, which joins names.
    """
    if name in _MAKERS or "+" in name or not name:
        raise OpsdError(f"brief name {name!r}", f"a new name without '+'; taken: {sorted(_MAKERS)}", "choose another name")
    _MAKERS[name] = maker


def brief_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_MAKERS)


def make_brief(
    name: str, agent_id: str, peers: Mapping[str, str], *, allow_answer: bool = False, task: TaskFacts | None = None
) -> Brief:
    """The brief that a config names, for one agent.

    Args:
        name: a registered name, or several joined by ``+``, e.g. ``peer_spec+process``.
        peers: task text of each other agent by its id.
        task: facts about the task, for briefs that belong to one.

    Raises:
        OpsdError: an unknown name, the agent among its own peers, a section twice, an answer without allow_answer, or a
            brief that this task does not have.
    """
    if agent_id in peers:
        raise OpsdError(f"{agent_id} among its own peers {sorted(peers)}", "peers are the other agents", "leave it out")
    names = name.split("+")
    unknown = [n for n in names if n not in _MAKERS]
    if unknown:
        raise OpsdError(
            f"brief {name!r}: unknown {unknown}",
            f"registered briefs are {brief_names()}, and '+' joins several",
            "correct the name, or register the brief with register_brief",
        )
    case = Case(agent_id, peers, task)
    return compose(*(_MAKERS[n](case) for n in names), name=name, allow_answer=allow_answer)
