"""Standings against the tables that the field experiments published, and against counts by hand."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import PATCH, episode, turn, write_logs

from verl_opsd.cli.main import main
from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation import alone as alone_module
from verl_opsd.evaluation.alone import grade_alone, read_alone, who_did_it
from verl_opsd.evaluation.outcomes import causes
from verl_opsd.evaluation.report import telemetry
from verl_opsd.evaluation.sources import comparisons, load_models, model_standings, split_name
from verl_opsd.evaluation.standings import ModelInfo, outcomes, standing
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.store import EpisodeStore

QUIET = ([turn("", ("ls", "", 0))], [turn("", ("ls", "", 0))])
P = PATCH.format("a.py", 1)


def ep(k, passed=(False, False), merge="clean", patches=(P, P), statuses=("Submitted", "Submitted"), **more):
    more = {"task_id": k} | more
    return episode(f"e{k:03d}", QUIET, passed=passed, merge=merge, patches=patches, statuses=statuses, **more)


def full_set(features, patches, submitted):
    """19 pairs, three of which crash in grading; ``features`` pass in as many pairs, one each; counts of agents of 38."""
    out = []
    for k in range(19):
        mine = [P if 2 * k + i < patches else "" for i in (0, 1)]
        said = ["Submitted" if 2 * k + i < submitted else "LimitsExceeded" for i in (0, 1)]
        e = ep(k, passed=(k < features, False), patches=mine, statuses=said)
        out.append(dataclasses.replace(e, outcome="infra:grader_died", grade=None) if k >= 16 else e)
    return out


@pytest.mark.parametrize(
    "features,patches,submitted,share", [(3, 21, 21, 0.094), (2, 16, 24, 0.063), (1, 32, 31, 0.031), (0, 4, 2, 0.0)]
)
def test_the_published_full_set(features, patches, submitted, share):
    """Base, midtrain, teacher and warm start on 19 pairs: features of 32, pairs of 16, patches and submissions of 38."""
    s = standing("m", full_set(features, patches, submitted), ModelInfo(planned=19))
    assert (s.planned, s.ran, s.scored, s.void) == (19, 19, 16, {"grader_died": 3})
    assert (s.features.passed, s.features.total) == (features, 32) and s.features.value == pytest.approx(share, abs=6e-4)
    assert (s.pairs_any.passed, s.pairs_any.total) == (features, 16) and s.pairs.passed == 0
    assert (s.non_empty.passed, s.non_empty.total) == (patches, 38)
    assert (s.submitted.passed, s.submitted.total) == (submitted, 38)


@pytest.mark.parametrize("passed,conflict,nothing,near,wrong", [(7, 2, 4, 1, 6), (12, 2, 0, 2, 4), (7, 10, 2, 1, 0)])
def test_the_published_causes(passed, conflict, nothing, near, wrong):
    """Why features fail, of 20 each: every cause once a feature, in the table's order of precedence."""
    kinds = ["passed"] * passed + ["merge_conflict"] * conflict + ["submitted_nothing"] * nothing + ["near_miss"] * near
    kinds += ["wrong_code"] * wrong
    rest = kinds[:passed] + kinds[passed + conflict :]
    episodes = [ep(100 + k, merge="conflicts") for k in range(conflict // 2)]
    for k in range(0, len(rest), 2):
        two = rest[k : k + 2]
        tests = tuple({"passed": (3, 0), "near_miss": (5, 2)}.get(c, (5, 3)) for c in two)
        patches = tuple("" if c == "submitted_nothing" else P for c in two)
        episodes.append(ep(k, passed=tuple(c == "passed" for c in two), patches=patches, tests=tests))
    got = standing("m", episodes).causes
    want = {"passed": passed, "merge_conflict": conflict, "submitted_nothing": nothing, "near_miss": near, "wrong_code": wrong}
    assert got == {k: v for k, v in want.items() if v} and sum(got.values()) == 20


def test_causes_take_the_first_that_holds():
    both_empty = ep(1, merge="conflicts", patches=("", ""))
    assert causes(both_empty) == ("merge_conflict", "merge_conflict")
    assert causes(ep(1, patches=("", P), tests=((5, 1), (0, 1)))) == (
        "submitted_nothing",
        "wrong_code",
    )  # nothing passed: no near miss
    assert causes(ep(1, merge="missing_input", passed=(True, False))) == ("passed", "merge_conflict")
    alone = ep(
        1, patches=(P, P), tests=((0, 1), (0, 1))
    )  # an agent that never ran handed in nothing, wherever the other stands
    assert causes(dataclasses.replace(alone, agents=alone.agents[1:])) == ("submitted_nothing", "wrong_code")
    assert causes(dataclasses.replace(alone, agents=alone.agents[::-1])) == ("wrong_code", "wrong_code")


@pytest.mark.parametrize("clean,identical,conflicts", [(7, 1, 1), (4, 0, 6), (9, 0, 1), (2, 7, 1)])
def test_the_published_merges(clean, identical, conflicts):
    merges = ["clean"] * clean + ["identical"] * identical + ["conflicts"] * conflicts
    got = standing("m", [ep(k, merge=m) for k, m in enumerate(merges)]).merges
    assert got == {k: v for k, v in {"clean_both": clean, "identical": identical, "conflicts": conflicts}.items() if v}
    empty = standing("m", [ep(0, patches=(P, "")), ep(1, patches=("", ""))])
    assert empty.merges == {"clean_one_empty": 1, "both_empty": 1}  # the harness calls both clean


def test_episodes_in_which_an_agent_read_an_answer_count_nowhere():
    told = ep(0, passed=(True, True), brief_kinds={"agent1": "answer"})
    s = standing("m", [told, ep(1)])
    assert (s.ran, s.scored, s.void, s.features.total, s.non_empty.total) == (2, 1, {"answer_in_prompt": 1}, 2, 2)
    assert list(outcomes("m", [told, ep(1)]).values) == ["r_task/task1/f1_f2"] and len(s.grid) == 1


QUARTERS = {
    "self": [(0.0490, 0.9462), (0.0397, 0.9434), (0.0317, 0.9526), (0.0342, 0.9478)],
    "round 3": [(0.1002, 0.9017), (0.0838, 0.9125), (0.0813, 0.9196), (0.0724, 0.9192)],
}


@pytest.mark.parametrize("run", QUARTERS)
def test_the_published_quarters(run, tmp_path):
    """Divergence and agreement by quarter, from one value a position over rounds of unequal size."""
    size = 2500
    kl = np.repeat([k for k, _ in QUARTERS[run]], size)
    agree = np.concatenate([np.arange(size) < round(a * size) for _, a in QUARTERS[run]])
    for n, (start, end) in enumerate([(0, 1234), (1234, 7000), (7000, 4 * size)], 1):
        m = end - start
        other = ("anchor", "entropy", "student_logprob", "teacher_logprob", "coverage_student", "coverage_teacher")
        columns = dict.fromkeys(other, np.full(m, np.nan)) | dict.fromkeys(
            ("class", "turn", "turn_position", "position", "step"), np.zeros(m)
        )
        columns |= {"divergence": kl[start:end], "agree": agree[start:end], "coef": np.ones(m), "weight": np.ones(m)}
        np.savez(tmp_path / f"{n:05d}.npz", **{k: v.astype(np.float32) for k, v in columns.items()})
    got = telemetry(tmp_path)
    assert got["kl_by_quarter"] == pytest.approx([k for k, _ in QUARTERS[run]], rel=1e-5)
    assert got["agreement_by_quarter"] == pytest.approx([a for _, a in QUARTERS[run]], abs=2.1e-4)


def test_seconds_steps_tokens_and_cost():
    from types import SimpleNamespace

    turns = tuple(SimpleNamespace(prompt_len=n, response_ids=[0] * 10) for n in (100, 200))
    e = dataclasses.replace(ep(1, t_end=1300.0), turns=turns)
    s = standing("m", [e, ep(2)], ModelInfo(prices=(2.0, 10.0), parameters=9, active_parameters=3))
    assert (s.minutes_per_pair, s.median_steps, s.prompt_tokens_per_pair, s.policy_tokens_per_pair) == (3.5, 1.0, 300.0, 20.0)
    assert s.cost_per_pair == pytest.approx((300 * 2 + 20 * 10) / 1e6) and (s.parameters, s.active_parameters) == (9, 3)
    assert standing("m", [ep(2)], ModelInfo(prices=(2.0, 10.0))).cost_per_pair is None  # no tokens were recorded
    assert standing("m", [ep(2)]).serving == {"manifest": "unverified"}


def test_tokens_of_replies_that_no_history_holds_are_counted():
    """An endpoint's agents: a malformed reply of 7 tokens, 100 read, is in no message; its history tells of 200 and 10 only."""
    one = dataclasses.replace(ep(1).agents[0], prompt_tokens=300, completion_tokens=17)
    two = dataclasses.replace(ep(1).agents[1], prompt_tokens=40, completion_tokens=3)
    said = [{"role": "assistant", "extra": {"response": {"usage": {"prompt_tokens": 200, "completion_tokens": 10}}}}]
    e = dataclasses.replace(ep(1), agents=(one, two), messages={"agent1": said, "agent2": []})
    s = standing("m", [e], ModelInfo(prices=(2.0, 10.0)))
    assert (s.prompt_tokens_per_pair, s.policy_tokens_per_pair) == (340.0, 20.0)
    assert s.cost_per_pair == pytest.approx((340 * 2 + 20 * 10) / 1e6)
    # logs of others: nobody counted
    s = standing("m", [dataclasses.replace(e, agents=ep(1).agents)])
    assert (s.prompt_tokens_per_pair, s.policy_tokens_per_pair) == (200.0, 10.0)


def test_the_grid_has_one_cell_a_pair_with_all_its_seeds():
    again = dataclasses.replace(ep(1, passed=(True, True)), episode_id="again")
    void = dataclasses.replace(ep(1), episode_id="void", outcome="infra:x", grade=None)
    one, two = standing("m", [ep(1, merge="conflicts"), again, void, ep(2, passed=(True, False))]).grid
    assert (one.pair, one.features, one.of, one.merges, one.void) == (
        "r_task/task1/f1_f2",
        2,
        4,
        {"clean_both": 1, "conflicts": 1},
        1,
    )
    assert one.episodes == ("again", "e001", "void") and (two.features, two.of) == (1, 2)


def test_nothing_scored_has_no_rate():
    s = standing("m", [dataclasses.replace(ep(1), outcome="infra:x", grade=None, agents=())])
    assert (s.features.value, s.features.low, s.minutes_per_pair, s.median_patch_bytes) == (None, None, None, None)


def test_an_episode_twice_and_mixed_contracts_are_refused():
    for wrong in ([ep(1), ep(1)], [ep(1), ep(2, contract_hash="other")]):
        with pytest.raises(OpsdError, match="counts each episode of one contract once"):
            standing("m", wrong)


# ---- who did the work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "agent1,agent2,work",
    [
        ((True, True), (True, True), "handoff"),  # one published, the other copied
        ((True, False), (True, True), "handoff"),  # agent2 built on agent1's half
        ((True, True), (False, False), "one_did_both"),
        ((False, False), (True, True), "one_did_both"),
        ((True, False), (False, True), "split"),
        ((True, False), (False, False), "partial"),
        ((False, True), (True, False), "partial"),  # each did the other's
        ((True, True), (True, False), "partial"),  # agent2 did agent1's feature, nobody its own alone
        ((False, False), (False, False), "none"),
    ],
)
def test_who_did_the_work(agent1, agent2, work):
    alone = {"agent1": dict(zip((1, 2), agent1, strict=True)), "agent2": dict(zip((1, 2), agent2, strict=True))}
    assert who_did_it(ep(1), alone) == work and who_did_it(ep(1), None) == "ungraded"


def test_patches_are_graded_alone_once_and_faults_stay_ungraded(tmp_path, monkeypatch):
    calls = []

    def fake(e, *settings):
        calls.append(e.episode_id)
        if e.task_id == 2:
            from verl_opsd.cooperbench.faults import grading_fault

            raise grading_fault("grader_died", "test")
        return {"agent1": {"1": True, "2": True}, "agent2": {"1": False, "2": False}}

    monkeypatch.setattr(alone_module, "_grade", fake)
    void = dataclasses.replace(ep(3), outcome="infra:x", grade=None)
    settings = {"backend": "process", "allow_unsafe": True, "timeout_s": 1.0, "workers": 2}
    faults = grade_alone(RunDir(tmp_path), [ep(1), ep(2), void], tmp_path, **settings)
    assert faults == {"e002": "grader_died"} and sorted(calls) == ["e001", "e002"]
    assert grade_alone(RunDir(tmp_path), [ep(1)], tmp_path, **settings) == {} and len(calls) == 2
    assert read_alone(tmp_path, "e001") == {"agent1": {1: True, 2: True}, "agent2": {1: False, 2: False}}
    assert read_alone(tmp_path, "e002") is None


# ---- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    contract = EvalContract(sandbox="process")
    for name, wins in (("base", 2), ("again", 3), ("student", 12)):
        store = EpisodeStore(tmp_path / name / "episodes")
        for k in range(12):
            store.write(ep(k, passed=(k < wins, k < wins), contract_hash=contract.hash))
        write_json(tmp_path / name / "contract.json", contract.as_dict())
    write_json(tmp_path / "base" / "evaluation.json", {"planned": ["x"] * 13, "parameters": 7, "serving": {"node": "n1"}})
    write_json(
        tmp_path / "base" / "alone" / "e000.json", {"agent1": {"1": True, "2": False}, "agent2": {"1": False, "2": True}}
    )
    return tmp_path


def test_the_command_prints_tables_grid_and_comparisons(runs, capsys):
    names = [str(runs / n) for n in ("base", "again", "student")]
    out = runs / "s.json"
    assert main(["standings", *names, "--baseline", "base", "--reruns", "again", "--grid", "--json", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "13, 12, 12",
        "12/12 100%",
        "student is better than base: pairs 100% against 17% on 12 common pairs",
        "2 runs of the same weights",
    ):
        assert part in text, part
    values = json.loads(out.read_text())
    assert [s["model"] for s in values["standings"]] == ["base", "again", "student"]
    assert values["standings"][0]["work"] == {"split": 1, "ungraded": 11} and values["standings"][0]["parameters"] == 7
    assert [(c["metric"], c["verdict"]) for c in values["comparisons"]] == [("pairs", "better"), ("features", "better")]


def test_logs_of_the_harness_stand_beside_runs_unverified(runs, capsys):
    write_logs(runs / "logs", "theirs", ep(1))
    models = load_models([f"theirs={runs / 'logs'}", str(runs / "base")])
    theirs, base = model_standings([f"theirs={runs / 'logs'}", str(runs / "base")], models)
    assert (theirs.contract, theirs.serving) == ("", {"manifest": "unverified"}) and base.planned == 13


def test_two_runs_of_one_model_are_added(runs):
    store = EpisodeStore(runs / "more" / "episodes")
    store.write(dataclasses.replace(ep(1), episode_id="more", contract_hash=EvalContract(sandbox="process").hash))
    specs = [f"m={runs / 'base'}", f"m={runs / 'more'}"]
    (row,) = model_standings(specs, load_models(specs))
    assert (row.ran, row.planned) == (13, None)  # one of the two has no plan on record


def test_a_folder_s_own_name_may_hold_an_equals_sign(tmp_path):
    (tmp_path / "lr=1").mkdir()
    assert split_name(str(tmp_path / "lr=1")) == ("lr=1", tmp_path / "lr=1")
    assert split_name(f"m={tmp_path / 'lr=1'}") == ("m", tmp_path / "lr=1")
    assert split_name("m=gone") == ("m", Path("gone")) and split_name("gone") == ("gone", Path("gone"))


def test_runs_of_different_contracts_are_not_compared(runs, capsys):
    write_json(runs / "student" / "contract.json", EvalContract(sandbox="process", step_limit=500).as_dict())
    arguments = ["standings", str(runs / "base"), str(runs / "student"), "--baseline", "base"]
    assert main(arguments) == 2 and "step_limit" in capsys.readouterr().err
    assert main([*arguments, "--varies", "step_limit"]) == 0


@pytest.mark.parametrize(
    "extra",
    [
        ["--reruns", "x"],
        ["--baseline", "x"],
        ["--baseline", "base", "--reruns", "again,student"],
        ["--baseline", "base", "--reruns", "base"],
        ["--baseline", "base", "--reruns", "again,again"],
    ],
)
def test_names_that_are_no_models_are_refused(runs, extra, capsys):
    assert main(["standings", *(str(runs / n) for n in ("base", "again", "student")), *extra]) == 2
    assert "rule:" in capsys.readouterr().err


def test_a_run_is_not_compared_with_itself(runs, capsys):
    """Under another name either: its noise floor would be 0."""
    specs = [f"{n}={runs / 'base'}" for n in ("a", "b")]
    assert main(["standings", *specs, str(runs / "student"), "--baseline", "a", "--reruns", "b"]) == 2
    assert "named twice" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--json", "."], ["--json", "base/contract.json/x"]])
def test_files_that_cannot_be_written_and_models_without_a_name_are_refused(runs, arguments, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["standings", "base", *arguments]) == 2 and "name another path" in capsys.readouterr().err
    assert main(["standings", "=base"]) == 2 and "a model has a name" in capsys.readouterr().err


def test_comparisons_leave_out_pairs_that_one_side_lacks():
    base = [ep(k) for k in range(6)]
    void = [dataclasses.replace(e, outcome="infra:x", grade=None) for e in base[:2]]
    (pairs, _) = comparisons({"base": base, "m": [*void, *base[2:]]}, "base", [], {})
    assert (pairs.common, pairs.dropped) == (4, 2)


def test_seeds_of_a_pair_are_values_of_one_pair():
    again = dataclasses.replace(ep(1, passed=(True, True)), episode_id="again")
    assert outcomes("m", [ep(1, passed=(True, False)), again]).values == {"r_task/task1/f1_f2": (1.0, 0.0)}
    assert outcomes("m", [ep(1, passed=(True, False)), again], "features").values == {"r_task/task1/f1_f2": (1.0, 0.5)}
    with pytest.raises(OpsdError, match="pairs or features"):
        outcomes("m", [], "vibes")
