"""The report's numbers against counts and intervals worked by hand."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_opsd.config import GateConfig, LossConfig, ThresholdConfig
from verl_opsd.distill.weights import SurprisalGate
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.report import ledger, standing_rows, telemetry
from verl_opsd.evaluation.standings import standing
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade
from verl_opsd.verl_adapter.guards import kl_rows


def episode(
    name: str, passed: tuple[bool, bool], merge: str = "clean", patches=("a", "b"), outcome: str = "scored", briefs=None
) -> Episode:
    status = {f"agent{i + 1}": "applied" if p else "skipped" for i, p in enumerate(patches)}
    features = tuple(FeatureGrade(i + 1, ok, 3 if ok else 1, 0 if ok else 2, 0 if ok else 1) for i, ok in enumerate(passed))
    agents = tuple(AgentOutcome(f"agent{i + 1}", i + 1, "Submitted", 3, p, i, True) for i, p in enumerate(patches))
    grade = Grade(merge, "naive", status, features) if outcome == "scored" else None
    return Episode(name, "repo", 1, (1, 2), "train", "c", outcome, (), agents, grade, briefs or {}, 0)


def rows(*episodes: Episode) -> dict[str, str]:
    return dict(standing_rows(dataclasses.asdict(standing("m", episodes))))


def test_the_table_counts_scored_episodes_only():
    got = rows(
        episode("a", (True, True)),
        episode("b", (True, False), patches=("a", "")),
        episode("c", (False, False), merge="conflicts"),
        episode("d", (False, False), outcome="infra:engine_died"),
    )
    assert got["episodes"] == "3 scored of 4, void: 1 engine died"
    assert got["merges"] == "1 clean both, 1 clean one empty, 1 conflicts"
    assert got["features passed"].startswith("3 of 6 ") and got["pairs passed"].startswith("1 of 3 ")
    assert got["agents"] == "8 Submitted" and not {"stamp", "features passed, strictly"} & set(got)


def test_an_answer_in_an_agents_own_prompt_counts_nowhere():
    plain, told = episode("a", (True, False)), episode("b", (True, True), briefs={"agent1": "none", "agent2": "answer"})
    guided = episode("c", (False, False), briefs={"agent1": "guidance", "agent2": "scope"})
    got = rows(plain, told, guided)
    assert got["episodes"] == "2 scored of 3, void: 1 answer in prompt" and got["features passed"].startswith("1 of 4 ")


def test_the_strict_grade_stands_beside_the_harness_own():
    features = (
        FeatureGrade(1, True, 3, 0, 0, "", False, "a free point"),
        FeatureGrade(2, False, 0, 0, None, "", True, "agent2 did both"),
    )
    graded = dataclasses.replace(episode("a", (True, True)), grade=Grade("clean", "naive", {"agent1": "applied"}, features))
    got = rows(graded, episode("b", (True, True)))
    assert got["features passed"].startswith("3 of 4 ") and got["features passed, strictly"].startswith("3 of 4 ")
    assert got["where the grades differ"].splitlines() == [
        "a: feature 1 passes for the harness and fails strictly: a free point",
        "a: feature 2 fails for the harness and passes strictly: agent2 did both",
    ]
    assert graded.grade.reward == 0.5
    many = [dataclasses.replace(graded, episode_id=f"e{k}") for k in range(4)]
    assert rows(*many)["where the grades differ"].splitlines()[-1] == "and 3 more, in report.json"


def test_nothing_scored_has_no_interval():
    got = rows(episode("d", (False, False), outcome="infra:engine_died"))
    assert (got["features passed"], got["merges"]) == ("none scored", "none scored")


def test_quarters_follow_training_order_over_rounds(tmp_path):
    for n, values in ((1, [4.0, 4.0, 2.0, 2.0]), (2, [1.0, 1.0, 0.0, 0.0])):
        save(tmp_path, n, divergence=values, agree=[1, 0, 1, 1])
    got = telemetry(tmp_path)
    assert got["kl_by_quarter"] == [4.0, 2.0, 1.0, 0.0]
    assert got["agreement_by_quarter"] == [0.5, 1.0, 0.5, 1.0]
    assert got["kl_by_round"] == [3.0, 0.5]
    assert (got["kl_mean"], got["kl_max_over_mean"], got["loss_positions"]) == (1.75, pytest.approx(4 / 1.75), 8)
    assert got["window"] == {"rounds": [1, 2], "positions": 8}
    thirds = got["summary"]["by"]["third"]
    assert [thirds[k]["positions"] for k in "012"] == [3, 3, 2] and thirds["0"]["divergence"]["mean"] == pytest.approx(10 / 3)
    assert "drift_by_quarter" not in got


def save(folder, number, **columns):
    """One round's file; what is not given is a default that says nothing."""
    n = len(columns["divergence"])
    unknown = ("anchor", "entropy", "weight", "student_logprob", "teacher_logprob", "coverage_student", "coverage_teacher")
    default = dict.fromkeys(unknown, [np.nan] * n) | dict.fromkeys(
        ("class", "turn", "turn_position", "position", "step"), [0] * n
    )
    columns = {"coef": [1 / n] * n, "agree": [1] * n} | default | columns
    carried = columns.pop("carried", None)
    columns = {k: np.array(v, np.float32) for k, v in columns.items()}
    carried = int((columns["coef"] != 0).sum()) if carried is None else carried
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{number:05d}.npz", carried=np.int64(carried), **columns)


