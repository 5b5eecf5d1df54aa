"""Metrics over the messages of a pair. S stands for its delivered sends."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.events import Pair, Send
from verl_opsd.evaluation.behaviour.patterns import CLAIM, DIVISION, FILE, ITEM, NOT_PROSE, PROTOCOL, SYMBOL, YOURS
from verl_opsd.privilege.hunks import edits, gap

_SHA = re.compile(r"\b[0-9a-f]{7,40}\b")
_DIGITS = re.compile(r"\d+")
_SPACE = re.compile(r"\s+")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
NEAR_DUPLICATE = 0.8
_SHINGLE = 5
#: Steps in which an answer counts as prompt; the one that reads the message is the first of them.
PROMPT_STEPS = 5
#: Untouched lines that edits of one file have at most between them where they still meet.
APART = 3


def shingles(text: str) -> frozenset[str]:
    """5-character shingles of a message: lower case, without SHAs, digits as 0, white space collapsed."""
    plain = _SPACE.sub(" ", _DIGITS.sub("0", _SHA.sub("", text.lower()))).strip()
    return frozenset(plain[i : i + _SHINGLE] for i in range(max(1, len(plain) - _SHINGLE + 1)))


def near_duplicates(sends: Sequence[Send]) -> int:
    """Sends whose Jaccard similarity to an earlier one of the same sender is at least 0.8."""
    found = 0
    earlier: dict[str, list[frozenset[str]]] = defaultdict(list)
    for send in sends:
        mine = shingles(send.text)
        for other in earlier[send.sender]:
            small, large = sorted((len(mine), len(other)))
            if small < NEAR_DUPLICATE * large:
                continue
            common = len(mine & other)
            if common >= NEAR_DUPLICATE * (small + large - common):
                found += 1
                break
        earlier[send.sender].append(mine)
    return found


def is_question(text: str) -> bool:
    """Whether a question mark stands outside of code and addresses."""
    return "?" in text and "?" in NOT_PROSE.sub(" ", text)


def is_board(text: str) -> bool:
    """Whether a message has at least two numbered or bulleted items."""
    return len(ITEM.findall(text)) >= 2


def is_claim(text: str) -> bool:
    """Whether a message holds the word CLAIM."""
    return bool(CLAIM.search(text))


def divides(text: str) -> bool:
    """Whether a message divides the work."""
    return bool(DIVISION.search(text))


def follows_protocol(text: str) -> bool:
    """Whether a message has both labels, ``Intent:`` and ``Approach:``."""
    return {m[1].lower() for m in PROTOCOL.finditer(text)} == {"intent", "approach"}


def names_a_place(text: str) -> bool:
    """Whether a message names a path or a symbol."""
    return bool(FILE.search(text) or SYMBOL.search(text))


def answered_questions(sends: Sequence[Send]) -> tuple[int, int]:
    """(questions that got an answer, questions): a delivered send back after the question was delivered, each used for the earliest."""
    questions = [s for s in sends if is_question(s.text)]
    open_: dict[tuple[str, str], list[Send]] = defaultdict(list)
    for q in questions:
        open_[q.to, q.sender].append(q)
    answered = 0
    for reply in sends:
        waiting = open_[reply.sender, reply.to]
        first = next((q for q in waiting if _came_before(q, reply)), None)
        if first is not None:
            waiting.remove(first)
            answered += 1
    return answered, len(questions)


def _came_before(question: Send, reply: Send) -> bool:
    """Whether a question was delivered when the reply was written: by the clock, or because the replier had read it."""
    return question.t < reply.t or (question.read_at is not None and question.read_at <= reply.step)


def answered_promptly(sends: Sequence[Send]) -> int:
    """Sends whose recipient sends something back within five steps, of which the one that reads them is the first."""
    back: dict[tuple[str, str], set[int]] = defaultdict(set)
    for s in sends:
        back[s.sender, s.to].add(s.step)
    return sum(s.read_at is not None and any(0 <= at - s.read_at < PROMPT_STEPS for at in back[s.to, s.sender]) for s in sends)


def claims(pair: Pair) -> set[tuple[str, str]]:
    """(agent, path) of every path in a division sentence; a sentence that gives to the reader claims for the reader."""
    out = set()
    for send in pair.delivered:
        if not divides(send.text):
            continue
        for sentence in _SENTENCE.split(send.text):
            if divides(sentence):
                owner = send.to if YOURS.search(sentence) else send.sender
                out |= {(owner, m[0]) for m in FILE.finditer(sentence)}
    return out


def followed_claims(pair: Pair) -> tuple[int, int]:
    """(claims that were kept, claims): the owner's patch touches the path, and the peer's does not, or more than three lines away."""
    found = claims(pair)
    patches = {a.agent_id: a.patch for a in pair.episode.agents}
    kept = 0
    for owner, path in found:
        peers = [p for agent, p in patches.items() if agent != owner]
        own = _touching(patches.get(owner, ""), path)
        kept += bool(own) and all(not (own & _touching(p, path)) or _apart(patches[owner], p, own) for p in peers)
    return kept, len(found)


def _touching(patch: str, path: str) -> set[str]:
    touched = {m[1] for m in re.finditer(r"^(?:\+\+\+|---) [ab]/([^\t\n]+)", patch, re.MULTILINE)}
    return {f for f in touched if f == path or f.endswith(f"/{path}")}


def _apart(mine: str, theirs: str, files: set[str]) -> bool:
    try:
        ours, others = edits(mine), edits(theirs)
    except OpsdError:
        return False  # a patch that can't be read proves nothing
    return all(gap(a, b) > APART for file in files for a in ours.get(file, ()) for b in others.get(file, ()))
