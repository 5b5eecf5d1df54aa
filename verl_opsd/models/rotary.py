"""Frequencies of rotary embeddings, which are float32 in a model of any dtype.

transformers keeps them so; a cast of the whole model (verl's, before it shards) rounds them like weights. In bfloat16 they are off by up to
one part in 512, and an angle at position 10,000 by radians.
"""

from __future__ import annotations

from torch import nn

from verl_opsd.errors import OpsdError


def restore(model: nn.Module) -> None:
    """Makes rounded frequencies anew from the model's configuration, on the device where they are.

    Raises:
        OpsdError: a module has rounded frequencies and no configuration to make them from.
    """
    for name, m in model.named_modules():
        rounded = {k: b for k, b in m.named_buffers(recurse=False) if k.endswith("inv_freq") and b.element_size() < 4}
        if not rounded:
            continue
        if not hasattr(m, "config"):
            raise OpsdError(
                f"{name} ({type(m).__name__}), whose rotary frequencies were cast to {next(iter(rounded.values())).dtype}",
                "frequencies are float32, and made from the module's configuration where a cast rounded them",
                "use a model of transformers, or float32 weights (actor_rollout_ref.actor.fsdp_config.model_dtype=fp32)",
            )
        with next(iter(rounded.values())).device:
            fresh: nn.Module = type(m)(m.config)
        for k, b in fresh.named_buffers(recurse=False):
            if k in rounded:
                m._buffers[k] = b
