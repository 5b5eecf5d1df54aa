"""Where prepared models and tasks are kept; standard library only, for every room."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``OPSD_CACHE``, by default ``~/.cache/verl-opsd``."""
    return Path(os.environ.get("OPSD_CACHE") or Path.home() / ".cache" / "verl-opsd")
