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


def plan(shape: ModelShape, tokens: int, budget_bytes: float, offload: bool = False) -> Plan:
    """The layers to keep for forwards of ``tokens`` tokens.

    Args:
        budget_bytes: for everything that layers keep until backward, inputs of checkpointed layers included.
        offload: keep these inputs on the host; they then count nothing.

    Raises:
        OpsdError: even the inputs of the layers do not fit.
    """
    input_bytes = 0 if offload else tokens * shape.boundary_bytes()
    left = budget_bytes - len(shape.kinds) * input_bytes
    if left < 0:
        raise OpsdError(
            f"{budget_bytes / 1e9:.1f} GB for activations of {tokens} tokens through {len(shape.kinds)} layers",
            f"checkpointed layers keep their inputs: {len(shape.kinds) * input_bytes / 1e9:.1f} GB",
            "raise the budget, shorten the context, or let the inputs wait on the host (offload)",
        )
    keep = [False] * len(shape.kinds)
    worth = {k: shape.layer_flop(k, tokens) / shape.kept_bytes(k) for k in set(shape.kinds)}
    # The last layers' activations live shortest, so of one kind the last are kept.
    for i in sorted(range(len(keep)), key=lambda i: (-worth[shape.kinds[i]], -i)):
        more = tokens * shape.kept_bytes(shape.kinds[i]) - input_bytes
        if more <= left:
            keep[i], left = True, left - more
    return Plan(tuple(keep), offload)


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The decoder's layers, in order."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


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


def kept_bytes(shape: ModelShape, chosen: Plan, tokens: int) -> float:
    """Bytes on the device that layers keep until backward under a plan."""
    inputs = 0 if chosen.offload else shape.boundary_bytes()
    return tokens * sum(shape.kept_bytes(k) if keep else inputs for k, keep in zip(shape.kinds, chosen.keep, strict=True))


def everything(layers: Sequence[Any] | int) -> Plan:
    """Every layer checkpointed, as transformers and verl do it."""
    return Plan((False,) * (layers if isinstance(layers, int) else len(layers)))
