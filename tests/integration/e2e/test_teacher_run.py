"""The main job with a device teacher: another model of another size, and the student's own model as its identity control."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from verl_opsd.models.tiny import WARM, make_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
#: The actors read a brief of their own, which is taken out before training.
HINT = ("opsd.actor_brief.name=shared_backlog", "opsd.actor_brief.where=train")


def run(folder: Path, teacher: Path, *overrides: str) -> tuple[dict[str, dict], np.lib.npyio.NpzFile]:
    """One round; the last verdict of each gate, and the per-position values of the update."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=opd", "scale=local", "teacher=device"]
    command += [f"opsd.teacher.path={teacher}", "trainer.total_training_steps=1", "opsd.contract.step_limit=2"]
    command += ["opsd.contract.max_tokens=32", "opsd.tasks.max_eval=1", f"hydra.run.dir={folder}", *overrides]
    log = folder.with_suffix(".log")
    with log.open("w") as f:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, timeout=900, env=env).returncode
    assert code == 0, log.read_text()[-4000:]
    lines = [json.loads(x) for x in (folder / "evidence.jsonl").read_text().splitlines()]
    assert {x["verdict"] for x in lines} <= {"pass", "recorded"}
    return {x["gate"]: x for x in lines}, np.load(folder / "telemetry" / "00001.npz")


def stage(folder: Path, name: str) -> Any:
    return json.loads((folder / "stages" / f"0001-{name}.json").read_text())["outputs"]


def test_teacher_of_another_size(tmp_path: Path) -> None:
    teacher = make_tiny(tmp_path / "teacher", seed=5, hidden_size=64, tokenizer=AutoTokenizer.from_pretrained(WARM))
    gates, values = run(tmp_path / "run", teacher, "opsd.loss.anchor=0.5", *HINT)
    assert gates["hint_copied"]["value"] == 0 and "shared_backlog" in gates["hint_copied"]["detail"]
    scored = stage(tmp_path / "run", "score")
    assert gates["teacher_gap"]["value"] > 1e-2 and gates["teacher_pull"]["value"] > 1e-2
    assert "device_identity" not in gates
    assert gates["identity"]["value"] <= 1e-6  # stays on the self path
    assert gates["startup:teacher_workers_agree"]["value"] == 0
    assert values["divergence"].size > 0 and values["divergence"].mean() > 1e-2
    # before the first step the adapter is zero, so the student is its base: what trains is what the control measured
    assert values["divergence"].mean() == pytest.approx(gates["teacher_pull"]["value"], rel=1e-3)
    assert np.abs(values["anchor"]).max() <= 1e-6
    assert scored["restarts"] == scored["cache_hits"] == scored["cache_damaged"] == 0
    assert 0 < scored["cache_written_bytes"] <= scored["cache_bytes"] and scored["cache_misses"] > 0


def test_identical_device_teacher(tmp_path: Path) -> None:
    gates, values = run(tmp_path / "run", WARM, "brief=none", "opsd.teacher.devices=2")
    assert gates["device_identity"]["value"] <= 1e-6 == gates["device_identity"]["threshold"]
    assert gates["teacher_pull"]["value"] <= 1e-6
    assert values["divergence"].size > 0 and values["divergence"].mean() <= 1e-6
