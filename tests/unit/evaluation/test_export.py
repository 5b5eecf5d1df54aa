"""Episodes as the harness' log tree and back, and an episode read like a conversation."""

import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from synthetic import PATCH, episode, turn, write_logs

from verl_opsd.cli.episodes import _not_shown
from verl_opsd.cli.main import parser
from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.log_tree import read_log_tree
from verl_opsd.evaluation.export import import_log_tree, write_log_tree
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.store import EpisodeStore

SEND = "send_message agent2 <<'MSG'\nI take a.py\nMSG"
ANSWER = "send_message agent1 'ok, b.py'"


def talk(name="e0", **more):
    """agent2 writes first (t=1000, its second command), agent1 at t=1001; a quoted call in agent1's text is no message."""
    one = [
        turn("I could run send_message agent2 'a phantom' here.", ("ls", "a.py b.py\n", 0)),
        turn("", (SEND, "Message sent to agent2", 0)),
        turn("", ("git push", "opened PR for agent1\n", 0), inbox=[("agent2", "ok, b.py")]),
    ]
    two = [turn("hello", (ANSWER, "Message sent to agent1", 0)), turn("", ("pytest", "1 failed" + "x" * 900, 1))]
    one, two = ([*turns, turn("", ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "", 0))] for turns in (one, two))
    graded = {"patches": (PATCH.format("a.py", 1), PATCH.format("b.py", 2)), "passed": (True, False)}
    return episode(name, (one, two), **graded | more)


def opsd(*words):
    args = parser().parse_args(["episodes", *map(str, words)])
    console = Console(file=io.StringIO(), width=200)
    return args.func(args, console), console.file.getvalue()


def stored(folder, *episodes):
    contract = EvalContract()
    run = RunDir(folder)
    write_json(run.path / "contract.json", contract.as_dict())
    store = EpisodeStore(run.episodes, contract)
    for e in episodes:
        store.write(dataclasses.replace(e, contract_hash=contract.hash))
    return run.path


def test_what_is_exported_is_read_back(tmp_path):
    first, second = talk(), talk("e1", task_id=0, passed=(False, False))
    write_log_tree([first, second], tmp_path, "run", EvalContract(step_limit=7))
    back = {e.task_id: e for e in read_log_tree(tmp_path)}
    for e in (first, second):
        got = back[e.task_id]
        sent = [a.sent_messages for a in got.agents]
        assert sent == [1, 1] and got.messages == e.messages
        assert [dataclasses.replace(a, sent_messages=0) for a in got.agents] == list(e.agents)
        assert [dataclasses.replace(f, output="") for f in got.grade.features] == list(e.grade.features)
        assert (got.grade.merge, got.grade.apply_status, got.t_start, got.t_end) == (
            e.grade.merge,
            e.grade.apply_status,
            e.t_start,
            e.t_end,
        )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["contract"]["step_limit"] == 7 and config["contract_hash"] == "c"


def test_an_answer_in_a_prompt_and_the_stamp_of_a_near_tree_come_back(tmp_path):
    told = dataclasses.replace(
        talk(), brief_kinds={"agent1": "answer", "agent2": "none"}, near_benchmark="not a CooperBench score"
    )
    write_log_tree([told], tmp_path, "run", EvalContract())
    (back,) = read_log_tree(tmp_path)
    assert back.brief_kinds == told.brief_kinds and back.near_benchmark == told.near_benchmark
    assert talk().in_standings and not back.in_standings


def test_messages_are_in_order_of_time_and_no_quotation_is_one(tmp_path):
    (folder,), _ = write_log_tree([talk()], tmp_path, "run", None)
    sent = json.loads((folder / "conversation.json").read_text())
    assert [(m["from"], m["message"], m["timestamp"], m["feature_id"]) for m in sent] == [
        ("agent2", "ok, b.py", 1000.0, 2),
        ("agent1", "I take a.py", 1001.0, 1),
    ]


