"""PEFT's LoRA on a frozen linear layer as one operation: no float32 copy of the input, no separate sum.

PEFT casts the whole input to the adapter's float32, and under autocast back again; with rank 32 these copies cost more than the
adapter's products. Here the products run in the compute dtype, and the base's product is accumulated onto the adapter's: the sum is
rounded once, and the adapter's own rounding is of its own size. Masters and their gradients are float32.

Suffixes: M tokens, I in features, O out features, R rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_opsd.models import remade

_SECOND = threading.local()


@contextmanager
def second_forward() -> Iterator[None]:
    """Marks the forward that a checkpointed layer runs again in backward: only what it saves is used, not what it returns."""
    _SECOND.on = True
    try:
        yield
    finally:
        _SECOND.on = False


def onto(start_MO: Tensor, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """``start + x W^T`` in place; accumulated in float32 and rounded once."""
    return start_MO.addmm_(x_MI, weight_OI.T)


def master_grad(left_MR: Tensor, right_MI: Tensor, dtype: torch.dtype) -> Tensor:
    """``left^T right`` in the dtype of a master, accumulated and kept in it."""
    if left_MR.is_cuda and left_MR.dtype == right_MI.dtype != dtype:
        return torch.mm(left_MR.T, right_MI, out_dtype=dtype)
    return left_MR.T.to(dtype) @ right_MI.to(dtype)


def _unused(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape)


class _FrozenLinearLora(torch.autograd.Function):
    """x W^T + s (x A^T) B^T with W frozen; with ``skip`` what backward needs alone, and an output that nothing reads. With ``make`` not x
    waits for backward but ``of``, from which it is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
        dtype: torch.dtype,
        skip: bool,
        make: remade.Make | None,
        *of: Tensor,
    ) -> Tensor:
        x_MI, weight_OI = x.reshape(-1, x.shape[-1]).to(dtype), weight_OI.to(dtype)
        scaled_OR = (b_OR.detach() * scale).to(dtype)
        low_MR = x_MI @ a_RI.detach().to(dtype).T
        if skip:
            out_MO = _unused(x_MI, len(x_MI), len(weight_OI))
        else:
            out_MO = onto(low_MR @ scaled_OR.T, x_MI, weight_OI)
        ctx.save_for_backward(weight_OI, a_RI, b_OR, low_MR, *((x_MI,) if make is None else of))
        ctx.make, ctx.scale, ctx.shape, ctx.dtype = make, scale, x.shape, x.dtype
        return out_MO.reshape(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, a_RI, b_OR, low_MR, *of = ctx.saved_tensors
        dtype = low_MR.dtype
        x_MI = of[0] if ctx.make is None else ctx.make(*of).reshape(-1, ctx.shape[-1]).to(dtype)
        grad_MO = grad.reshape(-1, grad.shape[-1]).to(dtype)
        low_grad_MR = grad_MO @ (b_OR * ctx.scale).to(dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = onto(low_grad_MR @ a_RI.to(dtype), grad_MO, weight_OI.T)
            grad_x = grad_x.reshape(ctx.shape).to(ctx.dtype)
        grad_a = master_grad(low_grad_MR, x_MI, a_RI.dtype)
        grad_b = master_grad(grad_MO, low_MR, b_OR.dtype).mul_(ctx.scale)
        return grad_x, None, grad_a, grad_b, None, None, None, None, *(None for _ in of)


class FusedLoraLinear(Linear):
    """PEFT's layer by a class swap (:func:`verl_opsd.models.kernels.fuse_adapters`); any other use than plain LoRA takes PEFT's own path.

    Attributes:
        ends_layer: its output is only added to the layer's output, so a second forward of the layer does not need it.
    """

    ends_layer = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As PEFT's."""
        active = [k for k in self.active_adapters if k in self.lora_A]
        base = self.base_layer
        plain = (
            len(active) == 1
            and not (args or kwargs or self.disable_adapters or self.merged or active[0] in self.lora_variant)
            and base.bias is None
            and not base.weight.requires_grad
            and self.lora_A[active[0]].bias is None
            and self.lora_B[active[0]].bias is None
            and isinstance(self.lora_dropout[active[0]], nn.Identity)
        )
        if not plain:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else base.weight.dtype
        a, b = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
        skip = self.ends_layer and getattr(_SECOND, "on", False)
        make, of = remade.recipe(x)
        out: Tensor = _FrozenLinearLora.apply(x, base.weight, a, b, self.scaling[active[0]], dtype, skip, make, *of)
        return out
