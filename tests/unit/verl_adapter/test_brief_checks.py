"""Briefs before a run: missing, leaking and too long ones are refused; what is left out is recorded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from verl_opsd.config import OpsdConfig, WorthConfig
from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.cooperbench.pair_briefs import patch_of
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import ensure_tiny
from verl_opsd.paths import cache_dir
from verl_opsd.privilege import Audit, Material, Section, ViewTooLong, audit, compose, register_brief
from verl_opsd.privilege import briefs as registry
from verl_opsd.privilege.workflows import draft, file_name
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade, Sampling, TurnRecord
from verl_opsd.verl_adapter import brief_checks
from verl_opsd.verl_adapter.brief_checks import (
    check_briefs,
    check_views,
    check_worth,
    positions_of,
    record_briefs,
    record_worth,
)

PAIRS = load_subset("pocket_train", POCKET_DIR)


def config(brief: dict, context: int = 12288) -> OpsdConfig:
    return OpsdConfig.parse(
        {
            "recipe": "opd",
            "scale": "local",
            "mode": "online",
            "tasks": {"dataset": "pocket", "train": "pocket_train", "eval": "pocket_eval"},
            "brief": brief,
            "teacher": {},
            "loss": {},
            "contract": {"context_length": context, "max_tokens": 96},
        }
    )


@pytest.fixture(scope="module")
def student() -> str:
    return str(ensure_tiny(cache_dir() / "models"))


def test_views_that_may_not_fit_are_refused_at_launch():
    spec = {"name": "peer_spec"}
    check_views(config(spec, 12288), 4096, 16384)
    with pytest.raises(OpsdError, match=r"16385 tokens, 16384 fit.*\n.*\n.*lower the context length to 12287"):
        check_views(config(spec, 12288), 4097, 16384)
    check_views(config(spec, 12288), 10**9, None)
    with pytest.raises(OpsdError, match="12388 tokens, 12000 fit"):
        check_views(config(spec | {"max_view_tokens": 12000}, 12288), 100, 16384)
    with pytest.raises(OpsdError, match="model of 16384 positions"):
        check_views(config(spec | {"max_view_tokens": 16385}), 1, 16384)
    with pytest.raises(OpsdError, match=r"without opsd\.brief\.max_view_tokens"):
        check_views(config(spec | {"too_long": "leave_out"}), 1, 16384)
    check_views(config(spec | {"too_long": "leave_out", "max_view_tokens": 12000}), 100, 16384)


def test_the_scoring_model_decides(student, monkeypatch):
    assert positions_of(student) == 16384
    check_briefs(config({"name": "peer_spec"}), PAIRS, student)
    monkeypatch.setattr(brief_checks, "positions_of", lambda path: 12300)
    with pytest.raises(OpsdError, match="12300 fit"):
        check_briefs(config({"name": "peer_spec"}), PAIRS, student)


def test_a_leak_that_is_declared_as_guidance_stops_the_run(student, monkeypatch):
    monkeypatch.setattr(registry, "_MAKERS", dict(registry._MAKERS))
    register_brief(
        "hinting", lambda case: compose(Section("h", "guidance", "The hidden tests assert the message."), name="hinting")
    )
    with pytest.raises(OpsdError, match="pocket_ledger_task/task1/f1_f2 agent1, declared guidance: leaks test_text"):
        check_briefs(config({"name": "peer_spec+hinting"}), PAIRS, student)


def test_code_of_the_base_tree_is_no_leak_of_a_patch(student, monkeypatch):
    """A gold patch that adds what the tree holds elsewhere: the agent can read it."""
    base = (POCKET_DIR / "pocket_ledger_task/task1/base/src/ledger/accounts.py").read_text()
    words = "A ledger of accounts with whole-number amounts"
    assert words in base
    monkeypatch.setattr(registry, "_MAKERS", dict(registry._MAKERS))
    register_brief("quote", lambda case: compose(Section("q", "guidance", words), name="quote"))
    from verl_opsd.cooperbench import pair_briefs

    patch = f"--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@\n a\n+{words}\n"
    monkeypatch.setattr(pair_briefs, "patch_of", lambda pair, feature, kind: patch)
    check_briefs(config({"name": "quote"}), PAIRS[:1], student)
    monkeypatch.setattr(pair_briefs, "patch_of", lambda pair, feature, kind: patch.replace(words, words + " and a number more"))
    register_brief("quote2", lambda case: compose(Section("q", "guidance", words + " and a number more"), name="quote2"))
    with pytest.raises(OpsdError, match="gold_text"):
        check_briefs(config({"name": "quote2"}), PAIRS[:1], student)


def test_every_training_pair_needs_its_workflow(student, tmp_path):

    brief = {"name": "workflow", "files": str(tmp_path), "allow_answer": True}
    for pair in PAIRS[1:]:
        gold = [patch_of(pair, f, "gold") for f in pair.features]
        (tmp_path / file_name(pair.key)).write_text(draft(pair.key, *gold))
    with pytest.raises(OpsdError, match="1 pairs: pocket_ledger_task/task1/f1_f2"):
        check_briefs(config(brief), PAIRS, student)
    made = check_briefs(config(brief), PAIRS[1:], student)
    assert len(made.briefs) == 2 * len(PAIRS[1:])
    run = RunDir(tmp_path)
    record_briefs(run, config(brief), made)
    (line,) = map(json.loads, (tmp_path / "evidence.jsonl").read_text().splitlines())
    assert (line["gate"], line["value"], line["threshold"]) == ("brief_audit", 0, None) and "leaks answer" in line["detail"]
    written = json.loads((tmp_path / "briefs.json").read_text())
    assert set(written) == {p.key for p in PAIRS[1:]}
    for n, (pair, agent) in enumerate(made.owners):
        digest = hashlib.sha256(made.briefs[n].text.encode()).hexdigest()
        assert written[pair][agent] == {"name": "workflow", "kind": "answer", "text_sha256": digest}


@pytest.mark.parametrize(
    "brief", [{"name": "workflow"}, {"name": "peer_spec", "files": "x"}, {"name": "peer_spec", "too_long": "cut"}]
)
def test_options_that_would_be_ignored_are_refused(brief):
    with pytest.raises(OpsdError, match=r"opsd\.brief"):
        config(brief)


def episode(student: str, patch: str, reply_tokens: int = 5, split: str = "train") -> tuple[Episode, object]:
    """One scored episode: each agent answers once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(student)
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    reply = [*tokenizer.encode("ok" * reply_tokens, add_special_tokens=False)[:reply_tokens], tokenizer.eos_token_id]
    turns = tuple(
        TurnRecord(
            "e", agent, 0, 0, 0, np.array(prompt, np.int32), np.array(reply, np.int32), np.zeros(len(reply), np.float32), "stop",
            "policy", Sampling(1.0, 1.0, -1, 96), 0, "h", 0.0, 1.0,
        )
        for agent in ("agent1", "agent2")
    )  # fmt: skip
    grade = Grade("clean", None, {}, (FeatureGrade(1, False, 0, 1, 1), FeatureGrade(2, False, 0, 1, 1)))
    pair = PAIRS[0]
    outcomes = tuple(AgentOutcome(f"agent{i}", i, "Submitted", 1, p, 0, True) for i, p in ((1, patch), (2, "")))
    return (
        Episode("e", pair.repo, pair.task_id, pair.features, split, "h", "scored", turns, outcomes, grade, {}, 0),
        tokenizer,
    )


