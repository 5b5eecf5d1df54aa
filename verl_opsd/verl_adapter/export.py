"""The trained adapter in the layout of PEFT: ``adapter_model.safetensors`` in fp32 and ``adapter_config.json``."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.engine import OpsdEngine

#: PEFT's name of the only adapter, which files don't carry.
_ADAPTER = ".default"


def export_adapter(engine: OpsdEngine, folder: Path) -> None:
    """Collective. The folder appears whole, or not at all; one that is there is replaced.

    Raises:
        OpsdError: the engine trains no adapter.
    """
    parameters = {k: p.detach() for k, p in engine.module.named_parameters() if "lora_" in k}
    if not parameters:
        raise OpsdError("export of an adapter", "full-parameter training has none", "use verl's checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for name, p in parameters.items():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        if dist.get_rank() == 0:
            plain = name.replace("_checkpoint_wrapped_module.", "").replace(f"{_ADAPTER}.", ".")
            tensors[plain] = whole.to("cpu", torch.float32, copy=True).contiguous()
    if dist.get_rank() == 0:
        temporary = folder.with_name(f".{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(engine.module.peft_config["default"])
        config.base_model_name_or_path, config.inference_mode = str(engine.model_config.path), True
        config.save_pretrained(str(temporary))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    dist.barrier()
