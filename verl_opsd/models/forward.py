"""One forward of a causal language model whose vocabulary head is the loss-position head; used by the engine and by benchmarks.

Suffixes: N loss positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from verl_opsd.distill.head import HeadTask, LossPositionHead
from verl_opsd.errors import OpsdError


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Runs the base model: adapter layers skip their adapters. ``requires_grad`` is not touched.

    PEFT's own ``disable_adapter`` freezes the adapters on the way; FSDP2 may hold unsharded parameters at that moment, and the
    sharded ones then stay frozen without an error.
    """
    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    before = [m._disable_adapters for m in layers]
    try:
        for m in layers:
            m._disable_adapters = True
        yield
    finally:
        for m, was in zip(layers, before, strict=True):
            m._disable_adapters = was


def run_head(
    module: nn.Module, head: LossPositionHead, task: HeadTask | None, dtype: torch.dtype, inputs: Mapping[str, Any]
) -> Tensor:
    """The model's logits; with a task what its head returns for it.

    Args:
        module: the model, possibly adapted or sharded; ``head`` is its output embeddings.
        dtype: of the compute; anything but float32 runs under autocast.
        inputs: keyword arguments of the model's forward.

    Returns:
        Logits [B, T, V] without a task; [1, N, H] for ``score``; [1, 1, 1] for ``loss``.

    Raises:
        OpsdError: the model does not return its head's output as it is.
    """
    device = head.weight.device.type
    head.task = task
    try:
        with torch.autocast(device, dtype=dtype) if dtype != torch.float32 else nullcontext():
            out: Tensor = module(**inputs, use_cache=False).logits
    finally:
        head.task = None
    if task is None:
        return out
    want = (1, 1, 1) if task.kind == "loss" else (1, task.index_N.numel(), head.in_features)
    if tuple(out.shape) != want or (task.kind == "loss" and task.result is None):
        raise OpsdError(
            f"the model returned logits of shape {tuple(out.shape)} for a {task.kind} task, expected {want}",
            "logits are the output of the vocabulary head and nothing is done to them",
            "use a model whose forward calls its output embeddings and returns their result as logits",
        )
    return out
