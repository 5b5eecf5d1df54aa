"""Runs what the test modules judge: ``run.py`` with the cases of ``cases_*.py``, in one process group for each world size (gloo, fp32)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from forked import Forks

HERE = Path(__file__).parent
PATH = f"import sys; sys.path.insert(0, {str(HERE)!r}); "


@pytest.fixture(scope="session")
def models(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    (done,) = forks.run(
        f"{PATH}import cpu_platform, pathlib, tiny; tiny.make_models(pathlib.Path({str(root)!r}))", [], cwd=root
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def measured(forks: Forks, models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """``measured(world, case)``: numbers of rank 0; a world's processes run once a module, with all of its ``CASES``; another case (it makes
    process groups of its own) has processes of its own."""
    done: dict[Any, dict] = {}
    all_of: dict[int, tuple[str, ...]] = request.module.CASES

    def run(world: int, cases: tuple[str, ...]) -> dict:
        folder = tmp_path_factory.mktemp(f"world{world}")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        code = f"{PATH}import runpy; runpy.run_path({str(HERE / 'run.py')!r}, run_name='__main__')"
        argv = [[str(rank), str(world), str(port), str(models), str(folder / "out.json"), *cases] for rank in range(world)]
        ranks = forks.run(code, *argv, cwd=folder, timeout_s=540)
        out = json.loads((folder / "out.json").read_text())
        out["log"] = "\n".join(done.stderr[-3000:] for done in ranks)
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
