"""From turn records to trajectories: one row of exact ids for each branch, every policy token in one branch's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import TOKEN_CLASSES, Ids, Trajectory, TurnKind, TurnRecord

#: Gives each reply id its class, e.g. ``functools.partial(token_classes, decode=tokenizer.decode)``.
Classify = Callable[[Ids], NDArray[np.int8]]
OTHER = TOKEN_CLASSES.index("other")


def build_trajectories(
    turns: Sequence[TurnRecord],
    loss_kinds: tuple[TurnKind, ...] = ("policy", "malformed"),
    classify: Classify | None = None,
) -> tuple[Trajectory, ...]:
    """One trajectory for each branch, in the order in which the branches were opened.

    A branch's ids are its parent's up to the fork, then its own. Inherited tokens are context (loss_mask 0, turn -1),
    even where the parent's policy wrote them: a policy token carries loss in the branch that it was sampled in, and
    there only.

    Args:
        turns: all turns of one agent, in order.
        loss_kinds: kinds of turns whose replies carry loss. A branch without any is kept, with a mask of zeros.
        classify: classes of a turn's reply ids; without it every policy token is ``other``.

    Raises:
        OpsdError: turns of several agents or contracts, a turn that does not start where its branch ends, or a fork
            from a branch or position that does not exist.
    """
    if not turns:
        return ()
    first = turns[0]
    owner = (first.episode_id, first.agent_id, first.contract_hash)
    grouped: dict[int, list[TurnRecord]] = {}
    ids: dict[int, list[Ids]] = {}
    length: dict[int, int] = {}
    last_turn = -1
    for turn in turns:
        here = f"turn {turn.turn} of {turn.episode_id}/{turn.agent_id}"
        if (turn.episode_id, turn.agent_id, turn.contract_hash) != owner:
            _refuse(f"{here} (contract {turn.contract_hash[:12]}) among turns of {first.episode_id}/{first.agent_id}")
        if turn.turn <= last_turn:
            _refuse(f"{here} comes after turn {last_turn}")
        last_turn = turn.turn
        if len(turn.response_ids) != len(turn.response_logprobs):
            _refuse(f"{here}: {len(turn.response_ids)} reply ids, {len(turn.response_logprobs)} log-probabilities")
        b = turn.branch
        if b not in grouped:
            if turn.parent_branch == -1:
                inherited = np.zeros(0, np.int32)
            elif turn.parent_branch in ids:
                inherited = np.concatenate(ids[turn.parent_branch])[: turn.fork_position]
            else:
                _refuse(f"{here} forks from branch {turn.parent_branch}, which has no turn before it")
            if len(inherited) != turn.fork_position:
                _refuse(f"{here} forks at {turn.fork_position} from a branch of {len(inherited)} tokens")
            grouped[b], ids[b], length[b] = [], [inherited], turn.fork_position
        if turn.start != length[b]:
            _refuse(f"{here} starts at {turn.start}, but its branch {b} ends at {length[b]}")
        grouped[b].append(turn)
        ids[b] += [turn.new_ids, turn.response_ids]
        length[b] = turn.end
    return tuple(_trajectory(grouped[b], np.concatenate(ids[b]), loss_kinds, classify) for b in grouped)


def _trajectory(
    turns: list[TurnRecord], input_ids: Ids, loss_kinds: tuple[TurnKind, ...], classify: Classify | None
) -> Trajectory:
    n, first = len(input_ids), turns[0]
    loss_mask, logprobs = np.zeros(n, np.int8), np.zeros(n, np.float32)
    turn_index, token_class = np.full(n, -1, np.int32), np.full(n, -1, np.int8)
    for turn in turns:
        reply = slice(turn.prompt_len, turn.end)
        loss_mask[reply] = turn.kind in loss_kinds
        turn_index[reply] = turn.turn
        logprobs[reply] = turn.response_logprobs
        token_class[reply] = OTHER if classify is None else classify(turn.response_ids)
    versions = [t.model_version for t in turns]
    return Trajectory(
        episode_id=first.episode_id,
        agent_id=first.agent_id,
        branch=first.branch,
        input_ids=input_ids.astype(np.int32, copy=False),
        loss_mask=loss_mask,
        turn_index=turn_index,
        token_class=token_class,
        logprobs=logprobs,
        contract_hash=first.contract_hash,
        model_version=(min(versions), max(versions)),
        parent_branch=first.parent_branch,
        fork_position=first.fork_position,
        fork_reason=first.fork_reason,
        n_turns=len(turns),
    )


def loss_positions(loss_mask: NDArray[np.int8]) -> NDArray[np.int64]:
    """Predicting positions t of all loss tokens, i.e. ``loss_mask[t + 1] == 1``; int64[N], ascending."""
    return np.flatnonzero(loss_mask[1:] == 1).astype(np.int64)


def statistics(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Counts over trajectories of any number of agents.

    Returns:
        branches, turns, merge_ratio (turns per branch), sequence_tokens (what a forward pass reads), loss_tokens,
        tokens_per_loss_token (None without loss tokens), forks (reason -> branches), and ledger: tokens by
        ``context`` and by class of policy tokens, which sum to sequence_tokens.

    Raises:
        OpsdError: the ledger does not sum, i.e. a token is neither context nor of a known class.
    """
    branches, turns = len(trajectories), sum(t.n_turns for t in trajectories)
    sequence = sum(len(t.input_ids) for t in trajectories)
    loss = sum(int(t.loss_mask.sum()) for t in trajectories)
    ledger = {"context": sum(int((t.turn_index < 0).sum()) for t in trajectories)}
    for code, name in enumerate(TOKEN_CLASSES):
        ledger[name] = sum(int(((t.token_class == code) & (t.turn_index >= 0)).sum()) for t in trajectories)
    if sum(ledger.values()) != sequence:
        _refuse(f"a ledger of {ledger} for {sequence} tokens")
    forks: dict[str, int] = {}
    for t in trajectories:
        forks[t.fork_reason] = forks.get(t.fork_reason, 0) + 1
    return {
        "branches": branches,
        "turns": turns,
        "merge_ratio": turns / branches if branches else 0.0,
        "sequence_tokens": sequence,
        "loss_tokens": loss,
        "tokens_per_loss_token": sequence / loss if loss else None,
        "forks": forks,
        "ledger": ledger,
    }


def _refuse(what: str) -> NoReturn:
    raise OpsdError(
        what,
        "turns of one agent, in order, each starting where its branch ends; a token is context or of one policy class",
        "pass the unchanged records of one session",
    )
