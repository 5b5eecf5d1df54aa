"""What a corpus takes, leaves out, and says of itself."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from chat_tokenizer import chat_tokenizer
from recorded import CONTRACT, TOOLS, call, episode, rendering, run_dir

from verl_opsd.cooperbench.dataset import load_subset
from verl_opsd.corpus.build import build, held_out
from verl_opsd.corpus.card import composition, spread, spread_lines
from verl_opsd.corpus.contamination import contamination_of, evaluated
from verl_opsd.corpus.duplicates import near_duplicates
from verl_opsd.corpus.gates import check
from verl_opsd.corpus.records import read_manifest, read_rows
from verl_opsd.corpus.select import Spec, open_sources, select
from verl_opsd.errors import OpsdError
from verl_opsd.evidence.invalidation import invalidate
from verl_opsd.privilege import process
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens import EpisodeStore
from verl_opsd.verl_adapter.rendering import hints_of_run


def taken(runs, target, **spec):
    return select(open_sources(runs), Spec(**spec), rendering(), target)


def test_rows_are_the_recorded_ids_with_the_reply_and_its_end_in_the_mask(corpus, run):
    rows = {(r.episode_id, r.agent_id): r for r in read_rows(corpus / "train.parquet")}
    assert set(rows) == {("a", "agent1"), ("a", "agent2"), ("b", "agent2")}
    stored = EpisodeStore(run / "episodes").read("a")
    turns = [t for t in stored.turns if t.agent_id == "agent1"]
    whole = np.concatenate([np.concatenate([t.new_ids, t.response_ids]) for t in turns])
    row = rows["a", "agent1"]
    assert row.input_ids.tobytes() == whole.tobytes()
    tokenizer = chat_tokenizer()
    text = tokenizer.decode(row.input_ids[row.loss_mask == 1])
    assert text == call("ls -l", "I look.") + "<|im_end|>" + call("git push") + "<|im_end|>"
    assert row.logprobs[row.loss_mask == 1].tolist() == [x for t in turns for x in t.response_logprobs.tolist()]


def test_a_refused_reply_is_context_and_carries_no_loss(corpus):
    (row,) = [r for r in read_rows(corpus / "train.parquet") if r.episode_id == "b"]
    text = chat_tokenizer().decode(row.input_ids[row.loss_mask == 1])
    assert "I think first." not in text and text.startswith(call("sed -i s/a/b/ y.py"))


def test_a_summary_carries_no_loss_and_what_follows_it_is_left_out_by_name(tmp_path, target):
    """The harness' history doesn't hold the summary that the policy read, so what it wrote behind one can't be rendered again."""
    run = run_dir(tmp_path / "run", episode("e", [call("ls"), "SUMMARY of it", call("git push")], [call("pwd")]))
    stored = EpisodeStore(run / "episodes").read("e")
    assert [t.kind for t in stored.turns if t.agent_id == "agent1"] == ["policy", "summarizer", "policy"]
    found = taken([run], target)
    tokenizer = chat_tokenizer()
    texts = {r.agent_id: tokenizer.decode(r.input_ids[r.loss_mask == 1]) for r in found.rows}
    assert texts == {"agent1": call("ls") + "<|im_end|>", "agent2": call("pwd") + "<|im_end|>"}
    assert found.excluded["branch_without_loss"] == ["run/e/agent1: 1"]
    (left,) = found.excluded["not_rendered_again"]
    assert left.startswith("run/e/agent1/2: turn 2, context")


def test_success_is_asked_of_the_feature_or_of_the_pair(run, target):
    feature, pair = taken([run], target), taken([run], target, level="pair")
    assert [(r.episode_id, r.agent_id) for r in pair.rows] == [("a", "agent1"), ("a", "agent2")]
    assert len(feature.rows) == 3 and feature.excluded["not_passed"] == ["run/b/agent1"]
    assert feature.attempts == {"repo_a/task1": 2, "repo_b/task1": 2}
    assert feature.successes == {"repo_a/task1": 2, "repo_b/task1": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"split": "eval"}, "other_split"),
        ({"outcome": "infra:engine_died", "grade": None}, "infrastructure_fault"),
        ({"brief_kinds": {"agent1": "none", "agent2": "answer"}}, "answer_in_prompt"),
    ],
)
def test_episodes_that_are_left_out(changes, reason, tmp_path, target):
    bad = episode("bad", [call("ls")], [call("pwd")], **changes)
    found = taken([run_dir(tmp_path / "run", bad)], target)
    assert found.rows == [] and len(found.excluded[reason]) == 1
    if reason == "other_split":
        assert len(taken([tmp_path / "run"], target, split="eval").rows) == 2
    if reason == "answer_in_prompt":
        assert len(taken([tmp_path / "run"], target, allow_answer=True).rows) == 2


