"""Faults in a running job: named, bounded in time, masked or fatal as they should be, and nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable

import pytest
from conftest import EVALUATED, FIRST, LOOK, SECOND, START_S, Job, load, wait_for

pytestmark = pytest.mark.e2e

SLOW = {"text": "I wait.", "command": "sleep 15"}
BOTH = {"agent1": [LOOK, LOOK], "agent2": [LOOK, LOOK]}


def in_an_episode(job: Job) -> bool:
    """Watches; whether a command of an agent runs in a sandbox now."""
    return any("sleep 15" in line and p.is_running() for p, line in job.watch().items())


@pytest.mark.slow
def test_engine_that_dies_in_the_middle_of_an_episode(job: Callable[..., Job]):
    dies = {"agent1": [LOOK, {"fault": "die"}], "agent2": [LOOK, LOOK]}
    run = job({FIRST: dies, SECOND: dies}, "trainer.total_training_steps=1")
    wait_for(lambda: run.watch() and run.process.poll() is not None, START_S, "end of the run")
    assert run.process.returncode == 1
    text = run.text()
    assert "error: round 1 was ended by infrastructure faults; its episodes: 2 infra:engine_died" in text
    assert "  rule: a faulty episode is masked" in text and "  way out: read the cause" in text
    assert run.episodes() == {"train-00001-00000-0": "infra:engine_died", "train-00001-00001-0": "infra:engine_died"}
    assert not (run.run / "report.json").exists()
    run.require_clean()


@pytest.mark.slow
def test_kill_9_resume_and_a_masked_episode(job: Callable[..., Job]):
    """Round 1 with a fault in one of two pairs; killed in the middle of round 2; then continued to the end."""
    fault = {"agent1": [LOOK, {"fault": "raise"}], "agent2": [LOOK, LOOK]}
    slow = {"agent1": [SLOW, LOOK], "agent2": [LOOK, LOOK]}
    keys = ["trainer.total_training_steps=2", "trainer.save_freq=1", "opsd.contract.command_timeout_s=30"]
    first = job({FIRST: slow, SECOND: fault, EVALUATED: BOTH}, *keys)
    tracker = first.run / "checkpoints" / "latest_checkpointed_iteration.txt"
    wait_for(lambda: first.watch() and tracker.exists(), START_S, "checkpoint", first)
    wait_for(lambda: (first.run / "stages" / "0001-publish.json").exists(), 60 * load(), "end of round 1", first)
    wait_for(lambda: in_an_episode(first), 60 * load(), "command in round 2", first)
    wait_for(lambda: "train-00002-00001-0" in first.episodes(), 60 * load(), "stored episode of round 2", first)
    assert first.sandboxes()
    first.process.kill()
    first.process.wait()
    first.require_clean()
    of_round_1 = {"train-00001-00000-0": "scored", "train-00001-00001-0": "infra:engine_died"}
    assert first.episodes() == {**of_round_1, "train-00002-00001-0": "infra:engine_died"}

    second = job({FIRST: BOTH, SECOND: BOTH, EVALUATED: BOTH}, *keys)
    wait_for(lambda: second.watch() and second.process.poll() is not None, START_S, "end of the run")
    assert second.process.returncode == 0, second.text()[-5000:]
    of_round_2 = {"train-00002-00000-0": "scored", "train-00002-00001-0": "scored"}
    assert second.episodes() == {**of_round_1, **of_round_2, "eval-00002-00000-0": "scored"}
    report = json.loads((second.run / "report.json").read_text())
    train = report["standings"]["train"]
    assert (train["ran"], train["scored"], train["void"]) == (4, 3, {"engine_died": 1})
    assert report["standings"]["eval"]["ran"] == 1
    assert len(report["loss_by_round"]) == 2 and len(report["distillation"]["kl_by_round"]) == 2
    names = sorted(p.name for p in (second.run / "stages").iterdir())
    assert names == sorted(
        [f"{n:04d}-{s}.json" for n in (1, 2) for s in ("collect", "control", "score", "train", "publish")]
        + ["0000-start.json", "0002-evaluate.json"]
    )
    moved = second.run / "interrupted" / "0"
    assert [p.name for p in (moved / "episodes").iterdir()] == ["train-00002-00001-0"]
    lines = [json.loads(line) for line in (second.run / "evidence.jsonl").read_text().splitlines()]
    resumed = [e for e in lines if e["gate"] == "resume"]
    assert len(resumed) == 1 and resumed[0]["value"] == 1 and "1 episodes" in resumed[0]["detail"]
    for step in (1, 2):
        adapter = second.run / "checkpoints" / f"global_step_{step}" / "adapter"
        assert (adapter / "adapter_config.json").is_file() and (adapter / "adapter_model.safetensors").is_file()
    second.require_clean()


@pytest.mark.parametrize(
    "how",
    ["TaskRunner", pytest.param("AgentLoopWorker", marks=pytest.mark.slow), pytest.param("Ctrl-C", marks=pytest.mark.slow)],
)
def test_stopped_in_the_middle_of_an_episode(job: Callable[..., Job], how: str):
    slow = {"agent1": [SLOW, LOOK], "agent2": [SLOW, LOOK]}
    run = job({FIRST: slow, SECOND: slow}, "trainer.total_training_steps=1", "opsd.contract.command_timeout_s=30")
    wait_for(lambda: in_an_episode(run), START_S, "command of an agent", run)
    assert run.sandboxes()
    if how == "Ctrl-C":
        run.process.send_signal(signal.SIGINT)
    else:
        actor = run.actor(how)
        assert actor is not None
        actor.kill()
    start = time.monotonic()
    wait_for(lambda: run.process.poll() is not None, 60 * load(), f"end of the run after {how}")
    print(f"{how}: the command ended after {time.monotonic() - start:.1f} s with {run.process.returncode}")
    assert run.process.returncode not in (0, None)
    if how == "AgentLoopWorker":
        assert "error: agent-loop worker 0 has died" in run.text()
    run.require_clean()


@pytest.mark.slow
def test_a_student_rank_that_dies_stops_the_run_which_resumes(job: Callable[..., Job]):
    """Two ranks: one is killed in the middle of an update, then one while episodes are played; then the run goes on to its end."""
    script = {FIRST: BOTH, SECOND: BOTH, EVALUATED: BOTH}
    slow = script | {FIRST: {"agent1": [SLOW, LOOK], "agent2": [SLOW, LOOK]}}
    keys = ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.save_freq=1"]
    keys += ["opsd.loss.epochs=20", "opsd.contract.command_timeout_s=30"]

    def died(run: Job, doing: str) -> None:
        started = time.monotonic()
        wait_for(lambda: run.watch() and run.process.poll() is not None, 120, f"end of the run {doing}")
        print(f"a rank killed {doing}: the command ended after {time.monotonic() - started:.1f} s, load {load():.1f}")
        assert run.process.returncode == 1
        assert re.search(rf"error: student rank [01] has died {doing}", run.text()), run.text()[-5000:]
        assert "way out: read the output above" in run.text() and not (run.run / "report.json").exists()
        run.require_clean()

    first = job(script, *keys)
    wait_for(lambda: (first.run / "stages" / "0002-collect.json").exists(), START_S * 2, "episodes of round 2", first)
    updating = wait_for(lambda: first.ranks("update_actor"), 60 * load(), "update", first)
    updating[-1].kill()
    died(first, "in round 2")
    assert (first.run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"

    second = job(slow, *keys)
    wait_for(lambda: in_an_episode(second), START_S, "command of an agent", second)
    idle = second.ranks()
    assert len(idle) == 2
    idle[0].kill()
    died(second, "while episodes were played")

    third = job(script, *keys)
    wait_for(lambda: third.watch() and third.process.poll() is not None, START_S, "end of the run")
    assert third.process.returncode == 0, third.text()[-5000:]
    report = json.loads((third.run / "report.json").read_text())
    assert len(report["loss_by_round"]) == 2 and report["standings"]["train"]["scored"] == 4
    resumed = [json.loads(x) for x in (third.run / "evidence.jsonl").read_text().splitlines() if '"resume"' in x]
    assert [r["value"] for r in resumed] == [1, 1]
    third.require_clean()


@pytest.mark.slow
def test_kill_9_of_the_engine_and_resume(job: Callable[..., Job]):
    """The server's process is ended from outside in the middle of round 2; what was finished stays, the rest is masked and run again."""
    slow = {"agent1": [SLOW, LOOK], "agent2": [LOOK, LOOK]}
    keys = ["trainer.total_training_steps=2", "trainer.save_freq=1", "opsd.contract.command_timeout_s=30"]
    first = job({FIRST: slow, SECOND: slow, EVALUATED: BOTH}, *keys)
    wait_for(lambda: first.watch() and (first.run / "stages" / "0001-publish.json").exists(), START_S, "round 1", first)
    wait_for(lambda: in_an_episode(first), 120 * load(), "command in round 2", first)
    engine = first.actor("ScriptedServer")
    assert engine is not None, sorted(first.seen.values())
    engine.kill()
    wait_for(lambda: first.watch() and first.process.poll() is not None, 120 * load(), "end of the run")
    assert first.process.returncode == 1
    assert "error: round 2 was ended by infrastructure faults; its episodes: 2 infra:engine_died" in first.text()
    of_round_1 = {"train-00001-00000-0": "scored", "train-00001-00001-0": "scored"}
    of_round_2 = ("train-00002-00000-0", "train-00002-00001-0")
    assert first.episodes() == of_round_1 | dict.fromkeys(of_round_2, "infra:engine_died")
    first.require_clean()

    second = job({FIRST: BOTH, SECOND: BOTH, EVALUATED: BOTH}, *keys)
    wait_for(lambda: second.watch() and second.process.poll() is not None, START_S, "end of the run")
    assert second.process.returncode == 0, second.text()[-5000:]
    assert second.episodes() == of_round_1 | dict.fromkeys(of_round_2, "scored") | {"eval-00002-00000-0": "scored"}
    moved = second.run / "interrupted" / "0" / "episodes"
    assert sorted(p.name for p in moved.iterdir()) == list(of_round_2)
    second.require_clean()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["AgentLoopWorker", "SimpleStorageUnit", "TransferQueueController"])
