"""Activations that backward makes again from tensors that wait for it anyway.

A norm's output is its input times a number a row, and a gate's product is two tensors that its own gradient needs: keeping the result too
costs memory that could keep another layer from running its forward twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Make = Callable[..., Tensor]
_NAME = "_opsd_made"


def waits() -> bool:
    """Whether what is saved now is kept until backward: there is a gradient, and the layer is not checkpointed."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return torch.is_grad_enabled() and (hooks is None or hooks[0].__module__ != "torch.utils.checkpoint")


def note(made: Tensor, make: Make, *of: Tensor) -> Tensor:
    """Writes on a tensor that it is ``make(*of)``, bit for bit, where that spares memory: ``of`` must wait for backward unchanged."""
    if waits():
        setattr(made, _NAME, (make, tuple(t.detach() for t in of)))
    return made


def recipe(tensor: Tensor) -> tuple[Make | None, tuple[Tensor, ...]]:
    """What :func:`note` wrote; else None, and the tensor itself."""
    found: tuple[Make | None, tuple[Tensor, ...]] = getattr(tensor, _NAME, (None, (tensor,)))
    return found
