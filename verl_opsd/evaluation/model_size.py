"""Parameters of a model folder, counted from the headers of its weight files."""

from __future__ import annotations

import json
import math
from pathlib import Path

#: Part of the names of a mixture's expert tensors.
EXPERTS = ".experts."


def model_size(folder: str | Path) -> tuple[int | None, int | None]:
    """(parameters, parameters used a token); None where a folder has no safetensors, or its mixture does not say how many experts
    a token uses. A model without experts uses all of them."""
    from safetensors import safe_open

    total = experts = 0
    files = sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="np") as f:
            for name in f.keys():
                count = math.prod(f.get_slice(name).get_shape())
                total += count
                experts += count * (EXPERTS in name)
    if not files:
        return None, None
    if not experts:
        return total, total
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    config = config.get("text_config") or config
    every = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    used = config.get("num_experts_per_tok")
    return total, None if not every or not used else total - experts + experts * used // every