def rows(opsd: OpsdConfig, made: Episode, tokenizer: object) -> list:
    from verl_opsd.verl_adapter.episode_rows import episode_outputs

    pair = dataclasses.replace(PAIRS[0], split=made.split)
    return [o for o in episode_outputs(opsd, pair, made, tokenizer) if any(o.response_mask)]


def evidence(path) -> list[tuple]:
    lines = [json.loads(x) for x in (path / "evidence.jsonl").read_text().splitlines()]
    return [(x["gate"], x["value"]) for x in lines]


def test_branches_whose_view_is_too_long_are_left_out_and_recorded(student, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    made, tokenizer = episode(student, "")
    full = rows(config({"name": "peer_spec"}), made, tokenizer)
    assert len(full) == 2
    longest = sorted(int(o.opsd_row["opsd_view_len"].max()) for o in full)
    assert longest[0] < longest[1]
    limited = {"name": "peer_spec", "max_view_tokens": longest[0], "too_long": "leave_out"}
    assert len(rows(config(limited), made, tokenizer)) == 1
    assert evidence(tmp_path) == [("view_too_long", 1)]
    (short,) = {"agent1/0", "agent2/0"} - set(RunDir(tmp_path).left_out("e"))
    assert RunDir(tmp_path).left_out("e") == {x: "view too long" for x in ("agent1/0", "agent2/0") if x != short}
    with pytest.raises(OpsdError, match="never truncated"):
        rows(config(limited | {"too_long": "refuse"}), made, tokenizer)
    assert (
        rows(config(limited | {"max_view_tokens": 3}), made, tokenizer) == []
    )  # the episode is there, with a row without loss


def test_branches_in_windows_are_said(student, tmp_path, monkeypatch):
    """Two replies with long prompts between them: what does not fit as one pass becomes two, and the record says which."""
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    made, tokenizer = episode(student, "")
    first = made.turns[0]
    line = tokenizer.encode("<|im_end|>\n<|im_start|>user\n" + "more " * 200, add_special_tokens=False)[1:]
    header = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    second = dataclasses.replace(first, turn=1, start=first.end, new_ids=np.array([*line, *header], np.int32))
    made = dataclasses.replace(made, turns=(first, second, made.turns[1]))
    whole = rows(config({"name": "peer_spec"}), made, tokenizer)
    length = int(whole[0].opsd_row["opsd_view_len"].sum())
    limited = {"name": "peer_spec", "max_view_tokens": length - 1, "too_long": "window", "window_context": 1}
    windowed = rows(config(limited), made, tokenizer)
    assert len(windowed) == 2
    lengths = windowed[0].opsd_row["opsd_view_len"].tolist()
    assert len(lengths) == 2 and max(lengths) < length
    assert windowed[0].opsd_row["opsd_position"].tolist() == whole[0].opsd_row["opsd_position"].tolist()
    assert evidence(tmp_path) == [("view_windows", 1)]
    detail = json.loads((tmp_path / "evidence.jsonl").read_text())["detail"]
    n = len(first.response_ids)
    assert "agent1 branch 0: tokens 0.." in detail and detail.count(f"for {n} positions") == 2 and " + " in detail
    with pytest.raises(ViewTooLong, match="window_context"):
        rows(config(limited | {"max_view_tokens": 60, "window_context": 1}), made, tokenizer)


def test_hindsight_gives_rows_to_agents_with_edits_only(student, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@\n a\n+b = 1\n"
    made, tokenizer = episode(student, patch)
    assert len(rows(config({"name": "hindsight_gold", "allow_answer": True}), made, tokenizer)) == 1
    assert evidence(tmp_path) == [("no_brief", "agent2")]
    assert RunDir(tmp_path).left_out("e") == {"agent2/0": "no brief"}
    assert len(rows(config({"name": "peer_spec"}), made, tokenizer)) == 2
    assert RunDir(tmp_path).left_out("e") == {}  # the same episode again: what was recorded is replaced


@pytest.mark.parametrize("too_long", ["refuse", "leave_out", "window"])
def test_evaluation_rows_carry_no_brief_and_have_no_limit(student, tmp_path, monkeypatch, too_long):
    """Nobody scores them: a limit of teachers' views neither leaves one out nor stops the evaluation."""
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    made, tokenizer = episode(student, "", split="eval")
    limited = {"max_view_tokens": 20, "too_long": too_long} | ({"window_context": 1} if too_long == "window" else {})
    found = rows(config({"name": "gold_patch", "allow_answer": True} | limited), made, tokenizer)
    assert len(found) == 2 and not (tmp_path / "evidence.jsonl").exists()
    for output in found:
        assert output.opsd_row["opsd_view_ids"].tolist() == [*output.prompt_ids, *output.response_ids]


SEEDS = str(Path(__file__).parents[1] / "teachers" / "seeds_matrix.json")


def worth_of(brief: str, audits: Sequence[Audit] = (), **worth: str) -> tuple[bool, str]:
    opsd = config({"name": brief, "allow_answer": True})
    return check_worth(dataclasses.replace(opsd, worth=WorthConfig(**worth)), audits)


def test_a_teacher_that_was_not_measured_is_not_distilled():
    with pytest.raises(OpsdError, match="no teacher matrix was measured"):
        worth_of("peer_spec")
    assert worth_of("peer_spec", override="only a smoke test") == (
        False,
        "peer_spec: no teacher matrix was measured; overridden: only a smoke test",
    )


@pytest.mark.parametrize("brief", ["gold_patch", "shared_backlog", "menu_measured"])
def test_the_matrix_decides(brief):
    with pytest.raises(OpsdError, match="not shown to be worth distilling"):
        worth_of(brief, matrix=SEEDS)
    passed, detail = worth_of(brief, matrix=SEEDS, override="an upper bound is wanted")
    assert not passed and detail.endswith("overridden: an upper bound is wanted")
    with pytest.raises(OpsdError, match="measure it first"):
        worth_of("process", matrix=SEEDS, override="an upper bound is wanted")  # a matrix without this brief is a mistake


def test_a_teacher_that_is_worth_it_passes(tmp_path):
    file = tmp_path / "matrix.json"
    cells = [("none", "student", 2), ("none", "teacher", 4), ("peer_spec", "student", 3), ("peer_spec", "teacher", 7)]
    values = {"cells": [{"context": c, "model": m, "pairs": [n, 10]} for c, m, n in cells], "answer_free": {"peer_spec": True}}
    file.write_text(json.dumps(values))
    assert worth_of("peer_spec", matrix=str(file)) == (True, "peer_spec: all conditions")
    assert worth_of("peer_spec", matrix=str(file), override="not needed at all") == (True, "peer_spec: all conditions")
    leaking = audit(compose(Section("hint", "guidance", "Put it at line 61.")), Material())
    clean = audit(compose(Section("hint", "guidance", "Talk first.")), Material())
    with pytest.raises(OpsdError, match="this run's audit: 1 of 2 briefs are not answer-free"):
        worth_of("peer_spec", [clean, leaking], matrix=str(file))


def test_an_override_is_no_verdict(tmp_path):
    record_worth(RunDir(tmp_path), False, "d; overridden: why")
    record_worth(RunDir(tmp_path), True, "all conditions")
    lines = [json.loads(x) for x in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    assert [(x["gate"], x["threshold"], x["detail"]) for x in lines] == [
        ("worth_overridden", None, "d; overridden: why"),
        ("worth_distilling", 1, "all conditions"),
    ]


def test_an_override_has_a_reason():
    with pytest.raises(OpsdError, match="recorded with its reason"):
        OpsdConfig.parse(
            json.loads(json.dumps(dataclasses.asdict(config({"name": "none"})))) | {"worth": {"override": "because"}}
        )


def test_the_wrong_task_of_every_pair_is_answer_free_and_anothers(student):
    """Its code and paths are another task's; this task's patch in it would be a leak still."""
    made = check_briefs(config({"name": "wrong_task"}), PAIRS, student)
    own = check_briefs(config({"name": "peer_spec"}), PAIRS, student)
    assert all(a.answer_free for a in made.audits) and len(made.briefs) == 2 * len(PAIRS)
    assert all(a.text != b.text for a, b in zip(made.briefs, own.briefs, strict=True))
    text = "Call `return compute_total(items, rate=0.5, other=limit(9))` in `shop/total.py`."
    brief = compose(Section("text", "guidance", text))
    assert audit(brief, Material()).findings and not audit(brief, Material(elsewhere=(text,))).findings
    patch = "--- a/m.py\n+++ b/m.py\n@@ -1,1 +1,1 @@\n-x\n+return compute_total(items, rate=0.5, other=limit(9))\n"
    assert {f.kind for f in audit(brief, Material(gold=(patch,), elsewhere=(text,))).findings} == {"gold_text"}


def test_what_an_agent_read_while_it_acted_is_no_leak_of_its_prompt(student, tmp_path, monkeypatch):
    """A branch whose history was rendered again begins with the file that the agent looked at, which the gold patch quotes too."""
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    made, tokenizer = episode(student, "")
    gold = patch_of(PAIRS[0], PAIRS[0].features[0], "gold")
    first = made.turns[0]
    fork = len(first.new_ids)

    def forked(before: str, at: int) -> Episode:
        history = f"{before}<|im_end|>\n<|im_start|>user\nNow?<|im_end|>\n<|im_start|>assistant\n"
        new = np.array(tokenizer.encode(history, add_special_tokens=False), np.int32)
        again = dataclasses.replace(
            first, turn=1, branch=1, start=at, new_ids=new, parent_branch=0, fork_position=at, fork_reason="template_rewrite"
        )
        return dataclasses.replace(made, turns=(first, again, made.turns[1]))

    wanted = config({"name": "gold_patch", "allow_answer": True})
    assert len(rows(wanted, forked(f"cat x<|im_end|>\n<|im_start|>user\n<tool_response>\n{gold}", fork), tokenizer)) == 3
    at = int(np.flatnonzero(first.new_ids == tokenizer.eos_token_id)[1])  # inside the first user message
    with pytest.raises(OpsdError, match="student's own prompt"):
        rows(wanted, forked(gold, at), tokenizer)


def test_a_task_text_may_quote_its_own_solution(student, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    made, tokenizer = episode(student, "")
    gold = patch_of(PAIRS[0], PAIRS[0].features[0], "gold")
    prompt = tokenizer.encode(
        f"<|im_start|>user\n{gold}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False, split_special_tokens=False
    )
    made = dataclasses.replace(
        made, turns=(dataclasses.replace(made.turns[0], new_ids=np.array(prompt, np.int32)), made.turns[1])
    )
    wanted = config({"name": "gold_patch", "allow_answer": True, "placement": "last_user"})
    with pytest.raises(OpsdError, match="student's own prompt"):
        rows(wanted, made, tokenizer)
    monkeypatch.setattr(PairTask, "feature_text", lambda self, feature: gold)
    assert len(rows(wanted, made, tokenizer)) == 2