def test_quarters_do_not_depend_on_how_ranks_and_micro_batches_hold_the_rows(tmp_path):
    """Two steps of rows 0 and 1 with two positions each: a quarter is one row of one step, in whatever order the values arrive."""
    columns = {
        "divergence": [1.0, 3.0, 5.0, 7.0, 2.0, 4.0, 6.0, 8.0],
        "anchor": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5],
        "step": [4, 4, 4, 4, 5, 5, 5, 5],
        "row": [0, 0, 1, 1] * 2,
        "position": [7, 9, 3, 5] * 2,
    }
    found = []
    for i, order in enumerate(([0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 0, 1, 6, 7, 4, 5], [6, 4, 5, 7, 1, 0, 3, 2])):
        save(tmp_path / str(i), 1, **{k: np.array(v)[order] for k, v in columns.items()})
        found.append(telemetry(tmp_path / str(i), epochs=2))
    assert found[0]["kl_by_quarter"] == [2.0, 6.0, 3.0, 7.0] and found[0]["drift_by_quarter"] == [1.0, 3.0, 5.0, 7.0]
    assert [found[0]["summary"]["by"]["third"][k]["divergence"]["max"] for k in "012"] == [5.0, 7.0, 8.0]
    assert found[0] == found[1] == found[2]


def test_epochs_are_blocks_of_a_rounds_steps(tmp_path):
    """Two epochs of steps 4 and 5, then 6 and 7; the next round's are 8 to 11."""
    for n, first in ((1, 4), (2, 8)):
        save(tmp_path, n, divergence=[1.0, 2.0, 3.0, 4.0], step=[first, first + 1, first + 2, first + 3])
    by = telemetry(tmp_path, epochs=2)["summary"]["by"]["epoch"]
    assert {k: (c["positions"], c["divergence"]["mean"]) for k, c in by.items()} == {"0": (4, 1.5), "1": (4, 3.5)}


def test_infinite_values_are_counted_and_named_and_the_rest_stands(tmp_path):
    save(tmp_path, 1, divergence=[1.0, 3.0], agree=[1, 0])
    save(tmp_path, 2, divergence=[np.inf, 5.0, np.nan], anchor=[0.5, -np.inf, np.inf], agree=[1, 1, 0])
    got = telemetry(tmp_path)
    assert sorted(got["infinite"]) == ["1 of 3 values of divergence in round 2", "2 of 3 values of anchor in round 2"]
    assert (got["kl_mean"], got["loss_positions"], got["summary"]["all"]["agree"]) == (3.0, 5, 0.6)
    assert got["kl_by_round"] == [2.0, 5.0] and got["summary"]["all"]["drift"]["mean"] == 0.5
    save(tmp_path, 2, divergence=[np.inf] * 2)
    assert telemetry(tmp_path)["kl_by_round"] == [2.0, None]


def test_groups_of_a_round_by_hand(tmp_path):
    """Two epochs of one position used, one masked by its coefficient, one by a threshold; the second and fourth step."""
    save(
        tmp_path,
        3,
        divergence=[1.0, 9.0, 9.0, 3.0, 9.0, 9.0],
        coef=[0.5, 0, 0.5] * 2,
        weight=[1, 1, 0] * 2,
        anchor=[0.1, 0.2, 0.3] * 2,
        step=[6, 6, 6, 7, 7, 7],
        position=[99, 300, 600] * 2,
        turn=[0, 3, 8] * 2,
        turn_position=[0, 5, 70] * 2,
        **{"class": [2, 0, 1] * 2},
    )
    got = telemetry(tmp_path, epochs=2)
    by = got["summary"]["by"]
    assert (got["loss_positions"], got["window"]["positions"], got["kl_mean"]) == (2, 6, 2.0)
    assert [by["epoch"][k]["divergence"]["mean"] for k in "01"] == [1.0, 3.0]
    assert list(by["class"]) == ["think", "message", "command"] and by["class"]["think"]["loss_positions"] == 0
    assert list(by["turn"]) == ["0", "2", "8"] and list(by["turn_position"]) == ["0", "4", "64"]
    assert list(by["depth"]) == ["0", "256", "512"]
    drift = got["summary"]["all"]["drift"]
    assert (drift["mean"], drift["inside"], drift["outside"]) == pytest.approx((0.2, 0.1, 0.25), rel=1e-6)


def turns(*kinds_and_lengths, agent="agent1", branch=0):
    return tuple(
        SimpleNamespace(kind=k, response_ids=[0] * n, agent_id=agent, branch=branch, turn=i)
        for i, (k, n) in enumerate(kinds_and_lengths)
    )


