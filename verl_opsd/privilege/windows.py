"""Passes of a teacher's view: which stretches of the branch each one holds, where the brief goes, and what it scores.

A pass that is longer than the teacher may read is never cut. It is refused, or, where a run says so, scored in windows: each holds the
system block and the block with the brief, and one unbroken stretch of the branch that begins with a block and ends with a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import Ids

#: Half-open ranges of positions in the branch, ascending and apart.
Spans = tuple[tuple[int, int], ...]


class ViewTooLong(OpsdError):
    """A pass of a view has more tokens than the teacher may read; nothing is truncated."""


@dataclass(frozen=True)
class Block:
    """One ChatML block: ``ids[start]`` is its <|im_start|>, ``ids[close]`` its <|im_end|> (len(ids) while it is open),
    ``body`` the first position after the role's name."""

    role: str
    start: int
    body: int
    close: int


@dataclass(frozen=True)
class PassPlan:
    """One pass over a branch.

    Attributes:
        spans: what it holds.
        at: the position of the branch before which the brief stands; in or at the end of a span.
        scored: int64, positions of the branch that predict the tokens which this pass scores.
    """

    spans: Spans
    at: int
    scored: NDArray[np.int64]

    def ids(self, branch: Ids, brief: Ids) -> Ids:
        """int32, the pass's tokens."""
        parts = []
        for a, b in self.spans:
            parts += [branch[a : self.at], brief, branch[self.at : b]] if a <= self.at < b else [branch[a:b]]
        return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)

    def index(self, position: NDArray[np.int64], brief_len: int) -> NDArray[np.int64]:
        """Where positions of the branch are found in the pass."""
        starts, ends = np.array(self.spans, np.int64).reshape(-1, 2).T
        before = np.concatenate([[0], np.cumsum(ends - starts)[:-1]])
        s = np.searchsorted(starts, position, side="right") - 1
        assert (s >= 0).all() and (position < ends[s]).all()
        return np.asarray(before[s] + position - starts[s] + brief_len * (position >= self.at), np.int64)


def size_of(spans: Spans) -> int:
    """Tokens of the branch that the spans hold."""
    return sum(b - a for a, b in spans)


def windows(
    whole: PassPlan,
    blocks: Sequence[Block],
    reply: Sequence[int],
    kept: Sequence[int],
    brief_len: int,
    max_len: int,
    context: int,
) -> list[PassPlan]:
    """The windows of a pass that is too long. Each scored position is scored in exactly one of them, a reply never in two.

    A window needs ``context`` tokens before its first scored reply, from the start of a block that is no reply, or all that there are. With
    those it goes on for as many scored replies as fit, and then back over as many tokens as fit.

    Args:
        whole: the pass, one span from the branch's start.
        blocks: of the branch. reply: for each of ``whole.scored`` the index of its block, ascending.
        kept: blocks that every window holds: the system block, the one with the brief.

    Raises:
        ViewTooLong: a reply does not fit with ``context`` tokens before it and the kept blocks.
    """
    end = whole.spans[-1][1]
    nexts = [b.start for b in blocks[1:]] + [end]
    fixed = [(blocks[k].start, min(nexts[k], end)) for k in kept]
    body = fixed[0][1] if kept and blocks[kept[0]].start == 0 else 0
    starts = sorted({body, *(b.start for b in blocks if b.role != "assistant" and b.start >= body)})
    replies = sorted(set(reply))
    of = {r: whole.scored[np.asarray(reply) == r] for r in replies}

    def spans(start: int, last: int) -> Spans:
        return _joined([*fixed, (start, min(blocks[last].close + 1, end))])

    def fits(found: Spans) -> bool:
        return size_of(found) + brief_len <= max_len

    out: list[PassPlan] = []
    while replies:
        first = replies.pop(0)
        start = body
        if out or not fits(spans(body, first)):
            start = max((s for s in starts if s <= blocks[first].start - context), default=body)
        found, members = spans(start, first), [first]
        if not fits(found):
            raise ViewTooLong(
                f"a window of {size_of(found) + brief_len} tokens around the reply at {blocks[first].start}, more than max_len={max_len}",
                f"a window holds {', '.join(blocks[k].role for k in kept)} block, {context} tokens before a reply, and the whole reply",
                "lower opsd.brief.window_context, shorten the brief, or raise the teacher's context",
            )
        while replies and fits(spans(start, replies[0])):
            members.append(replies.pop(0))
        found = spans(next(s for s in starts if fits(spans(s, members[-1]))), members[-1])
        out.append(PassPlan(found, whole.at, np.concatenate([of[r] for r in members])))
    return out


def _joined(spans: Sequence[tuple[int, int]]) -> Spans:
    """The union of half-open ranges, ascending."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(s for s in spans if s[0] < s[1]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return tuple(out)
