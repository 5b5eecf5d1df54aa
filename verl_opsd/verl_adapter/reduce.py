"""A round's rows in optimizer steps, and their final coefficients: the reduction over each step's global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_opsd.config import LossConfig
from verl_opsd.distill.policy import leave_one_out
from verl_opsd.distill.reduction import coefficients
from verl_opsd.distill.weights import threshold_mask


def episode_of(key: str) -> str:
    """The episode of a row; its rows share everything before the last underscore of their keys."""
    return key.rsplit("_", 1)[0]


def update_groups(keys: Sequence[str], carries: Sequence[bool], per_update: int | None) -> list[list[int]]:
    """Rows of each optimizer step; steps count episodes.

    Args:
        keys: of the rows (:func:`episode_of`).
        carries: whether a row holds a position with weight.
        per_update: episodes of a step; None: all.

    Returns:
        Row numbers of each step, every row once. An episode without weight (its agents never got to reply) is no episode of
        a step of its own, which would have nothing to learn from: its rows ride along in the last one.
    """
    episodes: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        episodes.setdefault(episode_of(key), []).append(i)
    loaded = [rows for rows in episodes.values() if any(carries[i] for i in rows)]
    empty = [rows for rows in episodes.values() if not any(carries[i] for i in rows)]
    size = per_update or max(1, len(loaded))
    groups = [sum(loaded[i : i + size], []) for i in range(0, len(loaded), size)] or [[]]
    groups[-1] += sum(empty, [])
    return groups


def micro_batch_rows(section: Any) -> int:
    """Rows of which a rank's part of an optimizer step is a multiple: verl takes whole micro-batches, for the update and for a control.

    Args:
        section: verl's ``actor_rollout_ref``.
    """
    if section.actor.use_dynamic_bsz:
        return 1
    return math.lcm(section.actor.ppo_micro_batch_size_per_gpu, section.rollout.log_prob_micro_batch_size_per_gpu)


def with_coefficients(
    rows: list[dict[str, Tensor]], keys: Sequence[str], groups: Sequence[int], loss: LossConfig
) -> list[dict[str, Tensor]]:
    """Replaces static weights by final coefficients (``tokens.rows``).

    Args:
        rows: ``opsd_coef`` and ``opsd_anchor`` hold static weights; padding rows have no position.
        keys: of the rows; rows of one episode share everything before the last underscore.
        groups: the optimizer step of each row.

    Returns:
        New rows; the coefficients of one step sum to 1 (divergence) and ``loss.anchor`` (anchor).

    Raises:
        OpsdError: no position of a step carries weight.
    """
    out = [dict(r) for r in rows]
    terms = [("opsd_coef", 1.0)] + ([("opsd_anchor", loss.anchor)] if loss.anchor > 0 else [])
    for name, scale in terms:
        for row, coef in zip(out, _reduced(rows, [r[name] for r in rows], keys, groups, loss, scale), strict=True):
            row[name] = coef
    return out


def with_rewards(
    rows: list[dict[str, Tensor]], keys: Sequence[str], groups: Sequence[int], rewards: Mapping[str, float], coef: float
) -> list[dict[str, Tensor]]:
    """Fills ``opsd_reward``: ``coef`` times the episode's advantage, over the number of policy positions of the optimizer step.

    The advantage is the episode's reward minus the mean of the round's other episodes (``distill.policy.leave_one_out``).

    Args:
        rewards: of each episode of the round (:func:`episode_of`); padding rows need none.

    Raises:
        OpsdError: fewer than two episodes.
    """
    advantages = leave_one_out(torch.tensor(list(rewards.values()), dtype=torch.float64)).tolist()
    advantage_of = dict(zip(rewards, advantages, strict=True))
    positions = {g: sum(len(r["opsd_position"]) for r, x in zip(rows, groups, strict=True) if x == g) for g in set(groups)}
    out = []
    for row, key, g in zip(rows, keys, groups, strict=True):
        n = len(row["opsd_position"])
        value = coef * advantage_of[episode_of(key)] / positions[g] if n else 0.0
        out.append(row | {"opsd_reward": torch.full((n,), value, dtype=torch.float32)})
    return out


def with_threshold(
    rows: list[dict[str, Tensor]], divergences: Sequence[Tensor], keys: Sequence[str], groups: Sequence[int], loss: LossConfig
) -> tuple[list[Tensor], float]:
    """Coefficients of a round under a threshold that was taken at collection.

    Args:
        rows: ``opsd_coef`` holds the final coefficients without the threshold.
        divergences: float32[N] of each row's loss positions at the weights before the round's first update; nats.
        keys, groups: as in :func:`with_coefficients`.

    Returns:
        New coefficients of each row, and the share of the positions that carried weight which are kept.

    Raises:
        OpsdError: a step keeps no position and the denominator is that of the kept ones.
    """
    assert loss.threshold is not None
    masks = [threshold_mask(d, loss.threshold.above) for d in divergences]
    masked = [r["opsd_coef"] * m for r, m in zip(rows, masks, strict=True)]
    before, after = (sum(int((c != 0).sum()) for c in cs) for cs in ([r["opsd_coef"] for r in rows], masked))
    if loss.threshold.denominator == "kept":
        # Coefficients of one denominator differ from the static weights by one factor, which the new denominator cancels.
        masked = _reduced(rows, masked, keys, groups, loss)
    return masked, after / max(1, before)


def _reduced(
    rows: list[dict[str, Tensor]],
    weights: Sequence[Tensor],
    keys: Sequence[str],
    groups: Sequence[int],
    loss: LossConfig,
    scale: float = 1.0,
) -> list[Tensor]:
    """Coefficients of every row, each optimizer step for itself."""
    out = list(weights)
    for g in sorted(set(groups)):
        members = [i for i, x in enumerate(groups) if x == g]
        final = coefficients(
            loss.reduction,
            [rows[i]["opsd_turn"] for i in members],
            [keys[i] for i in members],
            [episode_of(keys[i]) for i in members],
            [weights[i] for i in members],
            scale=scale,
        )
        for i, coef in zip(members, final, strict=True):
            out[i] = coef
    return out
