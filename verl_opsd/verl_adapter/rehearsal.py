"""The publication of an adapter, rehearsed before the first rollout, with servers that don't say which tensors they bound.

A fresh adapter is zero, and the first updates move log-probabilities by less than bf16 rounds: a server that ignores what is published
would be found rounds later. So random values take lora_B's place, large enough to tell, and are published as any update is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.guards import Followed, fixed_probe, require_served, sampled_gap, servers_of, share_of_move
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS

#: First scale of the random values, the factor to the next one, and how many are tried.
FIRST_SCALE, GROWTH, SCALES = 2.0**-8, 2.0**0.5, 25
#: A move is large enough when its mean square is so many times that of the gap between trainer and server: the rounding of two versions is then
#: 0.01 of a move's square at most, and the standard error of a share of 256 tokens 0.006; and when its root mean square is so many nats.
CLEAR, LEAST = 200.0, 0.1


def rehearse(trainer: Any) -> None:
    """Publishes random adapter values by the path of every update, and the trained ones again; each time every server must follow.

    Full parameters are not rehearsed, and our own servers report every tensor that they bound. Called after the first
    ``guards.after_publish``; the trained values are back afterwards, bit for bit, whatever happens inside.

    Raises:
        OpsdError: no scale gives a move that tells, or a gate fails.
    """
    group = trainer.actor_rollout_wg
    stats = group.opsd_adapter_stats()[0]
    if trainer.config.actor_rollout_ref.rollout.name in OWN_BACKENDS or not stats["tensors"]:
        return
    servers, before = servers_of(trainer), trainer.followed
    gap = max(float(np.mean(np.square(t - before.ours))) for t in before.theirs)
    rounding = gap if stats["compute"] != "float32" else 0.0
    try:
        scale = _clear_scale(trainer, before.ours, max(CLEAR * gap, LEAST**2))
        _publish(trainer)
        there = fixed_probe(trainer, servers)
    finally:
        group.opsd_rehearse(None)
    _require_made(trainer, before, there, rounding, f"random lora_B of scale {scale:g}")
    _publish(trainer)
    back = fixed_probe(trainer, servers)
    _require_made(trainer, there, back, rounding, "back to the trained lora_B")
    for n, theirs in enumerate(back.theirs):
        require_served(trainer, sampled_gap(back.ours, theirs), n, f"{theirs.size} positions after the rehearsal")
    trainer.followed = back


def _clear_scale(trainer: Any, before: np.ndarray, square: float) -> float:
    """Leaves random values in lora_B's place that move the fixed probe's tokens by ``square``, nats squared in the mean, at least; their scale."""
    scale = moved = 0.0
    for n in range(SCALES):
        scale = FIRST_SCALE * GROWTH**n
        trainer.actor_rollout_wg.opsd_rehearse(scale)
        moved = float(np.mean(np.square(fixed_probe(trainer, []).ours - before)))
        if moved >= square:
            return scale
    raise OpsdError(
        f"random lora_B of scale {scale:g} move log-probabilities by {np.sqrt(moved):.2e} nats, and {np.sqrt(square):.2e} are wanted",
        "an adapter that has an effect moves what its model says; then a rehearsal tells whether the server binds it",
        "look at publish_kl in evidence.jsonl (a server far from the trainer needs too large a move), lora_alpha and target_modules",
    )


def _publish(trainer: Any) -> None:
    """As after an update: servers sleep while the trainer works, and wake up to the weights."""
    trainer.checkpoint_manager.sleep_replicas()
    trainer.checkpoint_manager.update_weights(trainer.global_steps)


def unmade(ours: np.ndarray, theirs: np.ndarray, rounding: float) -> tuple[float, float]:
    """What a server's move lacks of the trained weights'.

    Args:
        ours, theirs, rounding: as of ``share_of_move``.

    Returns:
        The share that it made, and the mean square of what is left of its move beside that share, relative to the trained weights' move.
    """
    share, _ = share_of_move(ours, theirs, rounding)
    slope = float(ours @ theirs) / float(ours @ ours)
    rest = theirs - slope * ours
    return share, float(rest @ rest) / float(ours @ ours)


def _require_made(trainer: Any, old: Followed, new: Followed, rounding: float, detail: str) -> None:
    limit, ours = trainer.opsd.gates.publish_rehearsal_max, new.ours - old.ours
    for n, (a, b) in enumerate(zip(old.theirs, new.theirs, strict=True)):
        share, rest = unmade(ours, b - a, rounding)
        lacking = max(abs(share - 1), rest)
        trainer.run_dir.require(
            "publish_rehearsal",
            lacking,
            limit,
            lacking <= limit,
            "the rollout server does not bind the published adapter, or not all of it: target_modules that it does not serve, names, "
            "max_lora_rank, lora_alpha",
            f"server {n}, {detail}: made {share:.4f} of a move of {np.sqrt(np.mean(ours**2)):.2f} nats, beside it {rest:.4f}",
        )
