"""Where a corpus draws its lines: which verdict counts, what a task is, shares at their border, draws by the seed, gates on their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer
from recorded import CONTRACT, call, episode, rendering, run_dir

from verl_opsd.cooperbench.types import PairTask
from verl_opsd.corpus.build import build, held_out
from verl_opsd.corpus.card import sample_sheet, spread
from verl_opsd.corpus.contamination import contamination_of, evaluated, grams
from verl_opsd.corpus.duplicates import near_duplicates
from verl_opsd.corpus.gates import check_sources, mask_problem
from verl_opsd.corpus.records import read_rows
from verl_opsd.corpus.select import Spec, open_sources, select
from verl_opsd.errors import OpsdError
from verl_opsd.tokens import EpisodeStore


def taken(run: Path, target, **spec):
    return select(open_sources([run]), Spec(**spec), rendering(), target)


def verdicts(run: Path, found, spec: Spec) -> dict[str, str]:
    """Gates that compare rows with their episodes."""
    (source,) = open_sources([run])
    episodes = {(source.name, e): source.store.read(e) for e in source.store.ids()}
    return {v.gate: v.verdict for v in check_sources(found.rows, {source.name: source}, episodes, spec, rendering())}


@pytest.fixture
def corpus_row(corpus):
    return read_rows(corpus / "train.parquet")[0]


def test_success_is_the_verdict_that_reward_follows(tmp_path, target):
    """Agent 1 passed in the harness' eyes and not in this project's, agent 2 the other way round."""
    e = episode("e", [call("ls")], [call("pwd")], (True, False))
    features = tuple(dataclasses.replace(f, strict=s) for f, s in zip(e.grade.features, (False, True), strict=True))
    run = run_dir(tmp_path / "run", dataclasses.replace(e, grade=dataclasses.replace(e.grade, features=features)))
    found = taken(run, target)
    assert [(r.agent_id, r.passed, r.pair_passed) for r in found.rows] == [("agent2", True, False)]
    assert taken(run, target, level="pair").rows == []


def test_a_cap_is_a_tasks_not_a_repositorys(tmp_path, target):
    one = episode("x", [call("ls")], [call("pwd")], repo="r", task_id=1)
    two = episode("y", [call("cat a")], [call("cat b")], repo="r", task_id=2)
    run = run_dir(tmp_path / "run", one, two)
    for cap, left in ((1, 2), (2, 0), (3, 0)):
        found = taken(run, target, max_per_task=cap)
        assert len(found.excluded["over_the_cap"]) == left
        assert {t: sum(r.task == t for r in found.rows) for t in ("r/task1", "r/task2")} == dict.fromkeys(
            ("r/task1", "r/task2"), min(cap, 2)
        )


def test_gates_of_the_episodes_stand_on_their_own(tmp_path, target):
    """Rows that a looser selection took are told by each gate of a stricter one."""
    run = run_dir(tmp_path / "run", episode("e", [call("ls")], [call("pwd")], (True, False), tool="x" * 30))
    found = taken(run, target)
    assert set(verdicts(run, found, Spec()).values()) == {"pass"}
    strict = verdicts(run, found, Spec(level="pair", max_observation=29))
    assert {g for g, v in strict.items() if v == "fail"} == {"success", "observation"}
    assert verdicts(run, found, Spec(max_observation=30))["observation"] == "pass"


def test_a_corpus_whose_rows_break_a_gate_is_not_written(tmp_path, target, monkeypatch):
    import verl_opsd.corpus.build as module

    run = run_dir(tmp_path / "run", episode("e", [call("ls")], [call("pwd")]))

    def lax(sources, spec, *rest):
        found = select(sources, spec, *rest)
        found.rows = [dataclasses.replace(r, actor_brief_kind="answer").hashed() for r in found.rows]
        return found

    monkeypatch.setattr(module, "select", lax)
    with pytest.raises(OpsdError, match="gate brief_kind"):
        build(open_sources([run]), Spec(), rendering(), target, tmp_path / "out", "model", "pocket")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("of_a_turn", [True, False])
def test_a_token_has_a_class_exactly_when_a_turn_wrote_it(of_a_turn, corpus_row):
    kind = corpus_row.token_class.copy()
    kind[np.flatnonzero((corpus_row.turn_index >= 0) == of_a_turn)[0]] = -1 if of_a_turn else 2
    assert "class exactly" in mask_problem(dataclasses.replace(corpus_row, token_class=kind))


def test_a_reply_that_was_cut_off_is_rendered_again_without_its_end(tmp_path, target):
    """Its last token is not the turn's end, and the template would write one."""
    tokenizer = chat_tokenizer()
    cut = tokenizer.encode(call("ls -l"), add_special_tokens=False)
    run = run_dir(tmp_path / "run", episode("e", [cut, call("git push")], [call("pwd")]))
    found = taken(run, target)
    (row,) = [r for r in found.rows if r.agent_id == "agent1"]
    assert found.excluded["not_rendered_again"] == []
    first = row.input_ids[(row.turn_index == 0) & (row.loss_mask == 1)].tolist()
    assert first == cut and tokenizer.eos_token_id not in first


