"""Which modules of a model an adapter binds, read from the model built without weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def lora_targets(
    model: str, target_modules: Sequence[str] | str, exclude_modules: Sequence[str] | str | None = None
) -> Targets:
    """What PEFT makes of ``target_modules`` in the text model of a folder; seconds, no weights are loaded."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model).get_text_config())
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


def check_adapter(config: DictConfig, model_path: str) -> None:
    """The adapter that training would make binds modules of the student.

    Raises:
        OpsdError: a target that names no module, or one whose adapter no rollout server applies.
    """
    model = config.actor_rollout_ref.model
    if model.lora_rank == 0 or OmegaConf.select(model, "lora_adapter_path") is not None:
        return
    given, excluded = (OmegaConf.to_container(model)[k] for k in ("target_modules", "exclude_modules"))  # type: ignore[index, call-overload]
    if not given or not (isinstance(given, str) or all(isinstance(t, str) for t in given)):
        problems: tuple[str, ...] = ("it names no module",)
    else:
        problems = lora_targets(model_path, given, excluded).problems
    if problems:
        raise OpsdError(
            f"actor_rollout_ref.model.target_modules={given}: {'; '.join(problems)}",
            f"an adapter binds linear modules of the student, here {model_path}",
            "leave it out, name modules that the model has (all-linear: all of them), or train without an adapter: "
            "actor_rollout_ref.model.lora_rank=0",
        )
