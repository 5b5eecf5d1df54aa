"""A LoRA adapter in PEFT's layout put on a model, whole or not at all: PEFT warns of a weight that it does not find, and leaves it at zero."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from torch import nn

from verl_opsd.errors import OpsdError
from verl_opsd.models.multimodal import text_name


def put_on(model: nn.Module, folder: str) -> Any:
    """
    Args:
        model: a causal language model of transformers.
        folder: ``adapter_config.json`` and weights, under the text model's names or those of its multimodal checkpoint.

    Returns:
        A ``PeftModel``.

    Raises:
        OpsdError: no adapter, or one whose weights are not exactly those that its configuration makes on this model.
    """
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    rule, way_out = "an adapter's weights are those that its configuration makes on the model", "name an adapter of this model"
    try:
        net: Any = get_peft_model(model, PeftConfig.from_pretrained(folder))  # type: ignore[arg-type]
        stored = {text_name(k): v for k, v in load_peft_weights(folder, device="cpu").items()}
        found = set_peft_model_state_dict(net, stored)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise OpsdError(f"adapter {folder}: {error}", rule, way_out) from error
    missing = [k for k in found.missing_keys if "lora_" in k]
    if missing or found.unexpected_keys:
        raise OpsdError(
            f"adapter {folder}: lacks {missing[:3]}, and holds {found.unexpected_keys[:3]} that the model has no place for",
            rule,
            way_out,
        )
    return net