def scored(name, *of):
    return SimpleNamespace(episode_id=name, scored=True, outcome="scored", turns=sum(of, ()))


def test_ledger_counts_each_state_and_token_once(tmp_path):
    """Two epochs over policy, malformed and policy replies of 2, 3 and 1 tokens; the malformed one carries no loss."""
    save(
        tmp_path / "telemetry",
        1,
        divergence=[1.0] * 12,
        coef=[1, 1, 0, 0, 0, 0] * 2,
        weight=[1, 0, 1, 1, 1, 1] * 2,
        step=[0] * 6 + [1] * 6,
        carried=2,
    )
    good = scored("e", turns(("policy", 2), ("malformed", 3), ("policy", 1)))
    fault = SimpleNamespace(episode_id="f", scored=False, outcome="infra:engine_died", turns=turns(("policy", 5)))
    loss = LossConfig(turn_kinds=("policy",), epochs=2, threshold=ThresholdConfig(0.05))
    found = ledger([good, fault], RunDir(tmp_path), loss)
    assert (found.states, found.usable, found.reply_tokens, found.loss_positions) == (4, 2, 6, 1)
    assert found.dropped == {"kind malformed": 1, "infra:engine_died": 1}
    assert found.left_out == {"kind malformed": 3, "weight 0": 1, "below the threshold": 1} and found.by_class == {"think": 1}
    longer = scored("g", turns(("policy", 2)))
    with pytest.raises(OpsdError, match="reply tokens"):  # tokens that were sampled and are nowhere
        ledger([good, longer], RunDir(tmp_path), LossConfig(turn_kinds=("policy",), epochs=2))
    with pytest.raises(OpsdError, match="ledger"):  # fewer positions masked than turns left out
        ledger([good], RunDir(tmp_path), LossConfig(turn_kinds=("malformed",), turns=((1, 1),), epochs=2))


def test_ledger_of_branches_that_became_no_row(tmp_path):
    """agent1's second branch was too long for the teacher, agent2 had no brief; a summary is context; turns 0 and 1 alone train."""
    run = RunDir(tmp_path)
    save(tmp_path / "telemetry", 1, divergence=[1.0] * 6, coef=[1, 1, 1, 1, 1, 0])
    e = scored(
        "e",
        turns(("policy", 2), ("policy", 3), ("policy", 1), ("summarizer", 7)),
        turns(("policy", 9), branch=1),
        turns(("policy", 8), ("malformed", 4), agent="agent2"),
    )
    run.write_left_out("e", {"agent1/1": "view too long", "agent2/0": "no brief"})
    found = ledger([e], run, LossConfig(turns=((0, 2),)))
    assert (found.states, found.usable, found.reply_tokens, found.loss_positions) == (7, 2, 6, 5)
    assert found.dropped == {"view too long": 1, "no brief": 2, "kind summarizer": 1, "outside turns": 1}
    assert found.left_out == {"outside turns": 1}
    run.write_left_out("e", {})  # another attempt at the same episode left nothing out
    with pytest.raises(OpsdError, match="reply tokens"):
        ledger([e], run, LossConfig(turns=((0, 2),)))


def test_ledger_tells_a_threshold_at_collection_from_a_weight_of_0(tmp_path):
    """Of 5 positions 4 carried weight before the threshold took 3 of them out."""
    save(tmp_path / "telemetry", 1, divergence=[1.0] * 5, coef=[0, 0, 0.25, 0, 0], carried=4)
    loss = LossConfig(threshold=ThresholdConfig(0.05, "collection"))
    found = ledger([scored("e", turns(("policy", 5)))], RunDir(tmp_path), loss)
    assert found.left_out == {"weight 0": 1, "below the threshold": 3} and found.loss_positions == 1


def test_ledger_names_a_gate_that_is_shut(tmp_path):
    """sigmoid(10 (log p + 4)) is 0 in float32 where log p is -15; there is no threshold that a position could be below."""
    gate = GateConfig(10.0, -4.0)
    shut = SurprisalGate(gate.kappa, gate.gamma).of(torch.tensor([-1.0, -15.0]))
    assert shut[0] > 0.99 and shut[1] == 0
    save(tmp_path / "telemetry", 1, divergence=[1.0] * 2, coef=[0.5, 0.5], weight=shut.tolist(), carried=2)
    found = ledger([scored("e", turns(("policy", 2)))], RunDir(tmp_path), LossConfig(gate=gate))
    assert found.left_out == {"shut by the gate": 1} and found.loss_positions == 1


def test_publish_divergence_is_the_definition():
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.5, 0.25, 0.25]])
    want = (p * np.log(p / q)).sum()
    assert kl_rows(np.log(p).astype(np.float32), np.log(q).astype(np.float32)) == pytest.approx(want, rel=1e-6)
    assert kl_rows(np.log(p), np.log(p)) == 0
