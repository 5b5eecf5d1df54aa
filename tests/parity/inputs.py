"""Hidden states, weights and a head task that every foreign loss is compared on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from verl_opsd.distill.head import HeadTask, LossPositionHead, install_head
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal


class Inputs(NamedTuple):
    """x: student's hidden states [N, H]; weight [V, H]; the teacher's [N, H'] and [V, H']; labels [N], -100 where masked."""

    x: Tensor
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor
    labels: Tensor


def make(
    n: int = 12, hidden: int = 16, vocab: int = 203, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0
) -> Inputs:
    """Random inputs; a quarter of the positions is masked."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (scale * torch.randn(*shape, generator=g)).to(device, dtype)

    labels = torch.randint(vocab, (n,), generator=g)
    labels[::4] = -100
    return Inputs(random(n, hidden), random(vocab, hidden), random(n, hidden + 3), random(vocab, hidden + 3), labels.to(device))


def ours(inputs: Inputs, spec: LossSpec, chunk: int = 5) -> tuple[float, Tensor, Tensor]:
    """Mean over the positions with a label: (loss, gradient of x, gradient of weight), through the head."""
    keep = inputs.labels != -100
    vocab, hidden = inputs.weight.shape
    model, linear = nn.Module(), nn.Linear(hidden, vocab, bias=False, device=inputs.x.device, dtype=inputs.x.dtype)
    model.get_output_embeddings = lambda: linear
    head: LossPositionHead = install_head(model)
    head.weight.data.copy_(inputs.weight)
    x = inputs.x.clone().requires_grad_()
    head.task = HeadTask(
        kind="loss",
        index_N=torch.arange(len(x), device=x.device),
        labels_N=inputs.labels.clamp_min(0),
        teacher=Signal(hidden_NH=inputs.teacher, head_id="other"),
        teacher_weight_VH=inputs.teacher_weight,
        coef_N=keep.float() / keep.sum(),
        loss=spec,
        chunk=chunk,
    )
    loss = head(x[None]).sum()
    gx, gw = torch.autograd.grad(loss, [x, head.weight])
    return loss.item(), gx, gw


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())
