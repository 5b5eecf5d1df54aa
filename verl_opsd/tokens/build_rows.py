"""Training rows from trajectories: the fields of :mod:`verl_opsd.tokens.rows`, and verl's split into prompt and
response.

Shape suffix: N loss positions of the trajectory, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.records import Trajectory
from verl_opsd.tokens.rows import check_row

if TYPE_CHECKING:  # privilege imports tokens; here it is only a type
    from verl_opsd.privilege.view import TeacherView


class PromptResponse(NamedTuple):
    """verl's form of a trajectory; the last three have one entry for each response id."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]


def build_row(trajectory: Trajectory, view: TeacherView, coef_N: Tensor, anchor_N: Tensor) -> dict[str, Tensor]:
    """The opsd fields of one row; ``opsd_reward`` is 0 until the trainer knows the other episodes of the round.

    Args:
        view: the teacher's view of the same trajectory.
        coef_N, anchor_N: final coefficients of the divergence and of the anchor's divergence (see tokens.rows),
        float32.

    Raises:
        OpsdError: the view or the coefficients are not of this trajectory's N loss positions, a coefficient is not
            finite, or the finished row breaks the contract of tokens.rows.
    """
    position = loss_positions(trajectory.loss_mask)
    lengths = {"view.position": len(view.position), "coef_N": coef_N.numel(), "anchor_N": anchor_N.numel()}
    if set(lengths.values()) != {len(position)}:
        raise OpsdError(
            f"{lengths} for branch {trajectory.branch} of {trajectory.episode_id}/{trajectory.agent_id}",
            f"one entry for each of the trajectory's {len(position)} loss positions",
            "build view and coefficients from this trajectory",
        )
    for name, values in (("coef_N", coef_N), ("anchor_N", anchor_N)):
        if values.dtype != torch.float32 or values.dim() != 1 or not bool(torch.isfinite(values).all()):
            raise OpsdError(
                f"{name} of {values.dtype}, shape {tuple(values.shape)}",
                "coefficients are finite float32 vectors",
                "see how weights and denominators were computed",
            )
    input_ids = torch.from_numpy(trajectory.input_ids.astype(np.int64))
    row = {
        "opsd_position": torch.from_numpy(position),
        "opsd_coef": coef_N,
        "opsd_anchor": anchor_N,
        "opsd_behaviour": torch.from_numpy(trajectory.logprobs[position + 1].astype(np.float32)),
        "opsd_reward": torch.zeros(len(position)),
        "opsd_class": torch.from_numpy(trajectory.token_class[position + 1].astype(np.int64)),
        "opsd_turn": torch.from_numpy(trajectory.turn_index[position + 1].astype(np.int64)),
        "opsd_view_ids": torch.from_numpy(view.ids.astype(np.int64)),
        "opsd_view_len": torch.from_numpy(view.lengths.astype(np.int64)),
        "opsd_view_pos": torch.from_numpy(view.position.astype(np.int64)),
    }
    check_row(input_ids, row)
    return row


def prompt_response(trajectory: Trajectory) -> PromptResponse:
    """Splits a branch before its first own policy token; context after it stays in the response with mask 0.

    Raises:
        OpsdError: the branch has no policy token of its own.
    """
    own = np.flatnonzero(trajectory.turn_index >= 0)
    if not len(own):
        raise OpsdError(
            f"branch {trajectory.branch} of {trajectory.episode_id}/{trajectory.agent_id} without policy tokens",
            "a row's response begins with a policy token",
            "drop the branch, or build it with tokens.branches.build_trajectories",
        )
    split = int(own[0])
    return PromptResponse(
        trajectory.input_ids[:split].tolist(),
        trajectory.input_ids[split:].tolist(),
        trajectory.loss_mask[split:].tolist(),
        trajectory.logprobs[split:].tolist(),
    )
