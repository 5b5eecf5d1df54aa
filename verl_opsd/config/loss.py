"""The `opsd.loss` section: the objective, and which of its keys go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.distill.loss import LossSpec


@dataclass(frozen=True)
class LossConfig:
    """The objective; the formulas are in ``verl_opsd.distill``.

    Attributes:
        divergence: reverse_kl, forward_kl, jsd (``beta``), skewed_reverse_kl, skewed_forward_kl (``skew``), or one that was
            added to ``distill.loss.ANALYTIC``; from the sampled token alone: policy_gradient (``trust``), k2, k3; nll, the negative
            log-likelihood of the student's own tokens, which has no teacher.
        support: ``full``, or ``student_topk``, ``teacher_topk``, ``union_topk`` with ``top_k`` tokens a side and one tail bucket.
        trust: of policy_gradient, range of importance ratios outside which a token is masked.
        max_log_ratio: of k3, log-ratio in nats beyond which the pull stays the same; null stops the run where exp would overflow.
        reduction: token, turn, branch or episode mean over the rows of one optimizer step.
        anchor: weight of the same divergence to the student's own base; 0 turns it off.
        anchor_positions: where the anchor pulls: ``policy``: every policy position; ``loss``: those that carry the divergence (a threshold
            aside). Its denominator is their number, by ``reduction``.
        task_reward_coef: weight of PPO's clipped term with the episodes' reward (``actor.clip_ratio_low``, ``_high``, ``_c`` are its
            bounds); the advantage is the reward minus the mean of the round's other episodes. 0 turns it off.
        drift: measure the divergence from the student's own base at every policy position (for one more pass over the student's
            ids a round); an anchor does so anyway.
        threshold: keep only positions whose detached divergence is above a number of nats (:class:`ThresholdConfig`).
        gate: surprisal gate sigmoid(kappa * (log pS - gamma)); enters no denominator.
        clip: largest absolute weight of a position's pull; see ``distill.weights.Clip``.
        class_weights: weight of each token class; enters the denominator.
        turn_half_life: tokens of a turn over which the weight of its positions halves; enters the denominator.
        prefix_half_life: tokens of prefix before a turn over which its weight halves; enters the denominator.
        max_prefix: only turns whose prefix is shorter than this many tokens carry loss.
        turn_kinds: kinds of turns that carry loss. The others' replies stay policy positions: measured, and under the anchor.
        turns: half-open ranges of an agent's turns that carry loss; null: all.
        segments: half-open ranges of a branch's tokens, counted from its first, that carry loss; null: all.
        chunk: loss positions per chunk of the vocabulary head; null: as many as its kernels are fastest with below 1 GB.
        epochs: passes over the rows of a round.
        episodes_per_update: episodes of one optimizer step; null takes all of the round.
    """

    divergence: str = "reverse_kl"
    beta: float | None = None
    skew: float | None = None
    support: Literal["full", "student_topk", "teacher_topk", "union_topk"] = "full"
    top_k: int | None = None
    trust: tuple[float, ...] | None = None
    max_log_ratio: float | None = None
    reduction: Literal["token", "turn", "branch", "episode"] = "token"
    anchor: float = 0.0
    anchor_positions: Literal["policy", "loss"] = "policy"
    task_reward_coef: float = 0.0
    drift: bool = False
    threshold: ThresholdConfig | None = None
    gate: GateConfig | None = None
    clip: float | None = None
    class_weights: ClassWeights = field(default_factory=lambda: ClassWeights())
    turn_half_life: float | None = None
    prefix_half_life: float | None = None
    max_prefix: int | None = None
    turn_kinds: tuple[Literal["policy", "malformed"], ...] = ("policy", "malformed")
    turns: tuple[tuple[int, ...], ...] | None = None
    segments: tuple[tuple[int, ...], ...] | None = None
    chunk: int | None = None
    epochs: int = 1
    episodes_per_update: int | None = None

    def spec(self) -> LossSpec:
        """The library's loss of this configuration.

        Raises:
            OpsdError: parameters that are missing, out of range or would be ignored.
        """
        from verl_opsd.distill.loss import ANALYTIC, SAMPLED_OBJECTIVES, LossSpec
        from verl_opsd.distill.weights import Clip, SurprisalGate, Threshold, Weight

        if self.divergence == "k1":
            raise OpsdError(
                "opsd.loss.divergence=k1",
                "the gradient of log p - log q at a sampled token is 0 in expectation: the run would learn noise",
                "use policy_gradient, whose gradient is that of k1's expectation",
            )
        if self.divergence not in (*ANALYTIC, *SAMPLED_OBJECTIVES, "nll"):
            raise OpsdError(
                f"opsd.loss.divergence={self.divergence!r}",
                f"opsd.loss.divergence is one of {', '.join((*sorted(ANALYTIC), *SAMPLED_OBJECTIVES, 'nll'))}",
                "choose one of them, or add yours to verl_opsd.distill.loss.ANALYTIC from a module in VERL_USE_EXTERNAL_MODULES",
            )
        weights: list[Weight] = []
        if self.threshold is not None and self.threshold.taken == "current":
            weights.append(Threshold(self.threshold.above))
        if self.clip is not None:
            if not self.clip > 0:
                raise OpsdError(f"opsd.loss.clip={self.clip}", "a clip is above 0", "raise it, or leave it out (null)")
            weights.append(Clip(self.clip))
        if self.trust is not None and len(self.trust) != 2:
            raise OpsdError(f"opsd.loss.trust={list(self.trust)}", "a range has two ends", "give [lowest, highest] ratio")
        trust = None if self.trust is None else (self.trust[0], self.trust[1])
        try:
            if self.gate is not None:
                weights.append(SurprisalGate(self.gate.kappa, self.gate.gamma))
            parameters = (self.beta, self.skew, self.support, self.top_k, tuple(weights), trust, self.max_log_ratio)
            return LossSpec(self.divergence, *parameters)
        except OpsdError as error:
            way_out = "correct these keys of opsd.loss, or choose another loss=..., which sets those that belong together"
            raise OpsdError(f"opsd.loss: {error.what}", error.rule, way_out) from error


@dataclass(frozen=True)
class ThresholdConfig:
    """Threshold mask: positions of at most ``above`` nats get weight 0.

    Attributes:
        above: nats.
        taken: ``collection``: at the weights before the round's first update, once for all of its epochs (one more pass of
            teacher and student); ``current``: at the weights of each step.
        denominator: ``kept``: the mean is over the kept positions; ``all``: over all of them, as if the others were 0.
    """

    above: float
    taken: Literal["collection", "current"] = "current"
    denominator: Literal["kept", "all"] = "all"


@dataclass(frozen=True)
class GateConfig:
    """Surprisal gate: weight sigmoid(kappa * (log p_student(token) - gamma))."""

    kappa: float
    gamma: float


@dataclass(frozen=True)
class ClassWeights:
    """Weight of each class of policy tokens; 0 takes a class out of the loss and its denominator."""

    think: float = 1.0
    message: float = 1.0
    command: float = 1.0
    code: float = 1.0
    other: float = 1.0
