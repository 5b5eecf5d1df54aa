"""Runs what the test modules judge: ``run.py`` with the cases of ``cases_*.py``, in one process group for each world size (gloo, fp32)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    code = f"import cpu_platform, pathlib, tiny; tiny.make_models(pathlib.Path({str(root)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True, capture_output=True, timeout=120)
    return root


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """``measured(world, case)``: numbers of rank 0; a world's processes run once a module, with all of its ``CASES``; another case (it makes
    process groups of its own) has processes of its own."""
    done: dict[Any, dict] = {}
    all_of: dict[int, tuple[str, ...]] = request.module.CASES

    def run(world: int, cases: tuple[str, ...]) -> dict:
        folder = tmp_path_factory.mktemp(f"world{world}")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parents[2])}
        ranks, logs = [], [folder / f"rank{r}.log" for r in range(world)]
        for r in range(world):
            command = [
                sys.executable,
                str(HERE / "run.py"),
                str(r),
                str(world),
                str(port),
                str(models),
                str(folder / "out.json"),
            ]
            with logs[r].open("w") as log:
                ranks.append(subprocess.Popen([*command, *cases], env=env, stdout=log, stderr=subprocess.STDOUT))
        try:
            for process in ranks:
                process.wait(timeout=540)
        finally:
            for process in ranks:
                process.kill()
        out = json.loads((folder / "out.json").read_text())
        out["log"] = "\n".join(log.read_text()[-3000:] for log in logs)
        return out

    def get(world: int, case: str) -> dict:
        together = case in all_of.get(world, ())
        key = world if together else (world, case)
        if key not in done:
            done[key] = run(world, all_of[world] if together else (case,))
        assert case in done[key], done[key]["log"]
        assert "traceback" not in done[key][case], done[key][case]["traceback"]
        return done[key][case]

    return get