def test_kill_9_of_the_worker_or_of_the_store_and_resume(job: Callable[..., Job], which: str):
    """The process that plays, or one that holds a round's rows, is ended in round 2, when one of its two episodes has ended."""
    slow = {"agent1": [SLOW, LOOK], "agent2": [LOOK, LOOK]}
    keys = ["trainer.total_training_steps=2", "trainer.save_freq=1", "opsd.contract.command_timeout_s=30"]
    first = job({FIRST: slow, SECOND: BOTH, EVALUATED: BOTH}, *keys)
    wait_for(lambda: first.watch() and (first.run / "stages" / "0001-publish.json").exists(), START_S, "round 1", first)
    wait_for(lambda: "train-00002-00001-0" in first.episodes(), 120 * load(), "stored episode of round 2", first)
    store = first.actor(which)
    assert store is not None, sorted(first.seen.values())
    assert in_an_episode(first)
    store.kill()
    started = time.monotonic()
    wait_for(lambda: first.watch() and first.process.poll() is not None, 120 * load(), "end of the run")
    print(f"{which}: the command ended after {time.monotonic() - started:.1f} s, load {load():.1f}")
    assert first.process.returncode == 1
    what = "agent-loop worker" if which == "AgentLoopWorker" else "process of TransferQueue"
    assert re.search(rf"error: {what} \d has died", first.text()), first.text()[-5000:]
    assert not (first.run / "report.json").exists()
    scored = dict.fromkeys([f"train-{n:05d}-{i:05d}-0" for n in (1, 2) for i in (0, 1)], "scored")
    ended = first.episodes()  # nothing but whole episodes, those that ended among them
    assert ended.items() <= scored.items() and "train-00002-00000-0" not in ended and len(ended) == 3
    first.require_clean()
    if which != "SimpleStorageUnit":  # going on is the same whatever has died
        return

    second = job({FIRST: BOTH, SECOND: BOTH, EVALUATED: BOTH}, *keys)
    wait_for(lambda: second.watch() and second.process.poll() is not None, START_S * load(), "end of the run")
    assert second.process.returncode == 0, second.text()[-5000:]
    assert second.episodes() == scored | {"eval-00002-00000-0": "scored"}
    report = json.loads((second.run / "report.json").read_text())
    train = report["standings"]["train"]
    assert (train["ran"], train["scored"], train["void"]) == (4, 4, {})
    moved = second.run / "interrupted" / "0" / "episodes"
    assert [p.name for p in moved.iterdir()] == ["train-00002-00001-0"]
    second.require_clean()


