"""The task's reward beside the distillation: advantages of episodes, and PPO's clipped term of their tokens.

Shape suffixes: E episodes, N loss positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError

#: Log-ratios are held within this many nats, as verl does.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PpoClip:
    """Bounds of the importance ratio: 1 - low and 1 + high beyond which it has no gradient where that would go further, and ``dual``
    times which a token of negative advantage weighs at most. Sources: Schulman et al. 2017; dual clip: Ye et al. 2019.

    Raises:
        OpsdError: a bound is out of range.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0 and self.dual > 1):
            raise OpsdError(f"{self}", "0 <= low < 1, high >= 0, dual > 1", "correct verl's actor.clip_ratio_low, _high or _c")


def ppo_loss(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, clip: PpoClip) -> Tensor:
    """Sum of PPO's per-token losses; differentiable in ``logp_N``.

    Args:
        logp_N: log-probabilities of the sampled tokens now; nats.
        behaviour_N: under the policy that sampled them.
        advantage_N: times the coefficient of each token (which does not change the sign).
    """
    ratio_N = (logp_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_N = -advantage_N * ratio_N
    clipped_N = torch.maximum(plain_N, -advantage_N * ratio_N.clamp(1 - clip.low, 1 + clip.high))
    loss_N = torch.where(advantage_N < 0, torch.minimum(clipped_N, -advantage_N * clip.dual), clipped_N)
    # 0 * NaN is NaN: a token without advantage adds exactly 0 whatever it holds.
    return torch.where(advantage_N == 0, 0.0, loss_N).sum()


def leave_one_out(reward_E: Tensor) -> Tensor:
    """Each episode's reward minus the mean of the others': an unbiased advantage (the baseline does not depend on the episode).

    Raises:
        OpsdError: fewer than two episodes.
    """
    n = len(reward_E)
    if n < 2:
        raise OpsdError(f"{n} episodes", "an advantage compares an episode with others", "collect two or more episodes a round")
    return (reward_E - reward_E.mean()) * n / (n - 1)
