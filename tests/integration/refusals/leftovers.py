"""What a refused run could leave on the host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from verl_opsd.cooperbench.sandbox.host import STATE_ROOT


def leavings() -> set[str]:
    """What a run of this process could leave on the host: temporary directories, sandboxes, child processes."""
    here = {str(p) for p in Path(tempfile.gettempdir()).iterdir()}
    if STATE_ROOT.is_dir():
        here |= {str(p) for p in STATE_ROOT.glob(f"*-{os.getpid()}-*")}
    return here | {f"process {p.pid}" for p in psutil.Process().children(recursive=True)}
