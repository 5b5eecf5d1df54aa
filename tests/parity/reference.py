"""The distillation losses in float64, from their definitions: no stabilised form, no chunk, no code of the library.

Shape suffixes: N loss positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_softmax(logits_NV: Tensor) -> Tensor:
    """log(exp(z_v) / sum_u exp(z_u)), float64."""
    z_NV = logits_NV.to(torch.float64)
    z_NV = z_NV - z_NV.max(-1, keepdim=True).values
    return z_NV - z_NV.exp().sum(-1, keepdim=True).log()


def kl(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v log(p_v / q_v); nats."""
    return (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1)


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """KL(student || teacher) of two rows of logits."""
    return kl(log_softmax(student_NV), log_softmax(teacher_NV))


def forward_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """KL(teacher || student) of two rows of logits."""
    return kl(log_softmax(teacher_NV), log_softmax(student_NV))
