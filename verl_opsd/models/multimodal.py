"""A text model that is stored inside a multimodal checkpoint, as every published Qwen3.5 is.

The text model is what is trained and scored, by its own names; servers load the whole checkpoint and are given its names.
"""

from __future__ import annotations

import copy
from typing import Any

from verl_opsd.errors import OpsdError

_TEXT, _STORED, _PEFT = "model.", "model.language_model.", "base_model.model."


def is_multimodal(config: Any) -> bool:
    """Whether a configuration is of a text model and a vision tower."""
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def text_config(config: Any) -> Any:
    """The text model's own configuration, with the class that transformers builds of it; a text model's as it is.

    Raises:
        OpsdError: transformers has no causal language model for it.
    """
    if not is_multimodal(config):
        return config
    from transformers import AutoModelForCausalLM

    text = copy.deepcopy(config.get_text_config())
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise OpsdError(
            f"a multimodal checkpoint around {type(text).__name__}",
            "the text model alone is trained, as a causal language model of transformers",
            "use a text checkpoint, or a family whose text model transformers builds alone (Qwen3.5)",
        )
    text.architectures = [AutoModelForCausalLM._model_mapping[type(text)].__name__]
    text._attn_implementation = config._attn_implementation
    # A checkpoint whose head is its embedding holds it once, whichever of the two says so.
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    return text


def require_complete(who: str, path: str, info: dict[str, Any]) -> None:
    """
    Args:
        info: what transformers says of a load (``output_loading_info``).

    Raises:
        OpsdError: a weight is in none of the files.
    """
    if info["missing_keys"]:
        raise OpsdError(
            f"{who} {path}, whose files lack {', '.join(sorted(info['missing_keys'])[:5])}",
            "every weight is read, none is left to chance",
            "use a complete checkpoint of a causal language model",
        )


def stored_name(name: str) -> str:
    """A text model's parameter as its multimodal checkpoint names it; PEFT's prefix stays."""
    prefix = _PEFT if name.startswith(_PEFT) else ""
    plain = name.removeprefix(prefix)
    return prefix + (_STORED + plain.removeprefix(_TEXT) if plain.startswith(_TEXT) else plain)


def text_name(name: str) -> str:
    """The inverse of :func:`stored_name`; a text model's names stay."""
    return name.replace(_STORED, _TEXT, 1)
