"""A divergence of your own: the Jeffreys divergence, KL(student || teacher) + KL(teacher || student).

    PYTHONPATH=$PWD/examples VERL_USE_EXTERNAL_MODULES=own_loss \\
        python -m verl.trainer.main_ppo +recipe=opd opsd.loss.divergence=jeffreys

It takes log-probabilities of student and teacher, [positions, outcomes] each, and gives nats a position, with gradient
into the student's. Supports, weights, the anchor, reductions and chunking then work as for any other divergence.

    >>> import torch
    >>> p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> round(ANALYTIC["jeffreys"](p, q, LossSpec(divergence="jeffreys")).item(), 4)  # 0.3681 + 0.5108
    0.8789
"""

from torch import Tensor

from verl_opsd.distill.divergence import forward_kl, reverse_kl
from verl_opsd.distill.loss import ANALYTIC, LossSpec


def jeffreys(logp: Tensor, logq: Tensor, spec: LossSpec) -> Tensor:
    """Sum of both directions; symmetric."""
    return reverse_kl(logp, logq) + forward_kl(logp, logq)


ANALYTIC["jeffreys"] = jeffreys