def dataset(root: Path, **files: str) -> PairTask:
    """One pair of features whose first has these files."""
    for feature in (1, 2):
        folder = root / "repo_task" / "task7" / f"feature{feature}"
        folder.mkdir(parents=True)
        for name in ("feature.md", "feature.patch", "tests.patch"):
            (folder / name).write_text("short")
    for name, text in files.items():
        (root / "repo_task" / "task7" / "feature1" / name.replace("_", ".")).write_text(text)
    return PairTask(root, "repo_task", 7, (1, 2), "eval")


WORDS = [f"word{i}" for i in range(12)]  # 5 runs of 8 words


def test_a_fifth_of_a_texts_runs_is_holding_it(tmp_path):
    target = evaluated({"s": [dataset(tmp_path, feature_md=" ".join(WORDS))]})
    assert contamination_of(" ".join(WORDS[:8]), target) == "holds 20% of repo_task/task7/feature1/feature.md"
    assert contamination_of(" ".join(WORDS[:7]), target) == ""
    assert contamination_of(" ".join([*WORDS[:7], "other"]), target) == ""


def test_a_text_of_fewer_runs_is_found_by_name_only(tmp_path):
    text = " ".join(WORDS[:-1])
    target = evaluated({"s": [dataset(tmp_path, feature_md=text)]})
    assert len(grams(text)) == 4 and contamination_of(text, target) == ""
    assert contamination_of("", target, "repo_task") == "repo repo_task is evaluated"


@pytest.mark.parametrize("name", ["feature_patch", "tests_patch"])
def test_of_patches_the_added_lines_are_looked_for(name, tmp_path):
    context, removed, added = ([f"{kind}{i}" for i in range(12)] for kind in ("context", "removed", "added"))
    lines = f" {' '.join(context)}\n-{' '.join(removed)}\n+{' '.join(added)}\n"
    target = evaluated({"s": [dataset(tmp_path, **{name: f"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n{lines}"})]})
    assert contamination_of(" ".join(context + removed), target) == ""
    assert name.replace("_", ".") in contamination_of(" ".join(added), target)


@pytest.mark.parametrize("name", ["feature.md", "feature.patch", "tests.patch"])
def test_a_feature_without_one_of_its_texts_is_refused(name, tmp_path):
    """The gate would pass whatever holds that text."""
    pair = dataset(tmp_path)
    (pair.task_dir / "feature2" / name).unlink()
    with pytest.raises(OpsdError, match=f"feature2/{name} is not there"):
        evaluated({"s": [pair]})


