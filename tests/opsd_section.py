"""The smallest `opsd` section of a configuration; a test changes what it is about."""

from __future__ import annotations

from typing import Any

SECTION: dict[str, Any] = {
    "recipe": "opd",
    "scale": "local",
    "mode": "online",
    "tasks": {"dataset": "pocket", "train": "pocket_train", "eval": "pocket_eval"},
    "brief": {"name": "peer_spec"},
    "teacher": {},
    "loss": {},
    "contract": {"context_length": 12288, "max_tokens": 96},
}
