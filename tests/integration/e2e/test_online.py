"""The default online run, from the command to the table; every number is derived again from the stored tables."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from job import evidence, report, stages, table, telemetry

ROUNDS, PAIRS = 2, 2


def test_ends_and_leaves_nothing(online):
    online.assert_done()


def test_every_artefact_carries_the_contract(online):
    values = json.loads((online.directory / "contract.json").read_text())
    assert (values["step_limit"], values["max_tokens"]) == (2, 32)
    stamp = hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    turns = [r for split in ("train", "eval") for r in table(online.directory, "turns", split)]
    episodes = [r for split in ("train", "eval") for r in table(online.directory, "episodes", split)]
    assert len(episodes) == ROUNDS * PAIRS + 1 and turns
    assert {r["contract_hash"] for r in turns + episodes} == {stamp}
    assert {r["file_contract"] for r in turns + episodes} == {stamp}
    assert report(online.directory)["contract"] == stamp


def test_policy_versions_follow_the_rounds(online):
    """Round r acts with what round r - 1 published; the evaluation with what the last round did."""
    train, ev = (table(online.directory, "turns", split) for split in ("train", "eval"))
    assert {(int(r["episode_id"].split("-")[1]), r["model_version"]) for r in train} == {(1, 0), (2, 1)}
    assert {r["model_version"] for r in ev} == {ROUNDS}


def test_the_contracts_limits_hold(online):
    turns = table(online.directory, "turns", "train") + table(online.directory, "turns", "eval")
    calls = Counter((r["episode_id"], r["agent_id"]) for r in turns)
    assert len(calls) == 2 * (ROUNDS * PAIRS + 1) and max(calls.values()) <= 2
    assert all(0 < len(r["response_ids"]) <= 32 for r in turns)
    assert all(len(r["response_ids"]) == len(r["response_logprobs"]) for r in turns)
    assert all(x <= 0 for r in turns for x in r["response_logprobs"])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_standings_agree_with_the_store(online, split):
    run, said = online.directory, report(online.directory)["standings"][split]
    episodes, grades, turns = (table(run, name, split) for name in ("episodes", "grades", "turns"))
    scored = [e["episode_id"] for e in episodes if e["outcome"] == "scored"]
    agents = [a for e in episodes for a in e["agents"]]
    assert (said["ran"], said["scored"], said["void"]) == (len(episodes), len(scored), {})
    assert len(scored) == len(episodes) == (ROUNDS * PAIRS if split == "train" else 1)
    assert len(grades) == 2 * len(scored)
    passed = Counter(g["episode_id"] for g in grades if g["passed"])
    assert (said["features"]["passed"], said["features"]["total"]) == (passed.total(), len(grades))
    assert (said["pairs"]["passed"], said["pairs"]["total"]) == (sum(n == 2 for n in passed.values()), len(scored))
    assert sum(said["merges"].values()) == len(scored)
    assert said["policy_tokens_per_pair"] * len(scored) == pytest.approx(sum(len(t["response_ids"]) for t in turns))
    assert said["messages_per_pair"] * len(scored) == pytest.approx(sum(a["sent_messages"] for a in agents))
    assert said["non_empty"]["passed"] == sum(bool(a["patch"].strip()) for a in agents)
    # Wilson's interval of k of n at z = 1.96, from its formula
    for rate in (said["features"], said["pairs"]):
        n, p, z = rate["total"], rate["passed"] / rate["total"], 1.959964
        middle, half = (p + z * z / 2 / n), z * np.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
        assert [rate["low"], rate["high"]] == pytest.approx(
            [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)], abs=1e-6
        )


def test_every_sampled_token_of_training_is_a_loss_position_once(online):
    run = online.directory
    sampled = Counter(int(r["episode_id"].split("-")[1]) for r in table(run, "turns", "train") for _ in r["response_ids"])
    rounds, said = telemetry(run), report(run)
    assert [t["divergence"].size for t in rounds] == [sampled[1], sampled[2]]
    assert said["distillation"]["loss_positions"] == sampled.total()
    trained = [s["outputs"] for s in stages(run) if s["stage"] == "train"]
    assert [s["loss_tokens"] for s in trained] == [sampled[1], sampled[2]]
    assert said["tokens_per_loss_token"] == pytest.approx(sum(s["sequence_tokens"] for s in trained) / sampled.total())

    ends: dict[tuple, int] = {}
    for r in (r for split in ("train", "eval") for r in table(run, "turns", split)):
        branch = (r["episode_id"], r["agent_id"], r["branch"])
        ends[branch] = max(ends.get(branch, 0), r["start"] + len(r["new_ids"]) + len(r["response_ids"]))
    assert (said["branches"]["branches"], said["branches"]["sequence_tokens"]) == (len(ends), sum(ends.values()))
    student = sum(n for b, n in ends.items() if b[0].startswith("train"))
    # student and teacher each read a branch once, the teacher the brief besides
    assert 2 * student < sum(s["sequence_tokens"] for s in trained) < 2.5 * student


def test_loss_and_divergences_agree_with_the_positions(online):
    said, rounds = report(online.directory), telemetry(online.directory)
    d = said["distillation"]
    assert all(np.isfinite(v).all() for t in rounds for k, v in t.items() if k not in ("anchor", "weight"))
    assert all((t["divergence"] >= 0).all() and t["divergence"].mean() > 1e-6 for t in rounds)
    # token mean over one optimizer step a round: the loss is the mean divergence
    assert said["loss_by_round"] == pytest.approx([t["divergence"].mean() for t in rounds], rel=1e-4)
    assert d["kl_by_round"] == pytest.approx([t["divergence"].mean() for t in rounds], rel=1e-5)
    for t in rounds:
        assert t["coef"] == pytest.approx(1 / t["coef"].size, rel=1e-5)
    order = [np.lexsort((t["position"], t["row"], t["step"])) for t in rounds]  # within a step by row and place
    kl, agree = (np.concatenate([t[k][o] for t, o in zip(rounds, order, strict=True)]) for k in ("divergence", "agree"))
    assert d["kl_mean"] == pytest.approx(kl.sum() / kl.size, rel=1e-5)
    assert d["kl_median"] == pytest.approx(np.quantile(kl, 0.5, method="lower"), rel=0.011)  # a sketch's accuracy
    ledger = said["ledger"]
    assert (ledger["usable"], ledger["reply_tokens"]) == (len(table(online.directory, "turns", "train")), kl.size)
    assert sum(ledger["by_class"].values()) == kl.size and ledger["dropped"] == ledger["left_out"] == {}
    by = d["summary"]["by"]
    assert {k: sum(c["positions"] for c in cells.values()) for k, cells in by.items()} == dict.fromkeys(by, kl.size)
    assert d["kl_max_over_mean"] == pytest.approx(kl.max() / kl.mean(), rel=1e-4)
    assert set(np.unique(agree)) <= {0.0, 1.0}
    for name, values in (("kl", kl), ("agreement", agree)):
        quarters, n = d[f"{name}_by_quarter"], kl.size
        sizes = [n // 4 + (q < n % 4) for q in range(4)]
        assert np.dot(quarters, sizes) == pytest.approx(values.sum(), rel=1e-4)
        assert quarters[0] == pytest.approx(values[: sizes[0]].mean(), rel=1e-4)


def test_controls_and_guards_are_recorded(online):
    run = online.directory
    (identity,), (shifted,) = evidence(run, "identity"), evidence(run, "identity_shifted")
    assert identity["verdict"] == "pass" and 0 <= identity["value"] <= identity["threshold"] == 1e-6
    assert shifted["verdict"] == "pass" and shifted["value"] > shifted["threshold"] >= 1e-3
    (brief,) = evidence(run, "brief_effect")
    assert brief["value"] > 1e-6
    # Before the first update the student is its base, so what the brief does on a sample of rows is of the first loss' order; a few
    # positions hold most of either sum.
    assert 0.02 < brief["value"] / report(run)["loss_by_round"][0] < 50
    published = evidence(run, "publish_kl")
    assert [f"version {v}," in g["detail"] for v, g in enumerate(published)] == [True] * (ROUNDS + 1)
    assert all(g["verdict"] == "pass" and 0 <= g["value"] <= g["threshold"] == 1e-6 for g in published)
    (late,) = evidence(run, "publish_late")
    assert late["verdict"] == "pass" and 0 <= late["value"] <= late["threshold"] == 1e-6 and "of 2048" in late["detail"]
    adapters = [g["value"] for g in evidence(run, "adapter_non_zero")]
    assert len(adapters) == ROUNDS and 0 < adapters[0] != adapters[1] > 0
    startup = [json.loads(x) for x in (run / "evidence.jsonl").read_text().splitlines()]
    assert len([x for x in startup if x["gate"].startswith("startup:")]) >= 3
    assert report(run)["gates"] == {"passed": sum(x["verdict"] == "pass" for x in startup), "failed": []}


def test_stages_and_their_seconds(online):
    said, found = report(online.directory)["seconds"], stages(online.directory)
    per_round = ["collect", "score", "train", "publish"]
    assert Counter(s["stage"] for s in found) == Counter(["start", "control", *per_round * ROUNDS, "evaluate"])
    assert all(s["seconds"] > 0 for s in found)
    for name in said:
        assert said[name] == pytest.approx(sum(s["seconds"] for s in found if s["stage"] == name))
    assert sum(said.values()) < online.seconds
    order = sorted((s for s in found if s["stage"] in per_round), key=lambda s: s["started"])
    assert [s["stage"] for s in order] == per_round * ROUNDS
    for before, after in itertools.pairwise(order):
        assert after["started"] >= before["started"] + before["seconds"] - 0.05


def test_the_table_is_printed_at_the_end_and_by_the_command(online):
    command = [sys.executable, "-m", "verl_opsd.cli.main", "report", str(online.directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = report(online.directory)
    features = said["standings"]["train"]["features"]
    for text in (online.output, done.stdout):
        assert f"opd (scale local, contract {said['contract'][:12]})" in text
        assert f"{features['passed']} of {features['total']}  (95%" in text
        for row in ("train episodes", "eval episodes", "train merges", "KL by quarter", "loss by round", "seconds by stage"):
            assert row in text
        assert "  ".join(f"{x:.3e}" for x in said["loss_by_round"]) in text
    assert (
        "Behaviour" in (online.directory / "report.html").read_text()
        and "evidence lie in the run directory only" in online.output
    )
    missing = subprocess.run([*command[:-1], str(online.cwd)], capture_output=True, text=True)
    assert missing.returncode == 2 and "report.json does not exist" in missing.stderr