def test_a_file_and_a_json_string_of_it_are_one_text(tmp_path):
    """Where a tool call writes the file, its line breaks are escapes, whose letter would stick to the next word."""
    target = evaluated({"s": [dataset(tmp_path, feature_md="\n".join(WORDS))]})
    written = json.dumps({"command": "\n".join(WORDS) + "\t"})
    assert contamination_of(written, target) == "holds 100% of repo_task/task7/feature1/feature.md"


def test_tasks_may_share_a_repository_where_that_is_asked_for(tmp_path, target, corpus_row):
    from verl_opsd.corpus.contamination import contamination_of_row

    pair = dataset(tmp_path)
    by_repo, by_task = evaluated({"s": [pair]}), evaluated({"s": [pair]}, "task")
    same, other = (dataclasses.replace(corpus_row, repo="repo_task", task_id=i) for i in (7, 8))
    assert [bool(contamination_of_row(r, "", by_repo)) for r in (same, other)] == [True, True]
    assert [bool(contamination_of_row(r, "", by_task)) for r in (same, other)] == [True, False]
    assert by_repo.digest != by_task.digest


def test_near_duplicates_are_of_what_was_written_not_of_what_was_read(corpus_row):
    ids = np.arange(1, 41, dtype=np.int32)
    mask = np.repeat(np.array([0, 1], np.int8), 20)

    def row(values):
        return dataclasses.replace(corpus_row, input_ids=values, loss_mask=mask)

    other_prompt, other_reply = ids.copy(), ids.copy()
    other_prompt[:20] += 500
    other_reply[20:] += 500
    assert near_duplicates([row(ids), row(other_prompt), row(other_reply)], 0.5) == {1: (0, 1.0)}


def test_draws_follow_the_seed(corpus_row):
    rows = [dataclasses.replace(corpus_row, episode_id=f"e{i}") for i in range(30)]
    held = [{r.episode_id for r in held_out(rows, Spec(validation=0.2, seed=s))["validation"]} for s in (0, 0, 1)]
    assert held[0] == held[1] != held[2] and all(len(h) == 6 for h in held)
    assert [r.episode_id for r in held_out(rows, Spec(validation=0.01))["train"]] == [
        r.episode_id
        for r in rows
        if r.episode_id not in {x.episode_id for x in held_out(rows, Spec(validation=0.01))["validation"]}
    ]
    sheets = [sample_sheet(rows, lambda ids: "", 5, s) for s in (0, 0, 1)]
    assert sheets[0] == sheets[1] != sheets[2] and sheets[0].count("\n") == sheets[0].count("\r\n") == 6


def test_a_ratio_is_uneven_above_the_bound_not_at_it():
    assert spread({"x": 10, "y": 10}, {"x": 10, "y": 1})["warning"] == ""
    assert "10.1 times" in spread({"x": 101, "y": 101}, {"x": 101, "y": 10})["warning"]


def test_a_row_says_the_contract_of_its_episode(tmp_path, target):
    other = dataclasses.replace(CONTRACT, step_limit=7)
    good, strange = episode("a", [call("ls")], [call("pwd")]), episode("b", [call("cat x")], [call("cat y")], contract=other)
    run = run_dir(tmp_path / "run", good)
    folder = run_dir(tmp_path / "elsewhere", strange, contract=other) / "episodes" / "b"
    folder.rename(run / "episodes" / "b")
    with pytest.raises(OpsdError, match="contract"):
        build(open_sources([run]), Spec(), rendering(), target, tmp_path / "out", "model", "pocket")
    assert EpisodeStore(run / "episodes").read("a").contract_hash == CONTRACT.hash


def test_a_rows_hash_covers_every_field(corpus_row):
    for field in dataclasses.fields(corpus_row):
        value = getattr(corpus_row, field.name)
        if isinstance(value, np.ndarray):
            other = value.copy()
            other[-1] += 1
        else:
            other = not value if isinstance(value, bool) else value + (1 if isinstance(value, int) else "x")
        changed = dataclasses.replace(corpus_row, **{field.name: other})
        assert (changed.computed_hash() == corpus_row.row_hash) is (field.name == "row_hash"), field.name
