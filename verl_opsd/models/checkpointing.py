"""Activation checkpointing chosen for each layer by a budget of bytes, and checkpoints that wait on the host.

All or nothing wastes either time (every layer runs forward twice) or memory; here as many layers as the budget holds keep their
activations, those first whose second forward costs most for a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_opsd.errors import OpsdError
from verl_opsd.models.lora import second_forward
from verl_opsd.planning.shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """Attributes:
    keep: for each layer, whether it keeps its activations; the others are checkpointed.
    offload: whether the inputs of checkpointed layers wait on the host.
    """

    keep: tuple[bool, ...]
    offload: bool = False

    def __str__(self) -> str:
        return f"{sum(self.keep)} of {len(self.keep)} layers keep their activations{', inputs of the others on the host' * self.offload}"


def plan(shape: ModelShape, tokens: int, kept: int, offload: bool = False) -> Plan:
    """Keeps ``kept`` layers: those whose second forward costs most for a byte, and of one kind the last, which live shortest.

    Args:
        tokens: of a forward; the longer it is, the more an attention layer's second forward costs.
        offload: the inputs of the other layers wait on the host.
    """
    worth = {k: shape.layer_flop(k, tokens) / shape.kept_bytes(k) for k in set(shape.kinds)}
    order = sorted(range(len(shape.kinds)), key=lambda i: (-worth[shape.kinds[i]], -i))
    return Plan(tuple(i in order[:kept] for i in range(len(shape.kinds))), offload)


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The text decoder's layers, in order; not those of a vision tower beside it."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return [m for m in base.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]


def apply(model: nn.Module, chosen: Plan) -> None:
    """Sets each layer's own checkpointing; before or after adapters and sharding.

    Raises:
        OpsdError: the plan is of another number of layers.
    """
    layers = layers_of(model)
    if len(layers) != len(chosen.keep):
        raise OpsdError(
            f"a checkpointing plan of {len(chosen.keep)} layers for a model of {len(layers)}",
            "a plan names every layer",
            "make the plan from the model's own configuration",
        )
    host = HostInputs() if chosen.offload else None
    for layer, keep in zip(layers, chosen.keep, strict=True):
        layer.gradient_checkpointing = not keep
        layer._gradient_checkpointing_func = _checkpoint if host is None else host.checkpoint


def _checkpoint(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), second_forward()))


class HostInputs:
    """Checkpointing whose saved inputs are copied to pinned host memory on a stream of their own, and back in backward."""

    def __init__(self) -> None:
        self._stream: Any = None

    def checkpoint(self, function: Any, *args: Any) -> Any:
        """As :func:`torch.utils.checkpoint.checkpoint`; what the function itself saves is made again in backward and never copied."""
        with saved_tensors_hooks(self._to_host, self._to_device):
            return _checkpoint(function, *args)

    def _to_host(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.device.type != "cuda":
            return tensor.device, tensor.clone()
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return tensor.device, host

    def _to_device(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, host = packed
        if device.type != "cuda":
            return host
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return host.to(device, non_blocking=True)


def everything(layers: Sequence[Any] | int) -> Plan:
    """Every layer checkpointed, as transformers and verl do it."""
    return Plan((False,) * (layers if isinstance(layers, int) else len(layers)))