def test_the_harness_finds_the_exported_pairs_and_their_patches(tmp_path):
    from verl_opsd.cooperbench.identity import load_harness

    load_harness()
    from cooperbench.eval.runs import discover_runs

    episodes = [talk(), talk("e1", task_id=0), talk("e2")]
    write_log_tree(episodes, tmp_path, "run", None, grades=False)
    found = discover_runs("run", logs_dir=tmp_path)
    assert [(r["repo"], r["task_id"], r["features"], r["setting"]) for r in found] == [
        ("r_task", 0, [1, 2], "coop"),
        ("r_task", 1, [1, 2], "coop"),
    ]
    assert [len(discover_runs(name, logs_dir=tmp_path)) for name in ("run", "run-2", "run-3")] == [2, 1, 0]
    for name in ("agent1.patch", "agent2.patch"):
        (text,) = {(tmp_path / "run" / "coop" / "r_task" / t / "f1_f2" / name).read_text() for t in ("0", "1")}
        assert text == episodes[0].agents[int(name[5]) - 1].patch
    assert not list(tmp_path.rglob("eval.json"))


def test_faults_are_left_out_and_said(tmp_path):
    fault = talk("e1", agents=(), messages={}, grade=None, outcome="infra:engine_died")
    run = stored(tmp_path / "run", talk(), fault)
    code, text = opsd("export", run, tmp_path / "logs")
    assert code == 0 and "1 episodes in" in text and "left out: 1 that ended as infra:engine_died" in text
    with pytest.raises(OpsdError, match="never overwritten"):
        opsd("export", run, tmp_path / "logs")
    assert opsd("export", run, tmp_path / "other", "--split", "train")[0] == 1
    with pytest.raises(OpsdError, match="end with _task"):
        write_log_tree([talk(repo="mine")], tmp_path, "x", None)


def test_old_logs_are_episodes_of_a_legacy_contract(tmp_path):
    logs = tmp_path / "logs"
    write_logs(logs, "old", talk())
    write_logs(logs, "old", talk("e1", task_id=0))
    write_json(logs / "old" / "config.json", {"model": "m"})
    code, text = opsd("import", logs / "old", tmp_path / "run")
    assert code == 0 and "2 episodes of a legacy contract" in text
    store = EpisodeStore(tmp_path / "run" / "episodes")
    episodes = list(store.episodes())
    assert store.contract_hash.startswith("legacy:") and {e.contract_hash for e in episodes} == {store.contract_hash}
    assert sorted(e.task_id for e in episodes) == [0, 1] and all(e.turns == () and e.scored for e in episodes)
    with pytest.raises(OpsdError, match="contracts are never mixed"):
        store.write(talk("new"))
    write_json(logs / "older" / "config.json", {"model": "n"})
    with pytest.raises(OpsdError, match="logs of 2 runs"):
        import_log_tree(logs, tmp_path / "both")
    with pytest.raises(OpsdError, match="no result"):
        import_log_tree(logs / "older", tmp_path / "none")


def test_an_episode_reads_like_a_conversation(tmp_path):
    run = stored(tmp_path / "run", talk(near_benchmark="base is the release X: not a CooperBench score"))
    code, text = opsd("list", run)
    assert code == 0 and "r_task/task1/f1_f2" in text and "1:pass 2:fail" in text
    code, text = opsd("show", run, "e0")
    assert code == 0 and "not a CooperBench score" in text
    lines = text.splitlines()
    at = {
        word: next(n for n, line in enumerate(lines) if word in line) for word in ("hello", "phantom", "[to agent2, delivered]")
    }
    assert at["[to agent2, delivered]"] > max(at["hello"], at["phantom"])  # by time: 1000, 1000, 1001
    assert lines[at["hello"]].index("hello") > lines[at["phantom"]].index("phantom")  # agent2 in the right column
    flat = " ".join(text.replace("│", " ").split())  # without the table's lines and line breaks
    assert "[from agent2] ok, b.py" in flat and "308 characters more" in flat and "(exit 1)" in flat
    assert "characters more" not in opsd("show", run, "e0", "--full")[1]
    with pytest.raises(OpsdError, match=f"e9(?s:.*)opsd episodes list {run}"):
        opsd("show", run, "e9")
    with pytest.raises(OpsdError, match="holds no episodes"):
        opsd("list", tmp_path)


def captured(e, calls):
    """The episode with the harness' own capture in agent1's calls: (prompt, output) each, None for none."""
    replies = [m for m in e.messages["agent1"] if m["role"] == "assistant"]
    for m, call in zip(replies, calls, strict=True):
        if call:
            m["extra"]["token_capture"] = {"prompt_token_ids": call[0], "output_token_ids": call[1]}
    return e


GROWING = [
    ([1, 2, 3], [10, 11]),
    ([1, 2, 3, 10, 11, 4], [12]),
    ([1, 2, 3, 10, 11, 4, 12, 5, 6], [13, 14]),
    ([*range(1, 4)], [9]),
]
WHOLE = [*GROWING[:3], ([1, 2, 3, 10, 11, 4, 12, 5, 6, 13, 14, 7], [9])]


