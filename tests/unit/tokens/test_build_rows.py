"""Rows and verl's split of a trajectory, against values worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from verl_opsd.errors import OpsdError
from verl_opsd.privilege import TeacherView
from verl_opsd.tokens import Trajectory, build_row, prompt_response
from verl_opsd.tokens.rows import FIELDS, FLOAT_FIELDS

# context 5 6, reply 7 8, context 9, reply 4 (a summary, no loss), context 9, reply 3
TRAJECTORY = Trajectory(
    episode_id="e",
    agent_id="a",
    branch=0,
    input_ids=np.array([5, 6, 7, 8, 9, 4, 9, 3], np.int32),
    loss_mask=np.array([0, 0, 1, 1, 0, 0, 0, 1], np.int8),
    turn_index=np.array([-1, -1, 0, 0, -1, 1, -1, 2], np.int32),
    token_class=np.array([-1, -1, 0, 2, -1, 4, -1, 1], np.int8),
    logprobs=np.array([0, 0, -0.5, -1.5, 0, -2, 0, -0.25], np.float32),
    contract_hash="h",
    model_version=(0, 0),
    n_turns=3,
)
# A brief 70 71 before token 6.
VIEW = TeacherView(
    ids=np.array([5, 70, 71, 6, 7, 8, 9, 4, 9, 3], np.int32),
    lengths=np.array([10], np.int64),
    position=np.array([3, 4, 8], np.int64),
    brief_span=np.array([[1, 3]], np.int64),
    placement="system",
)
COEF, ANCHOR = torch.tensor([0.5, 0.25, 0.0]), torch.zeros(3)


def test_golden_row():
    row = build_row(TRAJECTORY, VIEW, COEF, ANCHOR)
    assert set(row) == set(FIELDS)
    assert all(row[k].dtype == (torch.float32 if k in FLOAT_FIELDS else torch.int64) for k in row)
    assert {k: v.tolist() for k, v in row.items()} == {
        "opsd_position": [1, 2, 6],
        "opsd_coef": [0.5, 0.25, 0.0],
        "opsd_anchor": [0.0, 0.0, 0.0],
        "opsd_behaviour": [-0.5, -1.5, -0.25],
        "opsd_reward": [0.0, 0.0, 0.0],
        "opsd_class": [0, 2, 1],
        "opsd_turn": [0, 0, 2],
        "opsd_view_ids": [5, 70, 71, 6, 7, 8, 9, 4, 9, 3],
        "opsd_view_len": [10],
        "opsd_view_pos": [3, 4, 8],
    }


def test_golden_split():
    prompt, response, mask, logprobs = prompt_response(TRAJECTORY)
    assert (prompt, response) == ([5, 6], [7, 8, 9, 4, 9, 3])
    assert mask == [1, 1, 0, 0, 0, 1]
    assert logprobs == [-0.5, -1.5, 0.0, -2.0, 0.0, -0.25]
    assert all(type(x) is int for x in prompt + response + mask) and all(type(x) is float for x in logprobs)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_view_is_refused(shift):
    with pytest.raises(OpsdError):
        build_row(TRAJECTORY, dataclasses.replace(VIEW, position=VIEW.position + shift), COEF, ANCHOR)


@pytest.mark.parametrize(
    ("coef", "anchor"),
    [
        (COEF[:2], ANCHOR),
        (COEF, torch.zeros(4)),
        (COEF.double(), ANCHOR),
        (torch.tensor([1.0, float("nan"), 0.0]), ANCHOR),
        (COEF, torch.tensor([0.0, float("inf"), 0.0])),
        (COEF[:, None], ANCHOR),
    ],
)
def test_bad_coefficients_are_refused(coef, anchor):
    with pytest.raises(OpsdError):
        build_row(TRAJECTORY, VIEW, coef, anchor)


def test_a_view_of_another_trajectory_is_refused():
    with pytest.raises(OpsdError):
        build_row(TRAJECTORY, dataclasses.replace(VIEW, position=VIEW.position[:2]), COEF, ANCHOR)
    with pytest.raises(OpsdError):
        build_row(TRAJECTORY, dataclasses.replace(VIEW, ids=VIEW.ids[::-1].copy()), COEF, ANCHOR)


def test_no_policy_token_has_no_split():
    with pytest.raises(OpsdError):
        prompt_response(dataclasses.replace(TRAJECTORY, turn_index=np.full(8, -1, np.int32)))
