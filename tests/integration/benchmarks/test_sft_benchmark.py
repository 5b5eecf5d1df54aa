"""benchmarks/sft.py runs with tiny shapes on two ranks, and its arms compute the same loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_arm_runs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "benchmarks/sft.py"]
    words += ["--size", "tiny", "--mode", "full", "--contexts", "128", "256", "--repeat", "1"]
    words += ["--folder", str(tmp_path), "--json", str(tmp_path / "out.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == 6 and not any("error" in f for f in found)
    for context in (128, 256):
        first, *others = (f["loss"] for f in found if f["context"] == context)
        assert others == pytest.approx([first] * 2, rel=1e-4)
        assert done.stdout.count(f"| {context} |") == 3