def test_ids_that_the_harness_captured_are_imported(tmp_path):
    write_logs(tmp_path / "logs", "old", captured(talk(), WHOLE))
    assert opsd("import", tmp_path / "logs", tmp_path / "run")[0] == 0
    store = EpisodeStore(RunDir(tmp_path / "run").episodes)
    (e,) = store.episodes()
    assert [(t.agent_id, t.turn, t.start, t.new_ids.tolist(), t.response_ids.tolist()) for t in e.turns] == [
        ("agent1", 0, 0, [1, 2, 3], [10, 11]),
        ("agent1", 1, 5, [4], [12]),
        ("agent1", 2, 7, [5, 6], [13, 14]),
        ("agent1", 3, 11, [7], [9]),
    ]
    assert all(np.isnan(t.response_logprobs).all() and t.contract_hash == store.contract_hash for t in e.turns)
    (row,) = build_trajectories(e.turns)
    assert row.input_ids.tolist() == [1, 2, 3, 10, 11, 4, 12, 5, 6, 13, 14, 7, 9]
    assert row.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    assert opsd("import", tmp_path / "logs", tmp_path / "bare", "--without-ids")[0] == 0
    assert [x.turns for x in EpisodeStore(RunDir(tmp_path / "bare").episodes).episodes()] == [()]


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        (GROWING, "call 3 .*of the 11 tokens before it, its prompt of 3 repeats 3; the history was cut 0 times"),
        ([*WHOLE[:2], ([1, 2, 3, 10, 99, 4, 12, 5], [1]), WHOLE[3]], "call 2 .*of the 7 tokens before it, .* repeats 4"),
        ([*WHOLE[:3], None], "call 3 .*no token ids, others have"),
        ([*WHOLE[:3], (WHOLE[3][0], [])], r"call 3 .*output: \[\] is no list"),
        ([([1, -2], [1]), *WHOLE[1:]], "call 0 .*prompt: .* is no list"),
        ([([1, 2.5], [1]), *WHOLE[1:]], "call 0 .*prompt: .* is no list"),
        ([("12", [1]), *WHOLE[1:]], "call 0 .*prompt: 12 is no list"),
    ],
)
def test_ids_that_do_not_fit_each_other_are_refused(tmp_path, calls, what):
    write_logs(tmp_path / "logs", "old", captured(talk(), calls))
    with pytest.raises(OpsdError, match=what) as caught:
        opsd("import", tmp_path / "logs", tmp_path / "run")
    assert "--without-ids" in str(caught.value) and EpisodeStore(RunDir(tmp_path / "run").episodes).ids() == []
    assert len(list(read_log_tree(tmp_path / "logs"))) == 1  # what is measured on logs needs no ids


def test_a_cut_history_begins_a_branch(tmp_path):
    e = captured(talk(), GROWING)
    folder = write_logs(tmp_path / "logs", "old", e)
    m = e.messages["agent1"]
    last = max(i for i, x in enumerate(m) if x["role"] == "assistant")
    segments = [m[:last], [*m[:2], {"role": "user", "content": "so far", "extra": {"summary": True}}, *m[last:]]]
    whole = {"segments": [{"kind": "solver", "messages": s} for s in segments]}
    (folder / "agent1_full_traj.json").write_text(json.dumps(whole))
    (e,) = read_log_tree(tmp_path / "logs", token_ids=True)
    assert [(t.branch, t.parent_branch, t.fork_position, t.fork_reason) for t in e.turns[2:]] == [
        (0, -1, 0, "start"),
        (1, 0, 3, "compaction"),
    ]
    assert [r.input_ids.tolist() for r in build_trajectories(e.turns)] == [GROWING[2][0] + [13, 14], [1, 2, 3, 9]]


def test_refused_replies_are_told_beside_the_conversation():
    said = [
        ("agent2", "malformed"),
        ("agent1", "policy"),
        ("agent1", "malformed"),
        ("agent1", "malformed"),
        ("agent1", "summarizer"),
    ]
    (line,) = _not_shown([SimpleNamespace(agent_id=agent, kind=kind) for agent, kind in said])
    assert line.endswith(": 2 of kind malformed by agent1, 1 of kind summarizer by agent1, 1 of kind malformed by agent2")
    assert _not_shown([SimpleNamespace(agent_id="agent1", kind="policy")]) == []
