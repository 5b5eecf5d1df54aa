"""A data-dependent weight of your own: positions count more where the student is undecided.

A weight gets detached values of a chunk of loss positions and gives numbers >= 0. It multiplies the loss and never enters
a denominator. In a run it comes through a trainer of your own (``own_worker`` shows how one is registered):

    class MyTrainer(OpsdTrainer):
        def make_loss(self):
            loss = super().make_loss()
            weights = (*loss.spec.weights, EntropyWeight(scale=1.0))
            return replace(loss, spec=replace(loss.spec, weights=weights))

    >>> import torch
    >>> from verl_opsd.distill.weights import TokenValues
    >>> entropy = torch.tensor([0.0, 0.5, 1.0, 2.0])
    >>> values = TokenValues(divergence_C=torch.zeros(4), student_logprob_C=torch.zeros(4), entropy_C=entropy)
    >>> EntropyWeight(scale=1.0)(values).tolist()
    [0.0, 0.5, 1.0, 1.0]
"""

from dataclasses import dataclass

from torch import Tensor

from verl_opsd.distill.weights import TokenValues


@dataclass(frozen=True)
class EntropyWeight:
    """min(1, entropy / scale), entropy of the student in nats."""

    scale: float

    def __call__(self, values: TokenValues) -> Tensor:
        return (values.entropy_C / self.scale).clamp(max=1.0)
