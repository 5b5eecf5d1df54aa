"""Briefs: what the teacher knows and the student does not, declared by kind and composed of sections.

Kinds, weakest first: ``none``; ``scope`` (who the peer is, what it works on); ``guidance`` (how to work); ``answer``
(tests, patches, solutions), which only an explicit ``allow_answer=True`` admits. A brief is of its strongest
section's kind.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import BriefKind

KINDS: tuple[BriefKind, ...] = ("none", "scope", "guidance", "answer")
#: Words in a row that count as a leak.
LEAK_WORDS = 8


@dataclass(frozen=True)
class Section:
    """One part of a brief. ``private``: text that the student must not have seen (an introduction is not private)."""

    name: str
    kind: BriefKind
    text: str
    private: bool = True


@dataclass(frozen=True)
class Brief:
    """Privileged context as text.

    Raises:
        OpsdError: the kind is not its strongest section's, or it is ``answer`` and ``allow_answer`` is not set.
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
        if self.kind == "answer" and not self.allow_answer:
            raise OpsdError(
                f"brief {self.name!r} holds an answer ({[s.name for s in self.sections if s.kind == 'answer']})",
                "answers are admitted only explicitly, and every report names them",
                "set allow_answer=True if this run is meant to distil from answers",
            )

    @property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) over name, kind and sections."""
        parts = [self.name, self.kind, [[s.name, s.kind, s.text, s.private] for s in self.sections]]
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


def none() -> Brief:
    """The empty brief: the teacher sees what the student sees."""
    return compose(name="none")


def peer_spec(agent_id: str, peer_id: str, peer_task: str) -> Brief:
    """Who the peer is, and the public task text that the peer was given (scope)."""
    if agent_id == peer_id or not peer_task.strip():
        raise OpsdError(
            f"peer {peer_id!r} of {agent_id!r} with a task text of {len(peer_task)} characters",
            "a peer is another agent and has a task",
            "pass the other agent's id and the text of its feature",
        )
    introduction = (
        f"# What {peer_id} works on\n\n"
        f"You are {agent_id}. At the same time {peer_id} implements another feature in the same repository, and both "
        f"branches are merged afterwards. This is the task that {peer_id} was given:"
    )
    return compose(
        Section(f"introduction:{peer_id}", "scope", introduction, private=False),
        Section(f"task:{peer_id}", "scope", peer_task.strip()),
        name="peer_spec",
    )


PROCESS = """# How to work together

- Message your peer for a purpose: which files and functions you will change, which interface you need, what you
  decided, what is done. Say it early, before both of you edit the same lines.
- Commit and push small, working steps. Hand work over by the exact commit SHA and the branch that holds it.
- Before you rely on your peer's work, fetch it and read its diff. Do not assume what it contains.
- Resolve overlaps by agreement, and check that your change still works together with your peer's.
- Report only what you have done and seen. Never invent results, commits, test runs or messages."""


def process() -> Brief:
    """Static directives for working in a pair (guidance)."""
    return compose(Section("process", "guidance", PROCESS), name="process")


#: Makes a brief for one agent: (agent_id, task texts of its peers by agent id) -> Brief.
BriefMaker = Callable[[str, Mapping[str, str]], Brief]
_MAKERS: dict[str, BriefMaker] = {}


def register_brief(name: str, maker: BriefMaker) -> None:
    """Adds a brief that configs can name.

    Raises:
        OpsdError: the name is taken or holds ``+``, which joins names.
    """
    if name in _MAKERS or "+" in name or not name:
        raise OpsdError(f"brief name {name!r}", f"a new name without '+'; taken: {sorted(_MAKERS)}", "choose another name")
    _MAKERS[name] = maker


def make_brief(name: str, agent_id: str, peers: Mapping[str, str], *, allow_answer: bool = False) -> Brief:
    """The brief that a config names, for one agent.

    Args:
        name: a registered name, or several joined by ``+``, e.g. ``peer_spec+process``.
        peers: task text of each other agent by its id.

    Raises:
        OpsdError: an unknown name, the agent among its own peers, or an answer without allow_answer.
    """
    if agent_id in peers:
        raise OpsdError(f"{agent_id} among its own peers {sorted(peers)}", "peers are the other agents", "leave it out")
    names = name.split("+")
    unknown = [n for n in names if n not in _MAKERS]
    if unknown:
        raise OpsdError(
            f"brief {name!r}: unknown {unknown}",
            f"registered briefs are {sorted(_MAKERS)}, and '+' joins several",
            "correct the name, or register the brief with register_brief",
        )
    return compose(*(_MAKERS[n](agent_id, peers) for n in names), name=name, allow_answer=allow_answer)


def _peer_specs(agent_id: str, peers: Mapping[str, str]) -> Brief:
    if not peers:
        raise OpsdError(f"peer_spec for {agent_id} without peers", "it tells a peer's task", "use it with a pair of agents")
    return compose(*(peer_spec(agent_id, peer, peers[peer]) for peer in sorted(peers)), name="peer_spec")


register_brief("none", lambda agent_id, peers: none())
register_brief("peer_spec", _peer_specs)
register_brief("process", lambda agent_id, peers: process())


def student_leak(brief: Brief, student_texts: Iterable[str]) -> list[str]:
    """Private text of a brief that the student has seen.

    Returns:
        every run of 8 words (case and punctuation ignored) of a private section that occurs in one of the texts, in the
        brief's order, each once. A section shorter than 8 words counts as one run.
    """
    wanted: dict[str, None] = {}
    for section in brief.sections:
        words = _words(section.text) if section.private else []
        size = min(LEAK_WORDS, len(words))
        wanted |= dict.fromkeys(" ".join(words[i : i + size]) for i in range(len(words) - size + 1) if size)
    seen = [f" {' '.join(_words(text))} " for text in student_texts]
    return [run for run in wanted if any(f" {run} " in text for text in seen)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
