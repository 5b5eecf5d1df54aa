"""The optimizer that verl would build after the models are loaded, built once at launch."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from verl_opsd.errors import OpsdError

#: Read by the cosine schedule alone, with verl's values.
OF_COSINE: dict[str, tuple[Any, ...]] = {"min_lr_ratio": (0.0, None), "num_cycles": (0.5,), "zero_indexed_step": (True,)}
#: Keys of verl's section that also go into the optimizer.
OWN = ("lr", "weight_decay", "betas")


def check_optimizer(optim: Any, key: str) -> None:
    """The named class exists, takes its arguments, and makes a step on matrices and vectors.

    Args:
        optim: verl's section, a DictConfig. key: its name.

    Raises:
        OpsdError: it does not, or keys that the optimizer or the schedule would ignore.
    """
    import torch
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config.optimizer import build_optimizer

    named = f"{key}.optimizer_impl={optim.optimizer_impl} {key}.optimizer={optim.optimizer}"
    given: Any = optim.override_optimizer_config
    if given is not None and not isinstance(given, DictConfig):
        raise OpsdError(
            f"{key}.override_optimizer_config={given}", "it is arguments by name", "give a mapping, or leave it out"
        )
    extra: dict[str, Any] = dict(given or {})
    if twice := [k for k in OWN if k in extra]:
        raise OpsdError(
            f"{key}.override_optimizer_config.{twice[0]}={extra[twice[0]]} with {key}.{twice[0]}={optim[twice[0]]}",
            f"one key says it; {key}.{twice[0]} would be ignored in silence",
            f"set {key}.{twice[0]}",
        )
    if optim.lr_scheduler_type == "constant" and (unread := [k for k, usual in OF_COSINE.items() if optim[k] not in usual]):
        raise OpsdError(
            f"{key}.{unread[0]}={optim[unread[0]]} with {key}.lr_scheduler_type=constant",
            "the cosine schedule alone reads it; it would be ignored in silence",
            f"set {key}.lr_scheduler_type=cosine, or leave it out",
        )
    if optim.lr_warmup_steps > 0 and optim.lr_warmup_steps_ratio > 0:
        raise OpsdError(
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} with {key}.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio}",
            "one key says how long the rate rises; the ratio would be ignored in silence",
            "leave one of the two out",
        )
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,))]
    try:
        optimizer = build_optimizer(iter(parameters), omega_conf_to_dataclass(optim))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{optim.optimizer} is no optimizer of torch's kind")
        if str(optim.optimizer_impl).split(".")[0] == "torch":  # others may step on an accelerator alone
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
    except Exception as error:  # whatever a class of the user's choice raises
        text = " ".join(str(error).split())
        raise OpsdError(
            f"{named}{f' override_optimizer_config={extra}' if extra else ''}: {type(error).__name__}: {text[:300]}",
            "an optimizer is a class of an importable module, made of the parameters, lr and weight_decay (betas of an Adam), whose "
            "step needs no closure",
            f"correct the names (AdamW of torch.optim), or the arguments in {key}.override_optimizer_config",
        ) from error
    betas, name = tuple(optim.betas), str(optim.optimizer).lower()
    if betas != (0.9, 0.999) and "adam" not in name and "ademamix" not in name:
        raise OpsdError(
            f"{key}.betas={list(betas)} with {named}",
            "verl gives betas to an optimizer with Adam in its name; they would be ignored in silence",
            "leave betas out",
        )
