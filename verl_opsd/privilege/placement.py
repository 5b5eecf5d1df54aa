"""Where a brief goes: a pure function from a trajectory's ids and a brief's ids to the teacher's ids and an index map.

    system      in the first system message, right before the token that closes it; one pass over the branch
    last_user   right before the token that closes the last user turn before each reply; one pass for each such turn,
                which ends with the last reply that the turn conditions

The student's tokens are the same ids in the same order in every view, and a brief never stands inside an assistant
block: behind the generation header it would be text of the reply, inside <think> the teacher's own reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.frames import ChatMarkers, chat_blocks
from verl_opsd.privilege.view import Placement, TeacherView
from verl_opsd.privilege.windows import Block, PassPlan, ViewTooLong, windows
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.records import Ids

#: What counts as a user turn where a template wraps tool results into user blocks: every user ``block``, or only a
#: ``message``, i.e. a user block that does not begin as a tool's result does.
UserTurn = Literal["block", "message"]


def check_outside_replies(at: int, blocks: Sequence[Block]) -> None:
    """
    Raises:
        OpsdError: ``at`` lies inside an assistant block, i.e. after its <|im_start|> and not after its <|im_end|>.
    """
    for block in blocks:
        if block.role == "assistant" and block.start < at <= block.close:
            raise OpsdError(
                f"a brief at position {at}, inside the assistant block {block.start}..{block.close}",
                "a brief stands outside every assistant block: not after the generation header, not inside <think>",
                "place it before the token that closes a system or user message",
            )


def splice(ids: Ids, at: int, brief_ids: Ids, blocks: Sequence[Block]) -> Ids:
    """``ids`` with the brief before ``ids[at]``; see :func:`check_outside_replies`."""
    check_outside_replies(at, blocks)
    return np.concatenate([ids[:at], brief_ids, ids[at:]]).astype(np.int32)


def teacher_view(
    input_ids: Ids,
    loss_mask: NDArray[np.int8],
    brief_ids: Sequence[int],
    placement: Placement,
    markers: ChatMarkers,
    *,
    user_turn: UserTurn = "block",
    max_len: int | None = None,
    window_context: int | None = None,
) -> TeacherView:
    """The teacher's view of one trajectory.

    Args:
        input_ids: int32[T]. loss_mask: int8[T], 1 on tokens to be scored; N of them at t >= 1.
        brief_ids: ids of the brief, without control tokens. Empty: one pass, the trajectory itself (identity teacher).
        user_turn: what counts as a user turn for ``last_user``.
        max_len: tokens that a pass may have.
        window_context: None: a longer pass is refused; otherwise it is scored in windows with at least as many tokens of the branch
            before their first scored reply (``windows.windows``).

    Returns:
        the view; ``position`` has N entries in the trajectory's order.

    Raises:
        OpsdError: unknown placement or user_turn, mask of another length or on the first token, control tokens in the
            brief, a scored token outside an assistant block, or no system message or user turn to hold the brief.
        ViewTooLong: a pass longer than max_len, or a reply that no window holds.
    """
    ids, brief = np.asarray(input_ids, np.int32), np.asarray(brief_ids, np.int32).reshape(-1)
    if placement not in ("system", "last_user") or user_turn not in ("block", "message"):
        _refuse(f"placement={placement!r}, user_turn={user_turn!r}", "use system or last_user; block or message")
    if len(loss_mask) != len(ids) or (len(ids) and loss_mask[0]):
        _refuse(
            f"{len(ids)} ids with a mask of {len(loss_mask)}, first entry {loss_mask[:1].tolist()}",
            "give the mask of the same trajectory; its first token has no predicting position",
        )
    if np.isin(brief, (markers.im_start, markers.im_end)).any():
        _refuse("a brief that holds <|im_start|> or <|im_end|>", "encode the brief with split_special_tokens=True")
    position = loss_positions(np.asarray(loss_mask))
    blocks = chat_blocks(ids, markers)
    system = [0] if blocks and blocks[0].role == "system" and blocks[0].start == 0 else []
    plans: list[tuple[PassPlan, list[int]]]  # and the blocks that each window of a pass holds
    if not len(brief):
        plans = [(PassPlan(((0, len(ids)),), 0, position), system)]
    elif placement == "system":
        if not system:
            _refuse(
                "a trajectory that does not start with a system message",
                "give every conversation a system message, or use placement last_user",
            )
        _reply_blocks(blocks, position)
        plans = [(PassPlan(((0, len(ids)),), blocks[0].close, position), system)]
    else:
        reply = _reply_blocks(blocks, position)
        turns = [
            i
            for i, b in enumerate(blocks)
            if b.role == "user" and (user_turn == "block" or not _holds_tool_result(ids, b, markers))
        ]
        starts = np.array([blocks[i].start for i in turns], np.int64)
        # For each scored token the index of the last user turn before its reply.
        holder = np.searchsorted(starts, np.array([blocks[i].start for i in reply], np.int64)) - 1
        if len(holder) and holder.min() < 0:
            _refuse(
                f"a scored reply at position {int(position[np.argmin(holder)])} with no user turn before it",
                "use placement system, or user_turn=block",
            )
        plans = []
        for h in np.unique(holder).tolist():
            end = min(blocks[reply[int(np.flatnonzero(holder == h)[-1])]].close + 1, len(ids))
            plans.append((PassPlan(((0, end),), blocks[turns[h]].close, position[holder == h]), [*system, turns[h]]))
    fitting: list[PassPlan] = []
    for plan, kept in plans:
        length = plan.spans[0][1] + len(brief)
        if max_len is None or length <= max_len:
            fitting.append(plan)
        elif window_context is None:
            raise ViewTooLong(
                f"a teacher pass of {length} tokens, {length - max_len} more than max_len={max_len}",
                "a view is never truncated",
                "shorten the brief, raise the teacher's context, or leave such branches out or score them in windows "
                "(opsd.brief.too_long)",
            )
        else:
            of = _reply_blocks(blocks, plan.scored)
            fitting += windows(plan, blocks, of, kept, len(brief), max_len, window_context)
    return _view(ids, position, fitting, brief, placement, blocks)


def _reply_blocks(blocks: list[Block], position: NDArray[np.int64]) -> list[int]:
    """For each scored token the index of the assistant block that holds it."""
    starts = np.array([b.start for b in blocks], np.int64)
    found = (np.searchsorted(starts, position + 1, side="right") - 1).tolist()
    for i, p in zip(found, position.tolist(), strict=True):
        if i < 0 or blocks[i].role != "assistant" or not blocks[i].body < p + 1 <= blocks[i].close:
            _refuse(
                f"a scored token at {p + 1} outside every assistant block",
                "scored tokens are replies of the policy; check the mask and that the template is ChatML",
            )
    return found


def _holds_tool_result(ids: Ids, block: Block, markers: ChatMarkers) -> bool:
    head = ids[block.body : block.body + len(markers.tool_response)]
    return bool(markers.tool_response) and tuple(head.tolist()) == markers.tool_response


def _view(
    ids: Ids, position: NDArray[np.int64], plans: list[PassPlan], brief: Ids, placement: Placement, blocks: list[Block]
) -> TeacherView:
    """Joins the passes, maps the positions and asserts that both are exact."""
    passes = [p.ids(ids, brief) for p in plans]
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in passes])]).astype(np.int64)
    mapped, spans = [np.zeros(0, np.int64)], []
    for offset, plan, one in zip(offsets[:-1].tolist(), plans, passes, strict=True):
        check_outside_replies(plan.at, blocks if len(brief) else [])
        at = int(sum(min(b, plan.at) - a for a, b in plan.spans if a < plan.at))
        mapped.append(offset + plan.index(plan.scored, len(brief)))
        spans.append((offset + at, offset + at + len(brief)))
        held = np.concatenate([np.zeros(0, np.int32), *(ids[a:b] for a, b in plan.spans)])
        assert np.array_equal(np.concatenate([one[:at], one[at + len(brief) :]]), held)
        assert np.array_equal(one[at : at + len(brief)], brief)
    joined, where = np.concatenate([np.zeros(0, np.int32), *passes]).astype(np.int32), np.concatenate(mapped)
    assert np.array_equal(np.concatenate([np.zeros(0, np.int64), *(p.scored for p in plans)]), position)  # each exactly once
    assert (np.diff(where) > 0).all() and np.array_equal(joined[where + 1], ids[position + 1])
    brief_span = np.array(spans, np.int64).reshape(len(passes), 2)
    return TeacherView(joined, np.diff(offsets), where, brief_span, placement, tuple(p.spans for p in plans))


def _refuse(what: str, way_out: str) -> NoReturn:
    raise OpsdError(
        what,
        "a teacher view holds the student's tokens unchanged and a brief in a system or user message before them",
        way_out,
    )
