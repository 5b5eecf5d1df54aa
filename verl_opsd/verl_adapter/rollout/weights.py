"""Publishing weights into a served model: LoRA adapters as they are, or full weights by name. Every tensor must bind.

A merged adapter cast to a low precision can lose the whole update, so adapters are published as they were trained
(verl's ``model.lora.merge=false``). Names are those that verl's FSDP engine sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor, nn

from verl_opsd.errors import OpsdError
from verl_opsd.models.multimodal import text_name

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class UpdateReport:
    """What one update did.

    Attributes:
        kind: ``adapter`` or ``full``.
        step: verl's global step that the weights belong to.
        bound: tensors that found their place.
        missing, unexpected: names without a tensor, tensors without a name; both empty, or the update was refused.
        changed: bound tensors whose values differ from what was served before.
        zero_B: names of adapter output matrices (lora_B) that are all zero. All of them at step 0; none may be later.
        dtypes: element types that arrived.
    """

    kind: Literal["adapter", "full"]
    step: int | None
    bound: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    changed: int
    zero_B: tuple[str, ...]
    dtypes: tuple[str, ...]


def load_adapter(
    model: nn.Module, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any], step: int | None
) -> tuple[PeftModel, UpdateReport]:
    """Puts adapter tensors into the model, wrapping it on the first call.

    Args:
        model: the served model, wrapped by an earlier call or plain.
        tensors: PEFT's names without the adapter's own (``base_model.model...lora_A.weight``).
        peft_config: the trainer's adapter config, as PEFT's ``to_dict`` gives it (verl sends that).
        step: global step of the weights.

    Returns:
        (the wrapped model, report).

    Raises:
        OpsdError: a name that does not bind, a missing name, another shape, a non-finite value, or an adapter config
            other than the one before. The served weights are unchanged then.
    """
    tensors = {text_name(n): t for n, t in tensors.items()}
    config = PeftConfig.from_peft_type(**peft_config)
    if isinstance(model, PeftModel):
        served = model
        _same_config(served.peft_config["default"], config)
    else:
        served = get_peft_model(model, config).eval().requires_grad_(False)  # type: ignore[arg-type, assignment]
    places = get_peft_model_state_dict(served, save_embedding_layers=False)
    try:
        changed = _bind(places, tensors, "adapter", tied={})
    except OpsdError:
        if served is not model:
            served.unload()  # the layers were replaced in place: give the plain model back
        raise
    zero_B = tuple(sorted(name for name, t in tensors.items() if "lora_B" in name and not t.any()))
    dtypes = tuple(sorted({str(t.dtype) for t in tensors.values()}))
    return served, UpdateReport("adapter", step, len(tensors), (), (), changed, zero_B, dtypes)


def load_full(model: nn.Module, tensors: Mapping[str, Tensor], step: int | None) -> UpdateReport:
    """Overwrites the base weights by name; an adapter, if any, stays as it is.

    Raises:
        OpsdError: a parameter that is neither covered nor tied to a covered one, an unknown name, another shape, or a
            non-finite value. The served weights are unchanged then.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    places = {_plain(n): t for n, t in base.state_dict(keep_vars=True).items() if ".lora_" not in n}
    tied: dict[int, list[str]] = {}
    for name, place in places.items():
        tied.setdefault(place.data_ptr(), []).append(name)
    tensors = {text_name(_plain(n)): t for n, t in tensors.items()}
    same = {name: names for names in tied.values() for name in names}
    changed = _bind(places, tensors, "full", tied=same)
    dtypes = tuple(sorted({str(t.dtype) for t in tensors.values()}))
    return UpdateReport("full", step, len(tensors), (), (), changed, (), dtypes)


def _plain(name: str) -> str:
    """verl names the base layer below an adapter as PEFT does; the plain model does not."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


@torch.no_grad()
def _bind(places: Mapping[str, Tensor], tensors: Mapping[str, Tensor], kind: str, tied: Mapping[str, list[str]]) -> int:
    """Checks everything, then copies; returns the number of tensors that changed."""
    missing = sorted(n for n in places if not any(t in tensors for t in tied.get(n, [n])))
    unexpected = sorted(n for n in tensors if n not in places)
    wrong = sorted(n for n, t in tensors.items() if n in places and t.shape != places[n].shape)
    not_finite = sorted(n for n, t in tensors.items() if not bool(torch.isfinite(t).all()))
    faults = {"missing": missing, "unexpected": unexpected, "another shape": wrong, "not finite": not_finite}
    if any(faults.values()):
        text = "; ".join(
            f"{len(names)} {what}: {', '.join(names[:_NAMES_SHOWN])}{' ...' if len(names) > _NAMES_SHOWN else ''}"
            for what, names in faults.items()
            if names
        )
        raise OpsdError(
            f"{kind} weights do not fit the served model ({text})",
            "every published tensor binds to one served tensor and every served tensor is covered",
            "serve the model that is trained (same model.path and LoRA config); the old weights are still served",
        )
    changed = 0
    for name, tensor in tensors.items():
        new = tensor.to(places[name].dtype)
        changed += not torch.equal(places[name], new)
        places[name].copy_(new)
    return changed


def _same_config(old: PeftConfig, new: PeftConfig) -> None:
    def shape(config: PeftConfig) -> dict[str, Any]:
        names = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "rank_pattern")
        return {n: getattr(config, n, None) for n in names}

    if shape(old) != shape(new):
        raise OpsdError(
            f"adapter config changed from {shape(old)} to {shape(new)}",
            "one run publishes one adapter",
            "start a new run for another LoRA config",
        )
