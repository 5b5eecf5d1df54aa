"""Branches: golden examples by hand, and properties over random conversations with retries, compaction and rewrites."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_chat import random_conversation

from verl_opsd.errors import OpsdError
from verl_opsd.tokens import Sampling, TurnRecord, build_trajectories, statistics


def turn(number, branch, start, new, reply, **more) -> TurnRecord:
    values = {
        "episode_id": "e",
        "agent_id": "a",
        "stop_reason": "stop",
        "kind": "policy",
        "sampling": Sampling(1.0, 1.0, -1, 8),
        "model_version": 3,
        "contract_hash": "h",
        "t_start": 0.0,
        "t_end": 1.0,
        **more,
    }
    return TurnRecord(
        turn=number,
        branch=branch,
        start=start,
        new_ids=np.array(new, np.int32),
        response_ids=np.array(reply, np.int32),
        response_logprobs=np.array([-0.5 * (i + 1) for i in range(len(reply))], np.float32),
        **values,
    )


GOLDEN = [
    turn(0, 0, 0, [1, 2], [3, 4]),
    turn(1, 0, 4, [5], [6], kind="malformed", model_version=5),
    turn(2, 1, 5, [7, 8], [9, 9], parent_branch=0, fork_position=5, fork_reason="retry"),
    turn(3, 2, 1, [20], [21], kind="summarizer", parent_branch=0, fork_position=1, fork_reason="compaction"),
]


def test_golden_fork():
    main, retry, summary = build_trajectories(GOLDEN)
    assert main.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert main.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert main.turn_index.tolist() == [-1, -1, 0, 0, -1, 1]
    assert main.logprobs.tolist() == [0, 0, -0.5, -1, 0, -0.5]
    assert main.token_class.tolist() == [-1, -1, 4, 4, -1, 4]
    assert (main.model_version, main.n_turns) == ((3, 5), 2)
    assert retry.input_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 9]  # the parent's ids up to 5, its reply 3 4 as context
    assert retry.loss_mask.tolist() == [0] * 7 + [1, 1]
    assert retry.turn_index.tolist() == [-1] * 7 + [2, 2]
    assert (retry.branch, retry.parent_branch, retry.fork_position, retry.fork_reason) == (1, 0, 5, "retry")
    assert summary.input_ids.tolist() == [1, 20, 21]
    assert summary.loss_mask.tolist() == [0, 0, 0] and summary.turn_index.tolist() == [-1, -1, 3]
    assert [t.input_ids.dtype for t in (main, retry)] == [np.int32] * 2


def test_golden_statistics():
    found = statistics(build_trajectories(GOLDEN, classify=lambda ids: np.where(ids == 9, 0, 2).astype(np.int8)))
    assert found == {
        "branches": 3,
        "turns": 4,
        "merge_ratio": 4 / 3,
        "sequence_tokens": 18,
        "loss_tokens": 5,
        "tokens_per_loss_token": 3.6,
        "forks": {"start": 1, "retry": 1, "compaction": 1},
        "ledger": {"context": 12, "think": 2, "message": 0, "command": 4, "code": 0, "other": 0},
    }


def test_loss_kinds_choose_the_turns():
    def masks(kinds):
        return [int(t.loss_mask.sum()) for t in build_trajectories(GOLDEN, loss_kinds=kinds)]

    assert masks(("policy",)) == [2, 2, 0]
    assert masks(("summarizer",)) == [0, 0, 1]
    assert masks(()) == [0, 0, 0]
    assert statistics(build_trajectories(GOLDEN, loss_kinds=()))["tokens_per_loss_token"] is None


def test_nothing_gives_nothing():
    assert build_trajectories([]) == ()
    assert statistics([])["sequence_tokens"] == 0


@pytest.mark.parametrize(
    "turns",
    [
        [GOLDEN[0], dataclasses.replace(GOLDEN[1], start=3)],
        [GOLDEN[0], dataclasses.replace(GOLDEN[1], start=5)],
        [GOLDEN[0], dataclasses.replace(GOLDEN[1], agent_id="b")],
        [GOLDEN[0], dataclasses.replace(GOLDEN[1], contract_hash="other")],
        [GOLDEN[0], dataclasses.replace(GOLDEN[1], turn=0)],
        [GOLDEN[1], GOLDEN[0]],
        [GOLDEN[0], dataclasses.replace(GOLDEN[2], parent_branch=4)],
        [GOLDEN[0], GOLDEN[2]],
        [dataclasses.replace(GOLDEN[0], response_logprobs=np.zeros(1, np.float32))],
    ],
    ids=["overlap", "gap", "agent", "contract", "twice", "order", "no parent", "fork past the parent", "logprobs"],
)
def test_records_that_do_not_join_are_refused(turns):
    with pytest.raises(OpsdError):
        build_trajectories(turns)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 12))
def test_every_prompt_is_rebuilt_exactly_and_every_policy_token_counts_once(seed, calls):
    turns, engine = asyncio.run(random_conversation(random.Random(seed), calls))
    trajectories = build_trajectories(turns)
    branches = {t.branch: t for t in trajectories}
    assert len(turns) == len(engine.seen)
    scored: dict[int, int] = dict.fromkeys(range(len(turns)), 0)
    for trajectory in trajectories:
        lengths = {len(a) for a in dataclasses.astuple(trajectory) if isinstance(a, np.ndarray)}
        assert lengths == {len(trajectory.input_ids)}
        for t in trajectory.turn_index[trajectory.loss_mask == 1].tolist():
            scored[t] += 1
        assert not trajectory.loss_mask[: trajectory.fork_position].any()
    for record, (prompt, reply) in zip(turns, engine.seen, strict=True):
        trajectory = branches[record.branch]
        own = trajectory.turn_index == record.turn
        assert trajectory.input_ids[: record.prompt_len].tolist() == prompt
        assert trajectory.input_ids[own].tolist() == reply
        assert np.flatnonzero(own).tolist() == list(range(record.prompt_len, record.end))
        assert trajectory.logprobs[own].tolist() == [-0.25 * (k + 1) for k in range(len(reply))]
        assert scored[record.turn] == (0 if record.kind == "summarizer" else len(reply))
    counts = statistics(trajectories)
    assert sum(counts["ledger"].values()) == counts["sequence_tokens"] == sum(len(t.input_ids) for t in trajectories)
    assert counts["turns"] == len(turns)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(2, 10))
def test_a_fork_shares_exactly_the_ids_before_it(seed, calls):
    """The recorded fork is the first token at which a new prompt leaves its parent; no other branch goes further."""
    turns, engine = asyncio.run(random_conversation(random.Random(seed), calls))
    known: dict[int, list[int]] = {}
    for record, (prompt, reply) in zip(turns, engine.seen, strict=True):
        if record.branch in known:
            assert prompt[: len(known[record.branch])] == known[record.branch]
        elif known:
            shared = {}
            for branch, ids in known.items():
                n = 0
                while n < min(len(ids), len(prompt)) and ids[n] == prompt[n]:
                    n += 1
                shared[branch] = n
            assert record.fork_position == shared[record.parent_branch] == max(shared.values())
            assert record.fork_reason != "start"
        known[record.branch] = prompt + reply