@pytest.mark.slow
def test_a_fault_that_repeats_identically_is_quarantined(job: Callable[..., Job]):
    """One pair trips over the same broken shell in each of three rounds: it plays twice, and the third time not at all."""
    broken = {
        "agent1": [{"text": "I look.", "command": "echo 'bash: line 7: gh: command not found'"}, LOOK],
        "agent2": [LOOK, LOOK],
    }
    run = job({FIRST: broken, SECOND: BOTH, EVALUATED: BOTH}, "trainer.total_training_steps=3")
    wait_for(lambda: run.watch() and run.process.poll() is not None, START_S * load(), "end of the run")
    assert run.process.returncode == 0, run.text()[-5000:]
    of_pair = [o for e, o in sorted(run.episodes().items()) if e.startswith("train") and e.endswith("-00000-0")]
    assert of_pair == ["infra:tripwire:gh_missing"] * 2 + ["infra:quarantined"]
    train = json.loads((run.run / "report.json").read_text())["standings"]["train"]
    assert (train["ran"], train["scored"], train["void"]) == (6, 3, {"quarantined": 1, "tripwire:gh_missing": 2})
    assert "3 scored of 6, void: 1 quarantined, 2 tripwire:gh" in run.text(), run.text()[-5000:]
    assert "quarantined" in (run.run / "report.html").read_text()
    first, second = [json.loads(line) for line in (run.run / "quarantine.jsonl").read_text().splitlines()]
    assert first == second and first["pair"] == FIRST and "gh_missing" in first["fault"]
    run.require_clean()
