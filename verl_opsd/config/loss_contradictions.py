"""Keys of `opsd.loss` that contradict one another, or what is distilled from whom."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from verl_opsd.config.build import refuse

if TYPE_CHECKING:
    from verl_opsd.config.opsd import OpsdConfig


def check_loss(c: OpsdConfig) -> None:
    """Raises:
    OpsdError: the first contradiction.
    """
    c.loss.spec()
    _check_values(c)
    _check_sampled(c)
    _check_threshold(c)
    _check_positions(c)
    _check_anchor(c)


def _check_values(c: OpsdConfig) -> None:
    loss = c.loss
    least = {"anchor": 0, "task_reward_coef": 0, "epochs": 1, "chunk": 1, "episodes_per_update": 1}
    low = [name for name, limit in least.items() if getattr(loss, name) is not None and getattr(loss, name) < limit]
    if low:
        refuse(
            " ".join(f"opsd.loss.{name}={getattr(loss, name)}" for name in low),
            f"{', '.join(f'{name} is at least {least[name]}' for name in low)}",
            "correct the value",
        )
    for name in ("turn_half_life", "prefix_half_life"):
        value = getattr(loss, name)
        if value is not None and not value > 0:
            refuse(f"opsd.loss.{name}={value}", "a half-life is above 0 tokens", "raise it, or leave it out (null)")
    weights = dataclasses.astuple(loss.class_weights)
    if min(weights) < 0 or max(weights) == 0:
        refuse(f"opsd.loss.class_weights={loss.class_weights}", "weights >= 0, one of them above 0", "correct them")


def _check_sampled(c: OpsdConfig) -> None:
    """Estimators from sampled tokens need the policy's own distribution, and k2 and k3 the very policy that is trained."""
    loss, sampled = c.loss, c.loss.spec().sampled
    if (sampled and loss.divergence != "nll") or loss.task_reward_coef > 0:
        sampling = (c.contract.temperature, c.contract.top_p, c.contract.top_k)
        if sampling != (1.0, 1.0, -1):
            refuse(
                f"opsd.loss divergence={loss.divergence} task_reward_coef={loss.task_reward_coef} with temperature={sampling[0]} "
                f"top_p={sampling[1]} top_k={sampling[2]}",
                "an estimator from sampled tokens is an expectation over the policy's own, whole distribution",
                "sample at temperature 1 without top_p and top_k, or use a divergence over the vocabulary, which needs neither",
            )
    if loss.threshold is not None and sampled:
        refuse(
            f"opsd.loss.threshold with divergence={loss.divergence}",
            "one token's estimate is no divergence: a threshold on it keeps tokens by luck",
            "use a divergence over the vocabulary",
        )
    if loss.divergence in ("k2", "k3") and (c.mode == "offline" or loss.epochs > 1 or loss.episodes_per_update is not None):
        refuse(
            f"opsd.loss.divergence={loss.divergence} with mode={c.mode} epochs={loss.epochs} "
            f"episodes_per_update={loss.episodes_per_update}",
            "k2 and k3 are right for tokens of the very policy that is trained: fresh ones, for one optimizer step a round",
            "use policy_gradient, which weighs tokens of an earlier policy by their ratio, or a divergence over the vocabulary",
        )


def _check_threshold(c: OpsdConfig) -> None:
    loss, t = c.loss, c.loss.threshold
    if t is None:
        return
    if t.above < 0:
        refuse(f"opsd.loss.threshold.above={t.above}", "divergences are at least 0", "set it to 0 or more")
    other = loss.reduction != "token" or loss.anchor > 0 or loss.task_reward_coef > 0
    if (t.taken, t.denominator) == ("current", "kept") and other:
        refuse(
            f"opsd.loss.threshold taken=current denominator=kept with reduction={loss.reduction} anchor={loss.anchor} "
            f"task_reward_coef={loss.task_reward_coef}",
            "what the current weights keep is known after a step's last micro-batch: its whole gradient is divided by one number",
            "use threshold.taken=collection or threshold.denominator=all, or reduction=token without an anchor or a task reward",
        )


def _check_positions(c: OpsdConfig) -> None:
    for name in ("turns", "segments"):
        spans = getattr(c.loss, name)
        if spans is not None and (not spans or any(len(s) != 2 or not 0 <= s[0] < s[1] for s in spans)):
            refuse(
                f"opsd.loss.{name}={[list(s) for s in spans]}",
                "a list of half-open ranges [first, end] with 0 <= first < end",
                "correct the ranges, or leave the key out (null)",
            )
    limits = {"segments": ("context_length", c.contract.context_length)}
    if not c.contract.compaction:  # a summary is a turn, and no step
        limits["turns"] = ("step_limit", c.contract.step_limit)
    for name, (field, limit) in limits.items():
        beyond = [list(s) for s in getattr(c.loss, name) or () if s[0] >= limit]
        if beyond:
            refuse(
                f"opsd.loss.{name} {beyond} with opsd.contract.{field}={limit}",
                "a range begins where an episode may get to; this one would never hold a position",
                f"lower the range, remove it, or raise opsd.contract.{field}",
            )
    if not c.loss.turn_kinds:
        refuse("opsd.loss.turn_kinds=[]", "some kind of turn carries the loss", "name policy, malformed or both")


def _check_anchor(c: OpsdConfig) -> None:
    loss = c.loss
    if loss.anchor == 0 and loss.anchor_positions != "policy":
        refuse(
            f"opsd.loss.anchor_positions={loss.anchor_positions} without opsd.loss.anchor",
            "without an anchor nothing reads its positions",
            "set opsd.loss.anchor, or leave the key out",
        )
    if loss.divergence != "nll":
        return
    usual = {
        "opsd.teacher.kind": (c.teacher.kind, "self"),
        "opsd.brief.name": (c.brief.name, "none"),
        "opsd.loss.anchor": (loss.anchor, 0.0),
        "opsd.loss.drift": (loss.drift, False),
    }
    ignored = {key: (value, own) for key, (value, own) in usual.items() if value != own}
    if ignored:
        refuse(
            f"opsd.loss.divergence=nll (arm sft) with {' '.join(f'{key}={value}' for key, (value, _) in ignored.items())}",
            "the likelihood of the student's own tokens has no teacher and no anchor; they would be ignored",
            f"set {' '.join(f'{key}={own}' for key, (_, own) in ignored.items())}, or a divergence from a teacher",
        )
