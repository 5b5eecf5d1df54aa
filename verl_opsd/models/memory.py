"""Where the weights of a model on the host processor lie."""

from __future__ import annotations

from torch import nn


def out_of_the_file(model: nn.Module) -> None:
    """Copies the parameters into this process' heap. Loaded from safetensors they are a mapping of the file, whose 4 kB pages may have
    to be read again, and which no setting puts into huge pages."""
    for p in model.parameters():
        p.data = p.data.clone()
