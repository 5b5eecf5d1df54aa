"""Which modules of a model an adapter binds, read from the model built without weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class Targets:
    """Of one model and one ``target_modules``.

    Attributes:
        bound: modules that get an adapter. linear: all linear modules. problems: what is wrong; empty: nothing.
    """

    bound: frozenset[str]
    linear: frozenset[str]
    problems: tuple[str, ...]


def _without_weights(model: str) -> Any:
    """The text model of a folder, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model).get_text_config())


def lora_targets(
    model: str, target_modules: Sequence[str] | str, exclude_modules: Sequence[str] | str | None = None
) -> Targets:
    """What PEFT makes of ``target_modules`` in the text model of a folder; seconds, no weights are loaded."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = _without_weights(model)
    modules = dict(base.named_modules())
    linear = frozenset(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = {"r": 1, "target_modules": targets, "exclude_modules": exclude_modules, "task_type": "CAUSAL_LM"}
    try:
        adapted = get_peft_model(base, LoraConfig(**config))
    except (ValueError, re.error) as error:
        return Targets(frozenset(), linear, (str(error),))
    plain = "base_model.model."
    bound = frozenset(n.removeprefix(plain) for n, m in adapted.named_modules() if hasattr(m, "lora_A"))
    named = [] if isinstance(targets, str) else targets
    problems = [f"no module is named {t}" for t in named if not any(n == t or n.endswith(f".{t}") for n in bound)]
    problems += [f"{n} would be adapted, which no server applies" for n in sorted(bound) if n.rsplit(".", 1)[-1] == "lm_head"]
    problems += [f"{n} is no linear layer, and no server applies its adapter" for n in sorted(bound - linear)]
    return Targets(bound, linear, tuple(problems))


def check_adapter(model: DictConfig, key: str, model_path: str) -> None:
    """The adapter that training makes, or goes on from, binds modules of the student.

    Args:
        model: verl's section of the student. key: its name.

    Raises:
        OpsdError: a target that names no module, one whose adapter no rollout server applies, or see :func:`check_given`.
    """
    if (folder := OmegaConf.select(model, "lora_adapter_path")) is not None:
        return check_given(str(folder), model, key, model_path)
    if model.lora_rank == 0:
        return
    given, excluded = (OmegaConf.to_container(model)[k] for k in ("target_modules", "exclude_modules"))  # type: ignore[index, call-overload]
    if not given or not (isinstance(given, str) or all(isinstance(t, str) for t in given)):
        problems: tuple[str, ...] = ("it names no module",)
    else:
        problems = lora_targets(model_path, given, excluded).problems
    if problems:
        raise OpsdError(
            f"{key}.target_modules={given}: {'; '.join(problems)}",
            f"an adapter binds linear modules of the student, here {model_path}",
            f"leave it out, name modules that the model has (all-linear: all of them), or train without an adapter: {key}.lora_rank=0",
        )


def check_given(folder: str, model: DictConfig, key: str, model_path: str) -> None:
    """verl reads an adapter only with ``lora_rank`` above 0, and writes ``lora_alpha`` beside checkpoints, from where an export takes it;
    PEFT leaves a weight that it does not find at zero.

    Raises:
        OpsdError: an adapter of another rank or alpha, one that is more than the product of its two matrices, or not of this model.
    """
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    from verl_opsd.models.adapter import put_on
    from verl_opsd.models.multimodal import text_name

    where = f"{key}.lora_adapter_path={folder}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names and shapes alone: no weight is copied to the meta device
        put_on(_without_weights(model_path), folder)
    found: Any = PeftConfig.from_pretrained(folder)
    if (found.r, found.lora_alpha) != (model.lora_rank, model.lora_alpha):
        raise OpsdError(
            f"{where} of rank {found.r}, alpha {found.lora_alpha}; {key}.lora_rank={model.lora_rank} lora_alpha={model.lora_alpha}",
            "an adapter is trained on and exported with the rank and alpha that it was made with",
            f"set {key}.lora_rank={found.r} {key}.lora_alpha={found.lora_alpha}",
        )
    fields = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
    odd = [f for f in fields if getattr(found, f, None)] + ["bias"] * (found.bias != "none")
    if odd:
        raise OpsdError(
            f"{where} with {', '.join(odd)}",
            "an adapter adds alpha / rank * B A to a weight, and nothing else",
            "merge it first",
        )
    if other := [k for k in load_peft_weights(folder, device="cpu") if text_name(k) != k]:
        raise OpsdError(
            f"{where} with {other[0]}",
            "the text model alone is trained, by its own names",
            "take language_model out of the names",
        )
