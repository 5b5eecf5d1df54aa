"""Folders that every part of the project agrees on. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def conf_dir() -> Path:
    """Folder of the Hydra config groups: inside the package in a wheel, beside it in a source checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "hydra_conf"
    return installed if installed.is_dir() else here.parent / "hydra_conf"


def cache_dir() -> Path:
    """Where prepared models and tasks are kept: ``OPSD_CACHE``, by default ``~/.cache/verl-opsd``."""
    return Path(os.environ.get("OPSD_CACHE") or Path.home() / ".cache" / "verl-opsd")