def test_long_observations_and_runs_over_the_cap_are_left_out(tmp_path, target):
    run = run_dir(tmp_path / "run", episode("long", [call("ls"), call("a")], [call("b")], tool="x" * 30))
    found = taken([run], target, max_observation=29)
    assert found.rows == [] and found.excluded["observation_too_long"] == [
        "run/long/agent1: 30 characters",
        "run/long/agent2: 30 characters",
    ]
    assert len(taken([run], target, max_observation=30).rows) == 2
    capped = taken([run], target, max_per_task=1)
    assert len(capped.rows) == 1 and len(capped.excluded["over_the_cap"]) == 1
    assert {taken([run], target, max_per_task=1, seed=s).rows[0].agent_id for s in range(8)} == {"agent1", "agent2"}


def test_a_conversation_that_is_not_rendered_again_names_the_first_token(tmp_path, target):
    good = episode("e", [call("ls")], [call("pwd")])
    messages = json.loads(json.dumps(good.messages))
    messages["agent1"][1]["content"] = "Task of f."
    run = run_dir(tmp_path / "run", dataclasses.replace(good, messages=messages))
    found = taken([run], target)
    assert [r.agent_id for r in found.rows] == ["agent2"]
    (why,) = found.excluded["not_rendered_again"]
    tokenizer, recorded = chat_tokenizer(), EpisodeStore(run / "episodes").read("e").turns[0].new_ids.tolist()
    text = tokenizer.apply_chat_template(messages["agent1"][:2], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    again = tokenizer.encode(text, add_special_tokens=False)
    at = next(i for i, (a, b) in enumerate(zip(recorded, again, strict=True)) if a != b)
    sides = [repr(tokenizer.decode([x[at]])) for x in (recorded, again)]
    assert f"turn 0, context, token {at}: recorded {sides[0]}, rendered again {sides[1]}" in why


def test_another_encoding_of_the_same_text_is_kept(tmp_path, target):
    tokenizer = chat_tokenizer()
    text = call("ls -l")
    spelt = [
        i
        for c in text.replace("<tool_call>", "\0").replace("</tool_call>", "\1")
        for i in tokenizer.encode({"\0": "<tool_call>", "\1": "</tool_call>"}.get(c, c))
    ]
    spelt.append(tokenizer.eos_token_id)
    assert spelt != tokenizer.encode(text + "<|im_end|>") and tokenizer.decode(spelt) == text + "<|im_end|>"
    run = run_dir(tmp_path / "run", episode("e", [spelt], [call("pwd")]))
    rows = taken([run], target).rows
    assert len(rows) == 2 and rows[0].input_ids[rows[0].loss_mask == 1].tolist() == spelt


def test_a_brief_that_the_actors_read_is_taken_out_and_the_conversation_is_rendered_again_with_it(tmp_path, target):
    """Rows are those of the same replies without a brief; every gate passes, and without knowing the brief none of it is taken."""
    pair = load_subset("pocket_train", split="train")[0]
    same = {"repo": pair.repo, "task_id": pair.task_id, "features": pair.features}
    replies = [call("ls -l"), "I think first.", call("git push")], [call("pwd")]
    hint = process().ids(chat_tokenizer())
    plain = run_dir(tmp_path / "plain", episode("e", *replies, **same))
    kinds = {"agent1": "guidance", "agent2": "guidance"}
    briefed = run_dir(tmp_path / "briefed", episode("e", *replies, hint=hint, brief_kinds=kinds, **same))
    said = {"tasks": {"dataset": "pocket"}, "actor_brief": {"name": "process", "where": "train"}}
    (briefed / "meta.json").write_text(json.dumps({"opsd": said}))
    model = str(tmp_path / "tokenizer")
    chat_tokenizer().save_pretrained(model)

    assert hint == hint_in(EpisodeStore(briefed / "episodes").read("e").turns[0].new_ids, len(hint))
    sources = open_sources([briefed], lambda run: hints_of_run(run, model))
    build(sources, Spec(), rendering(), target, tmp_path / "corpus", model, "pocket")
    assert {v.verdict for v in check(tmp_path / "corpus", rendering(), target, {s.name: s for s in sources})} == {"pass"}
    mine, theirs = read_rows(tmp_path / "corpus" / "train.parquet"), taken([plain], target).rows
    assert [r.actor_brief_kind for r in mine] == ["guidance"] * 3  # a refused reply makes a branch
    for a, b in zip(mine, theirs, strict=True):
        for name in ("input_ids", "loss_mask", "turn_index", "token_class", "logprobs"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
    unknown = taken([briefed], target)
    assert unknown.rows == [] and len(unknown.excluded["not_rendered_again"]) == 3
    (found,) = [
        v
        for v in check(tmp_path / "corpus", rendering(), target, {"briefed": open_sources([briefed])[0]})
        if v.gate == "recorded"
    ]
    assert found.verdict == "fail"


def hint_in(prompt: np.ndarray, length: int) -> list[int]:
    """The last tokens of the system message."""
    end = int(np.flatnonzero(prompt == chat_tokenizer().eos_token_id)[0])
    return prompt[end - length : end].tolist()


def test_runs_of_two_contracts_are_refused_field_by_field(run, tmp_path):
    other = dataclasses.replace(CONTRACT, step_limit=7)
    second = run_dir(tmp_path / "other", episode("c", [call("ls")], [call("ls")], contract=other), contract=other)
    with pytest.raises(OpsdError, match="step_limit: 7 there, 200 here"):
        open_sources([run, second])
    tasks = dataclasses.replace(CONTRACT, dataset_hash="other tasks")
    third = run_dir(tmp_path / "third", episode("d", [call("ls")], [call("ls")], contract=tasks), contract=tasks)
    assert [s.name for s in open_sources([run, third])] == ["run", "third"]


def test_evaluated_tasks_are_refused_by_name_and_by_text(tmp_path, target):
    named = run_dir(tmp_path / "named", episode("n", [call("ls")], [call("pwd")], repo="pocket_inifile_task"))
    found = taken([named], target)
    assert found.rows == [] and "repo pocket_inifile_task is evaluated" in found.excluded["contaminated"][0]
    from verl_opsd.cooperbench.dataset import POCKET_DIR

    gold = (POCKET_DIR / "pocket_inifile_task" / "task1" / "feature2" / "feature.patch").read_text()
    pasted = run_dir(tmp_path / "pasted", episode("p", [call(f"git apply <<'P'\n{gold}P")], [call("pwd")]))
    found = taken([pasted], target)
    assert [r.agent_id for r in found.rows] == ["agent2"]
    assert "holds" in found.excluded["contaminated"][0] and "feature2/feature.patch" in found.excluded["contaminated"][0]


def test_training_tasks_are_not_taken_for_evaluated_ones(target):
    """The other pocket tasks' own texts, which look alike, are below the share."""
    from verl_opsd.cooperbench.dataset import POCKET_DIR

    for repo in ("pocket_textkit_task/task0", "pocket_ledger_task/task1"):
        for path in (POCKET_DIR / repo).rglob("*"):
            if path.is_file():
                assert contamination_of(path.read_text(), target) == "", path
    assert contamination_of("", target, "pocket_inifile_task") != ""


def test_an_audit_without_subsets_is_refused():
    with pytest.raises(OpsdError, match="every subset"):
        evaluated({})


def test_near_duplicates_by_hand(corpus):
    rows = read_rows(corpus / "train.parquet")
    base = rows[0]
    ids = np.arange(1, 41, dtype=np.int32)

    def row(values):
        return dataclasses.replace(base, input_ids=values, loss_mask=np.ones(len(values), np.int8))

    changed = ids.copy()
    changed[20] = 999  # 8 of 33 shingles hold it: 25 shared of 41
    rows = [row(ids), row(changed), row(ids + 500), row(ids.copy())]
    assert near_duplicates(rows, 25 / 41 - 1e-9) == {1: (0, pytest.approx(25 / 41)), 3: (0, 1.0)}
    assert near_duplicates(rows, 25 / 41 + 1e-9) == {3: (0, 1.0)}
    short = [row(ids[:3]), row(ids[:3]), row(ids[1:4])]
    assert near_duplicates(short, 1.0) == {1: (0, 1.0)}


def test_composition_and_spread_by_hand(corpus):
    rows = read_rows(corpus / "train.parquet")
    counted = composition(rows)
    loss = sum(int(r.loss_mask.sum()) for r in rows)
    assert counted["loss_tokens"] == loss and counted["rows"] == 3 and counted["episodes"] == 2
    assert sum(counted["by_class"].values()) == counted["sequence_tokens"] == sum(len(r.input_ids) for r in rows)
    assert [t["task"] for t in counted["by_source_and_task"]] == ["repo_a/task1", "repo_b/task1"]
    uneven = spread({"y": 100, "x": 100, "z": 4}, {"x": 78, "y": 1})
    assert uneven["tasks"] == {"x": [78, 100], "y": [1, 100], "z": [0, 4]}
    assert spread_lines(uneven) == [
        "yield: 38.7% of the agents' runs",
        "  x 78 of 100",
        "  y 1 of 100",
        "  z 0 of 4",
        "spread: 78.0 (best over worst solved task; a warning above 10)",
        "warning: 1 of 3 tasks were never solved; the best task is solved 78.0 times as often as the worst",
    ]
    assert uneven["ratio"] == pytest.approx(78) and uneven["never_solved"] == ["z"]
    assert "78.0 times" in uneven["warning"] and uneven["yield"] == 79 / 204
    assert spread({"x": 10, "y": 10}, {"x": 10, "y": 5})["warning"] == ""


def test_whole_episodes_are_held_out(corpus):
    rows = read_rows(corpus / "train.parquet")
    split = held_out(rows, Spec(validation=0.3))  # of 2 episodes: 1
    assert {r.episode_id for r in split["train"]}.isdisjoint({r.episode_id for r in split["validation"]})
    assert len({r.episode_id for r in split["validation"]}) == 1
    assert held_out(rows, Spec())["validation"] == []


def test_the_card_and_the_sample_sheet(corpus):
    text = (corpus / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["configs"][0]["data_files"] == [{"split": "train", "path": "train.parquet"}]
    manifest = read_manifest(corpus)
    for needle in (
        manifest["files"]["train"]["sha256"],
        CONTRACT.hash,
        manifest["tokenizer"],
        "not_passed: 1",
        "contamination-1",
    ):
        assert needle in text
    assert pq.read_table(corpus / "train.parquet").num_rows == 3
    sheet = list(csv.DictReader((corpus / "exemplarity.csv").open(newline="")))
    assert len(sheet) == 3 and all(line["exemplary (yes/no)"] == "" for line in sheet)
    assert {line["row"] for line in sheet} == {r.name for r in read_rows(corpus / "train.parquet")}


def test_a_corpus_without_rows_or_over_another_is_refused(corpus, run, tmp_path: Path, target):
    with pytest.raises(OpsdError, match="exists"):
        build(open_sources([run]), Spec(), rendering(), target, corpus, "model", "pocket")
    nothing = run_dir(tmp_path / "nothing", episode("x", [call("ls")], [call("ls")], (False, False)))
    with pytest.raises(OpsdError, match="not_passed 2"):
        build(open_sources([nothing]), Spec(), rendering(), target, tmp_path / "none", "model", "pocket")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("bad", [{"max_per_task": 0}, {"near_duplicate": 0.0}, {"max_observation": 0}, {"validation": 1.0}])
def test_specifications_that_make_no_sense(bad):
    with pytest.raises(OpsdError):
        Spec(**bad)


def graded(path: Path, *episodes) -> Path:
    """A run directory whose log holds the hashes of what was graded."""
    write_json(path / "contract.json", CONTRACT.as_dict())
    for e in episodes:
        RunDir(path).store_episode(EpisodeStore(path / "episodes"), e)
    return path


def test_a_grade_that_was_changed_afterwards_is_refused(tmp_path):
    e = episode("e", [call("ls")], [call("pwd")], (False, True))
    run = graded(tmp_path / "run", e)
    assert len(open_sources([run])) == 1
    won = tuple(dataclasses.replace(f, passed=True) for f in e.grade.features)
    shutil.rmtree(run / "episodes" / "e")
    EpisodeStore(run / "episodes").write(dataclasses.replace(e, grade=dataclasses.replace(e.grade, features=won)))
    with pytest.raises(OpsdError, match=r"source .*episode e: grades\.parquet not as graded"):
        open_sources([run])


def test_what_was_invalidated_is_left_out_and_found_in_a_corpus_of_earlier(tmp_path, target):
    old = episode("old", [call("ls")], [call("pwd")], model_version=2)
    new = episode("new", [call("cat x")], [call("cat y")], model_version=3)
    run = graded(tmp_path / "run", old, new)
    build(open_sources([run]), Spec(), rendering(), target, tmp_path / "c", "model", "pocket")
    assert invalidate(run, "version", "2", "a broken server")
    found = taken([run], target)
    assert {r.episode_id for r in found.rows} == {"new"}
    assert found.excluded["invalidated"] == ["run/old: invalidated (version=2): a broken server"]
    failed = {
        v.gate: v.detail
        for v in check(tmp_path / "c", rendering(), target, {"run": open_sources([run])[0]})
        if v.verdict == "fail"
    }
    assert set(failed) == {"recorded"} and "run/old/agent1: invalidated (version=2)" in failed["recorded"]
    assert invalidate(run, "contract", CONTRACT.hash[:12], "another harness")
    assert taken([run], target).rows == []


def test_a_validation_share_that_leaves_nothing_to_train_on_is_refused(tmp_path, target):
    run = run_dir(tmp_path / "run", episode("e", [call("ls")], [call("pwd")]))
    with pytest.raises(OpsdError, match=r"validation=0\.1 holds out all 1 episodes"):
        build(open_sources([run]), Spec(validation=0.1), rendering(), target, tmp_path / "c", "model", "pocket")
