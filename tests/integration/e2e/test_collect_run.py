"""`+recipe=collect` as a whole run: ended by kill -9 in the middle, started again by the same command, and made into a corpus."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from job import Job, Watch, evidence, run_trainer, table
from test_scripted import PUBLISH, SUBMIT, TEXTKIT, gold, key

from verl_opsd.cli.main import main

pytestmark = pytest.mark.slow
LEDGER = ("pocket_ledger_task", 1)
IDS = [f"eval-00000-{i:05d}-0" for i in range(4)]
WAIT = {"text": "I wait.", "command": "sleep 8"}


def arguments(here: Path) -> list[str]:
    """Two pairs, two seeds each, one episode at a time, in whichever order verl starts them: the first pair is solved, the second never.
    Every agent waits, to be met in the act."""
    idle = {f"agent{i}": [WAIT, SUBMIT] for i in (1, 2)}
    solved = {f"agent{i}": [WAIT, gold(TEXTKIT, i), PUBLISH, SUBMIT] for i in (1, 2)}
    (here / "script.json").write_text(json.dumps({key(TEXTKIT, (1, 2)): solved, key(LEDGER, (1, 2)): idle}))
    tasks = [{"repo": repo, "task_id": task, "pairs": [[1, 2]]} for repo, task in (TEXTKIT, LEDGER)]
    (here / "pairs.json").write_text(json.dumps({"tasks": tasks}))
    return [
        "+recipe=collect",
        f"opsd.tasks.eval={here / 'pairs.json'}",
        "opsd.evaluation.seeds=2",
        "opsd.contract.concurrency=1",
        "opsd.contract.max_tokens=1024",
        "opsd.contract.temperature=0.9",
        "actor_rollout_ref.rollout.name=opsd_scripted",
        f"+actor_rollout_ref.rollout.engine_kwargs.opsd.script={here / 'script.json'}",
        "hydra.run.dir=here",
    ]


def collected(run: Path) -> dict[str, int]:
    """Finished episodes, and when each was written."""
    return {p.name: p.stat().st_mtime_ns for p in (run / "episodes").glob("eval-*")}


def killed(here: Path) -> dict[str, int]:
    """Starts the command, ends it by SIGKILL while an agent works and two episodes are on record, and waits until nothing of it is left."""
    with (here / "killed.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "verl.trainer.main_ppo", *arguments(here)],
            cwd=here,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "WANDB_MODE": "offline"},
            start_new_session=True,
        )
    watch, until = Watch({psutil.Process(process.pid)}), time.monotonic() + 300
    try:
        while len(collected(here / "here")) < 2 or not any(WAIT["command"] in line for line in watch.alive()):
            assert process.poll() is None and time.monotonic() < until, (here / "killed.txt").read_text()[-5000:]
            watch.look()
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + 180
    while (watch.alive() or watch.left()) and time.monotonic() < until:
        time.sleep(0.2)
    assert (watch.alive(), watch.left()) == ([], [])
    return collected(here / "here")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], Job]:
    here = tmp_path_factory.mktemp("collect")
    kept = killed(here)
    return kept, run_trainer(here, *arguments(here))


def test_the_same_command_runs_what_is_missing(runs: tuple[dict[str, int], Job]) -> None:
    kept, job = runs
    job.assert_done()
    assert 2 <= len(kept) < 4 and kept.keys() < set(IDS)
    assert f"{len(kept)} of 4 episodes are on record; {4 - len(kept)} run" in job.output
    now = collected(job.directory)
    assert sorted(now) == IDS and {i: now[i] for i in kept} == kept
    assert [(e["episode_id"], e["repo"], e["outcome"]) for e in table(job.directory, "episodes", "eval")] == [
        (name, repo, "scored") for name, repo in zip(IDS, [TEXTKIT[0]] * 2 + [LEDGER[0]] * 2, strict=True)
    ]


def test_sampling_off_the_models_own_distribution_is_told(runs: tuple[dict[str, int], Job]) -> None:
    _, job = runs
    assert "verl-opsd: replies are sampled at temperature=0.9; divergences are measured at temperature 1" in job.output
    assert [e["verdict"] for e in evidence(job.directory, "sampling")] == ["recorded"] * 2


def test_progress_yield_and_spread_are_printed(runs: tuple[dict[str, int], Job]) -> None:
    kept, job = runs
    ran = [int(n) for n in re.findall(r"verl-opsd: planned 4, ran (\d), scored \1, void 0: features", job.output)]
    assert set(ran) == set(range(len(kept), 5)) and ran == sorted(ran)
    assert "yield: 50.0% of the agents' runs" in job.output
    assert "pocket_textkit_task/task0 4 of 4" in job.output and "pocket_ledger_task/task1 0 of 4" in job.output
    assert "warning: 1 of 2 tasks were never solved" in job.output


def test_a_corpus_of_it_passes_every_gate(runs: tuple[dict[str, int], Job], capsys: pytest.CaptureFixture[str]) -> None:
    _, job = runs
    corpus = job.cwd / "corpus"
    command = ["corpus", "build", str(job.directory), "--out", str(corpus), "--split", "eval", "--eval", "pocket_eval"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "warning: 1 of 2 tasks were never solved" in said and "yield: 50.0% of the agents' runs" in said
    manifest: dict[str, Any] = json.loads((corpus / "corpus.json").read_text())
    # Both seeds play the same script, so the second run of the solved pair is a copy of the first.
    assert {k: len(v) for k, v in manifest["excluded"].items()} == {"near_duplicate": 2, "not_passed": 4}
    assert manifest["files"]["train"]["rows"] == 2 and {g["verdict"] for g in manifest["gates"]} == {"pass"}
    assert main(["corpus", "check", str(corpus)]) == 0
    assert main(["corpus", "build", str(job.directory), "--out", str(corpus) + "-train", "--eval", "pocket_eval"]) == 2
    assert "other_split 4" in capsys.readouterr().err
