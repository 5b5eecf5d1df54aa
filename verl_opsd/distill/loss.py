"""`LossSpec`: which divergence, on which support, under which data-dependent weights. Contradictions are refused.

Coefficients (masks, denominators, the anchor's lambda) are not here: they come with each batch, from ``reduction``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from verl_opsd.distill import divergence
from verl_opsd.distill.dense import Mixture
from verl_opsd.distill.weights import Threshold, Weight
from verl_opsd.errors import OpsdError

Analytic = Callable[[Tensor, Tensor, "LossSpec"], Tensor]

#: Analytic divergences by name: (logp [C, J], logq [C, J], spec) -> [C], with gradient into logp. Add your own here.
ANALYTIC: dict[str, Analytic] = {
    "reverse_kl": lambda logp, logq, spec: divergence.reverse_kl(logp, logq),
    "forward_kl": lambda logp, logq, spec: divergence.forward_kl(logp, logq),
    "jsd": lambda logp, logq, spec: divergence.jsd(logp, logq, spec.beta or 0.0),
    "skewed_reverse_kl": lambda logp, logq, spec: divergence.skewed_reverse_kl(logp, logq, spec.skew or 0.0),
    "skewed_forward_kl": lambda logp, logq, spec: divergence.skewed_forward_kl(logp, logq, spec.skew or 0.0),
}
#: Estimators from the sampled token alone. ``nll`` is its negative log-likelihood, and takes no teacher.
SAMPLED = ("k1", "k2", "k3", "policy_gradient", "nll")
#: Those that train towards a teacher: their gradient is that of a KL divergence in expectation (of k1 it is 0).
SAMPLED_OBJECTIVES = ("policy_gradient", "k2", "k3")

Support = Literal["full", "student_topk", "teacher_topk", "union_topk", "signal"]
_TOPK = ("student_topk", "teacher_topk", "union_topk")


@dataclass(frozen=True)
class LossSpec:
    """The per-token loss. The default is exact reverse KL, KL(student || teacher), over the full vocabulary.

    Attributes:
        divergence: a name of :data:`ANALYTIC` or :data:`SAMPLED`.
        beta: of ``jsd``, weight of the teacher in the mixture, in (0, 1).
        skew: of the skewed KLs, in (0, 1).
        support: ``full``; ``student_topk``, ``teacher_topk``, ``union_topk`` (exact teacher, sampled token added, rest
            in a tail bucket); ``signal`` (the support that a support signal brings).
        top_k: tokens a side, for the three top-k supports.
        weights: data-dependent weights of a position; they multiply, and never enter a denominator. Not applied to the
            anchor.
        trust: of ``policy_gradient``, range of importance ratios outside which a token is masked: its only clip.
        max_log_ratio: of ``k3``, log-ratio in nats beyond which the pull stays the same; None refuses overflow.

    Raises:
        OpsdError: an unknown name, or a parameter that is missing, out of range or would be ignored.
    """

    divergence: str = "reverse_kl"
    beta: float | None = None
    skew: float | None = None
    support: Support = "full"
    top_k: int | None = None
    weights: tuple[Weight, ...] = ()
    trust: tuple[float, float] | None = None
    max_log_ratio: float | None = None

    def __post_init__(self) -> None:
        name = self.divergence
        if name not in ANALYTIC and name not in SAMPLED:
            _refuse(f"divergence={name!r}", f"known: {sorted(ANALYTIC)} and {sorted(SAMPLED)}")
        if self.support not in ("full", "signal", *_TOPK):
            _refuse(f"support={self.support!r}", "full, student_topk, teacher_topk, union_topk or signal")
        needs = {
            "beta": name == "jsd",
            "skew": name.startswith("skewed_"),
            "top_k": self.support in _TOPK,
            "trust": name == "policy_gradient",
        }
        for parameter, needed in needs.items():
            given = getattr(self, parameter) is not None
            if given != needed:
                _refuse(
                    f"divergence={name} support={self.support} {'with' if given else 'without'} {parameter}",
                    f"{parameter} is {'needed' if needed else 'not used'} here; no option is ignored",
                )
        for parameter in ("beta", "skew"):
            value = getattr(self, parameter)
            if value is not None and not 0 < value < 1:
                _refuse(f"{parameter}={value}", f"0 < {parameter} < 1; the limits are reverse_kl and forward_kl")
        if self.top_k is not None and self.top_k < 1:
            _refuse(f"top_k={self.top_k}", "a support has at least one token a side")
        if self.trust is not None and not 0 <= self.trust[0] < 1 < self.trust[1] <= math.exp(divergence.MAX_LOG_RATIO):
            _refuse(
                f"trust={self.trust}", f"a trust range contains the ratio 1 and ends at exp({divergence.MAX_LOG_RATIO}) at most"
            )
        if self.max_log_ratio is not None:
            if name != "k3":
                _refuse(f"max_log_ratio with {name}", "only k3 exponentiates a log-ratio that nothing else bounds")
            if not 0 < self.max_log_ratio <= divergence.MAX_LOG_RATIO:
                _refuse(f"max_log_ratio={self.max_log_ratio}", f"0 < max_log_ratio <= {divergence.MAX_LOG_RATIO} nats")
        if self.sampled and self.support != "full":
            _refuse(f"{name} with support={self.support}", "a sampled-token estimator has no support")
        if self.sampled and any(isinstance(weight, Threshold) for weight in self.weights):
            _refuse(f"{name} with a Threshold", "one token's estimate is no divergence: a threshold on it keeps tokens by luck")

    @property
    def sampled(self) -> bool:
        """Whether the loss uses the sampled token alone."""
        return self.divergence in SAMPLED

    @property
    def mixture(self) -> Mixture | None:
        """How ``dense`` computes it; None on a support, of sampled tokens, and of a divergence of one's own."""
        if self.support != "full":
            return None
        beta, skew = self.beta or 0.0, self.skew or 0.0
        return {
            "reverse_kl": Mixture(1.0, 0.0, 1.0),
            "forward_kl": Mixture(0.0, 1.0, 0.0),
            "jsd": Mixture(beta, beta, 1 - beta),
            "skewed_reverse_kl": Mixture(1 - skew, 0.0, 1.0),
            "skewed_forward_kl": Mixture(skew, 1.0, 0.0),
        }.get(self.divergence)

    @property
    def needs_labels(self) -> bool:
        """Whether the sampled tokens are needed."""
        return self.sampled or self.support != "full" or bool(self.weights)


def _refuse(what: str, rule: str) -> None:
    raise OpsdError(what, rule, "correct the loss configuration; LossSpec's docstring names each parameter's use")
