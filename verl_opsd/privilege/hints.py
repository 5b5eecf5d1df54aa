"""Rollout hints: private text that stood in the actor's own prompt while it acted, taken out of the ids before training.

Taking out is by index, never by text: what is left are the very ids that were read and written, and the result is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.frames import ChatMarkers, chat_blocks
from verl_opsd.tokens.records import Ids, Trajectory


def find_hints(input_ids: Ids, hint_ids: Sequence[int]) -> list[int]:
    """Starts of all occurrences of the hint's ids, ascending; they never overlap."""
    hint, ids = np.asarray(hint_ids, np.int32), np.asarray(input_ids, np.int32)
    if not len(hint):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(hint)) if len(ids) >= len(hint) else np.zeros((0, len(hint)))
    starts: list[int] = []
    for start in np.flatnonzero((windows == hint).all(-1)).tolist():
        if not starts or start >= starts[-1] + len(hint):
            starts.append(start)
    return starts


def strip_hint(trajectory: Trajectory, hint_ids: Sequence[int], starts: Sequence[int]) -> Trajectory:
    """The trajectory as if the hint had not been there.

    Args:
        hint_ids: ids of the hint.
        starts: where it stands, as the program that put it there recorded it.

    Returns:
        the same trajectory without the hint's tokens; a fork behind a hint moves with it.

    Raises:
        OpsdError: other ids stand at a start, spans overlap, a token of a reply lies in a span, or the hint still stands somewhere
            afterwards.
    """
    hint = np.asarray(hint_ids, np.int32)
    keep = np.ones(len(trajectory.input_ids), bool)
    if not len(hint):
        _refuse("an empty hint", "name the hint's ids")
    for start in sorted(starts):
        span = slice(start, start + len(hint))
        if start < 0 or not np.array_equal(trajectory.input_ids[span], hint):
            _refuse(f"other ids than the hint's at {start}", "give the recorded starts")
        if not keep[span].all():
            _refuse(f"hints that overlap at {start}", "each hint stands once")
        if (trajectory.turn_index[span] >= 0).any():
            _refuse(f"a hint at {start} inside a reply", "a hint is part of a prompt; what the policy wrote is never taken out")
        keep[span] = False
    out = dataclasses.replace(
        trajectory,
        **{
            name: getattr(trajectory, name)[keep]
            for name in ("input_ids", "loss_mask", "turn_index", "token_class", "logprobs")
        },
        fork_position=int(keep[: trajectory.fork_position].sum()),
    )
    left = find_hints(out.input_ids, hint_ids)
    if left:
        _refuse(f"the hint still stands at {left}", "record every place where the hint was put")
    written = trajectory.turn_index >= 0
    assert np.array_equal(out.input_ids[out.turn_index >= 0], trajectory.input_ids[written])
    return out


def system_end(ids: Ids, markers: ChatMarkers) -> int:
    """Position of the token that closes the first system message.

    Raises:
        OpsdError: the conversation does not begin with one.
    """
    blocks = chat_blocks(ids, markers)
    if not blocks or blocks[0].role != "system" or blocks[0].start != 0:
        raise OpsdError(
            "a conversation that does not start with a system message",
            "an actor's brief stands at the end of its system message",
            "give every conversation a system message, or set opsd.actor_brief.name=none",
        )
    return blocks[0].close


def without_hint(trajectory: Trajectory, hint_ids: list[int], markers: ChatMarkers) -> Trajectory:
    """The trajectory as if its actor had not read the hint (:func:`strip_hint`)."""
    return strip_hint(trajectory, hint_ids, [system_end(trajectory.input_ids, markers) - len(hint_ids)])


def _refuse(what: str, way_out: str) -> NoReturn:
    raise OpsdError(what, "a hint is stripped by index, whole, and leaves every reply as it was", way_out)
