"""Scripted pairs through the whole trainer: one solves its task, one conflicts; all weights are trained, without LoRA."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from job import Job, evidence, report, run_trainer, stages, table, telemetry
from transformers import AutoTokenizer

import verl_opsd

POCKET = Path(verl_opsd.__file__).parent / "cooperbench" / "pocket"
SUBMIT = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
PUBLISH = {"command": 'git add -A && git commit -qm work && git push -q && gh pr create --title "work" --body "work"'}
THOUGHT = "I look at the task before I run anything."
QUESTION, ANSWER = "which file do you change?", "I change the first one (by $10 at most)"
TEXTKIT, INIFILE = ("pocket_textkit_task", 0), ("pocket_inifile_task", 1)


def gold(task: tuple[str, int], feature: int) -> dict[str, str]:
    patch = (POCKET / task[0] / f"task{task[1]}" / f"feature{feature}" / "feature.patch").read_text()
    return {"text": "I write it.", "command": f"git apply <<'PATCH'\n{patch}PATCH"}


def key(task: tuple[str, int], pair: tuple[int, int]) -> str:
    return f"{task[0]}/task{task[1]}/f{pair[0]}_f{pair[1]}"


def script() -> dict[str, dict[str, list]]:
    """The clean pair also talks, and thinks without a tool call; the conflicting one only works; the evaluated one
    leaves the second feature undone."""
    answer = {"command": f"sleep 3; send_message agent2 <<'MSG'\n{ANSWER}\nMSG"}
    ask = {"command": f'send_message --wait agent1 "{QUESTION}"'}
    return {
        key(TEXTKIT, (1, 2)): {
            "agent1": [THOUGHT, gold(TEXTKIT, 1), answer, PUBLISH, SUBMIT],
            "agent2": [ask, gold(TEXTKIT, 2), PUBLISH, SUBMIT],
        },
        key(TEXTKIT, (1, 3)): {f"agent{i}": [gold(TEXTKIT, f), PUBLISH, SUBMIT] for i, f in ((1, 1), (2, 3))},
        key(INIFILE, (1, 2)): {"agent1": [gold(INIFILE, 1), PUBLISH, SUBMIT], "agent2": [SUBMIT] * 3},
    }


def subset(path: Path, task: tuple[str, int], *pairs: tuple[int, int]) -> Path:
    path.write_text(json.dumps({"tasks": [{"repo": task[0], "task_id": task[1], "pairs": [list(p) for p in pairs]}]}))
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    here = tmp_path_factory.mktemp("scripted")
    (here / "script.json").write_text(json.dumps(script()))
    return run_trainer(
        here,
        "+recipe=opd",
        "actor_rollout_ref.rollout.name=opsd_scripted",
        f"+actor_rollout_ref.rollout.engine_kwargs.opsd.script={here / 'script.json'}",
        f"opsd.tasks.train={subset(here / 'train.json', TEXTKIT, (1, 2), (1, 3))}",
        f"opsd.tasks.eval={subset(here / 'eval.json', INIFILE, (1, 2))}",
        "opsd.contract.step_limit=8",
        "opsd.contract.max_tokens=1024",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.model.lora_rank=0",
        "actor_rollout_ref.actor.optim.lr=1e-4",
    )


def episode(job: Job, split: str, pair: tuple[int, int]) -> dict:
    (found,) = [e for e in table(job.directory, "episodes", split) if tuple(e["features"]) == pair]
    return found


def grades(job: Job, split: str, pair: tuple[int, int]) -> list[dict]:
    name = episode(job, split, pair)["episode_id"]
    return [g for g in table(job.directory, "grades", split) if g["episode_id"] == name]


def turns(job: Job, pair: tuple[int, int], agent: str) -> list[dict]:
    name = episode(job, "train", pair)["episode_id"]
    found = [r for r in table(job.directory, "turns", "train") if (r["episode_id"], r["agent_id"]) == (name, agent)]
    return sorted(found, key=lambda r: r["turn"])


def test_ends_and_leaves_nothing(job):
    job.assert_done()


def test_both_features_of_the_solved_pair_pass(job):
    found = grades(job, "train", (1, 2))
    assert [(g["feature_id"], g["passed"], g["merge"]) for g in found] == [(1, True, "clean"), (2, True, "clean")]
    assert all(g["tests_passed"] > 0 and g["tests_failed"] == 0 for g in found)
    agents = episode(job, "train", (1, 2))["agents"]
    assert [(a["status"], a["opened_pr"]) for a in agents] == [("Submitted", True)] * 2


def test_the_conflicting_pair_gets_nothing(job):
    found = grades(job, "train", (1, 3))
    assert [(g["passed"], g["merge"]) for g in found] == [(False, "conflicts")] * 2
    assert all(a["patch"].strip() for a in episode(job, "train", (1, 3))["agents"])


def test_one_feature_alone_passes_alone(job):
    assert [(g["feature_id"], g["passed"]) for g in grades(job, "eval", (1, 2))] == [(1, True), (2, False)]


def test_the_report_and_the_rewards_say_the_same(job):
    said = report(job.directory)["standings"]
    assert (said["train"]["features"]["passed"], said["train"]["pairs"]["passed"]) == (2, 1)
    assert (said["eval"]["features"]["passed"], said["eval"]["pairs"]["passed"]) == (1, 0)
    assert said["train"]["merges"] == {"clean_both": 1, "conflicts": 1}
    # verl's own reward metrics of the step: pair rewards 1 and 0
    assert "critic/score/max:1.0" in job.output and "critic/score/min:0.0" in job.output


def test_messages_reach_the_peer_and_are_stored(job):
    found = episode(job, "train", (1, 2))
    assert [a["sent_messages"] for a in found["agents"]] == [1, 1]
    messages = {a: json.dumps(m) for a, m in json.loads(found["messages"]).items()}
    assert QUESTION in messages["agent1"] and ANSWER in messages["agent2"]
    assert QUESTION not in json.dumps(json.loads(episode(job, "train", (1, 3))["messages"]))


def test_malformed_turns_are_recorded_and_trained(job):
    kinds = [r["kind"] for r in turns(job, (1, 2), "agent1")]
    assert kinds == ["malformed", "policy", "policy", "policy", "policy"]
    everything = Counter(r["kind"] for r in table(job.directory, "turns", "train"))
    assert everything == {"malformed": 1, "policy": 4 + 4 + 6}


def test_the_stored_ids_are_the_scripts_replies_and_all_are_trained(job):
    meta = json.loads((job.directory / "meta.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(Path(meta["student"]))
    for agent, entries in script()[key(TEXTKIT, (1, 2))].items():
        stored = turns(job, (1, 2), agent)
        assert len(stored) == len(entries)
        for turn, entry in zip(stored, entries, strict=True):
            ids = turn["response_ids"]
            text = tokenizer.decode(ids[:-1])
            assert ids[-1] == tokenizer.eos_token_id
            if isinstance(entry, str):
                assert text == entry
            else:
                call = json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])
                assert call == {"name": "bash", "arguments": {"command": entry["command"]}}
    sampled = sum(len(r["response_ids"]) for r in table(job.directory, "turns", "train"))
    (trained,) = [s["outputs"] for s in stages(job.directory) if s["stage"] == "train"]
    assert trained["loss_tokens"] == telemetry(job.directory)[0]["divergence"].size == sampled > 0


def test_telemetry_names_the_branch_of_each_position(job):
    """The stored log-probabilities of a named branch's replies are the telemetry's at its rows."""
    values = np.load(job.directory / "telemetry" / "00001.npz")
    whose = values["row_names"][values["row"].astype(int)]
    stored: dict[str, list[float]] = {}
    for r in sorted(table(job.directory, "turns", "train"), key=lambda r: r["turn"]):
        stored.setdefault(f"{r['episode_id']}/{r['agent_id']}/{r['branch']}", []).extend(r["response_logprobs"])
    assert set(whose) == set(stored)
    for name, logprobs in stored.items():
        assert values["student_logprob"][whose == name] == pytest.approx(logprobs, abs=1e-4), name


def test_full_parameters_are_trained_against_the_initial_weights_and_published(job):
    (identity,) = evidence(job.directory, "identity")
    assert 0 <= identity["value"] <= 1e-6
    assert report(job.directory)["loss_by_round"][0] > 0
    assert np.isfinite(telemetry(job.directory)[0]["divergence"]).all()
    published = evidence(job.directory, "publish_kl")
    assert [f"version {v}," in g["detail"] for v, g in enumerate(published)] == [True, True]
    assert all(0 <= g["value"] <= g["threshold"] == 1e-6 for g in published)
    (changed,) = evidence(job.directory, "weights_changed")
    assert changed["value"] > 0 and len(evidence(job.directory, "full_bound")) == 2
    assert evidence(job.directory, "adapter_non_zero") == evidence(job.directory, "adapter_bound") == []


def test_per_turn_scoring_equals_per_branch_scoring_on_the_recorded_episode(job, tmp_path):
    """The same reverse KL at every token and the same gradient, through the engine, with a brief in the system message."""
    engine, out = Path(__file__).parents[1] / "engine", tmp_path / "out.json"
    student = json.loads((job.directory / "meta.json").read_text())["student"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    done = subprocess.run(
        [sys.executable, str(engine / "run.py"), "0", "1", str(port), str(Path(student).parent), str(out), "recorded"],
        env=os.environ | {"OPSD_TEST_RUN": str(job.directory), "PYTHONPATH": str(engine.parents[2]), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["recorded"]
    sampled = Counter(t["episode_id"] for t in table(job.directory, "turns", "train") for _ in t["response_ids"])
    branches, turns_ = found["rows"]
    assert branches == 3 < turns_ == 9  # of two agents, one of whose malformed turn is a branch; five and four turns
    assert found["positions"] == sampled[episode(job, "train", (1, 2))["episode_id"]]
    assert found["mean"] > 1e-4
    assert found["kl"] < 1e-5 and found["loss"] < 1e-5 and found["grad"] < 1e-4, found
