"""Graded episodes, copies, invalidation, predictions and claims, on hand-made run directories; and the commands over them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from verl_opsd.cli.main import main
from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import LOG, append, lines, verify
from verl_opsd.evidence.claims import Claim, claim, claims
from verl_opsd.evidence.copies import copy, warning
from verl_opsd.evidence.graded import check_episodes, require_untouched
from verl_opsd.evidence.invalidation import invalidate, marks, parse_where
from verl_opsd.evidence.predictions import Baseline, Number, Prediction, judge, judge_one, read, record, write_down
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade
from verl_opsd.tokens.store import EpisodeStore

CONTRACT = EvalContract()


def episode(name: str, passed: bool = False, version: int = 0) -> Episode:
    features = tuple(FeatureGrade(i, passed, 3 if passed else 1, 0 if passed else 2, 0) for i in (1, 2))
    agents = tuple(AgentOutcome(f"agent{i}", i, "Submitted", 3, "diff", 1, True) for i in (1, 2))
    grade = Grade("clean", None, {"agent1": "applied"}, (features[0], features[1]))
    return Episode(name, "repo", 7, (1, 2), "eval", CONTRACT.hash, "scored", (), agents, grade, {}, version)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "a")
    write_json(made.path / "contract.json", CONTRACT.as_dict())
    brief = {"name": "peer_spec+process"}
    write_json(
        made.path / "meta.json",
        {"opsd": {"brief": brief, "corpus": None}, "versions": {"verl": "0.9.1"}, "harness": {"version": "0.0.29"}},
    )
    store = EpisodeStore(made.episodes)
    for version in (0, 3):
        for i in range(2):
            made.store_episode(store, episode(f"eval-0000{version}-{i}", version=version))
    return made


def state(run: RunDir, name: str) -> str:
    return check_episodes(run.path, lines(run.path))[name][0]


# ---- grades -----------------------------------------------------------------------------------------------------------


def test_hashes_are_those_of_the_files(run):
    first = lines(run.path)[0]
    for name in ("turns", "grades", "episodes"):
        data = (run.episodes / "eval-00000-0" / f"{name}.parquet").read_bytes()
        assert first["value"][name] == hashlib.sha256(data).hexdigest()
    assert (first["gate"], first["verdict"], first["detail"], first["value"]["version"]) == ("episode", "recorded", "scored", 0)
    assert {s for s, _ in check_episodes(run.path, lines(run.path)).values()} == {"whole"}


@pytest.mark.parametrize("table", ["turns", "grades", "episodes"])
def test_a_grade_that_is_changed_is_found(run, capsys, table):
    path = run.episodes / "eval-00003-1" / f"{table}.parquet"
    read_in = pq.read_table(path)
    pq.write_table(
        read_in, path, compression="none"
    )  # the same rows: a file that was written again is not the one that was graded
    assert check_episodes(run.path, lines(run.path))["eval-00003-1"] == ("altered", f"{table}.parquet not as graded")
    assert main(["evidence", "verify", str(run.path)]) == 1
    assert f"episode eval-00003-1: altered: {table}.parquet" in capsys.readouterr().out


def test_states_of_episodes(run, capsys):
    shutil.copytree(run.episodes / "eval-00000-0", run.episodes / "eval-00000-9")
    shutil.rmtree(run.episodes / "eval-00003-0")
    aside = run.path / "interrupted" / "0" / "episodes" / "eval-00003-1"
    aside.parent.mkdir(parents=True)
    (run.episodes / "eval-00003-1").rename(aside)
    found = {k: s for k, (s, _) in check_episodes(run.path, lines(run.path)).items()}
    assert found == {
        "eval-00000-0": "whole",
        "eval-00000-1": "whole",
        "eval-00000-9": "unrecorded",
        "eval-00003-0": "gone",
        "eval-00003-1": "whole",
    }
    assert main(["evidence", "verify", str(run.path)]) == 1
    assert "3 of 5 episodes as graded" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["grade", "log"])
def test_what_was_changed_is_not_trained_on(run, change):
    require_untouched(run.path, "corpus")
    if change == "grade":
        path = run.episodes / "eval-00003-1" / "grades.parquet"
        pq.write_table(pq.read_table(path), path, compression="none")
    else:
        (run.path / LOG).write_text((run.path / LOG).read_text().replace("scored", "Scored", 1))
    with pytest.raises(OpsdError, match=r"^corpus .*(grades\.parquet not as graded|edited)"):
        require_untouched(run.path, "corpus")


def test_a_run_without_a_log_has_nothing_to_be_changed(tmp_path):
    require_untouched(tmp_path, "corpus")


@pytest.mark.parametrize("log", [b"\x00\xff\n", b"[1]\n", b"{}\n"])
def test_a_log_that_can_t_be_read_is_not_listed_as_an_empty_one(tmp_path, capsys, log):
    (tmp_path / LOG).write_bytes(log)
    assert main(["evidence", "list", str(tmp_path)]) == 0
    assert "warning: " in (said := capsys.readouterr().err) and f"opsd evidence verify {tmp_path}" in said


# ---- copies -----------------------------------------------------------------------------------------------------------


def test_warning_until_every_line_is_copied(run, tmp_path, capsys):
    assert warning(lines(run.path), run.path).startswith(
        "4 lines of evidence lie in the run directory only: opsd evidence copy"
    )
    assert main(["evidence", "copy", str(run.path), str(tmp_path / "kept")]) == 0
    assert warning(lines(run.path), run.path) is None
    assert (tmp_path / "kept" / LOG).read_bytes() == (run.path / LOG).read_bytes() and verify(tmp_path / "kept")[1] == []
    run.evidence("g", 1, 1, True)
    assert warning(lines(run.path), run.path).startswith("1 of 6 lines of evidence are in no copy")
    assert main(["evidence", "verify", str(run.path), "--against", str(tmp_path / "kept")]) == 0
    assert "warning: 1 of 6 lines" in capsys.readouterr().err
    copy(run.path, tmp_path / "kept")
    assert len(lines(tmp_path / "kept")) == 7


def test_a_log_rewritten_as_a_whole_is_told_by_its_copy(run, tmp_path, capsys):
    copy(run.path, tmp_path / "kept")
    old = lines(run.path)
    for name in (LOG, "evidence.head"):
        (run.path / name).unlink()
    for x in old:  # a chain of its own, in itself without fault
        append(run.path, x["gate"], x["value"], x["threshold"], x["verdict"], x["detail"] + "!")
    assert verify(run.path)[1] == []
    assert main(["evidence", "verify", str(run.path), "--against", str(tmp_path / "kept")]) == 1
    assert "line 0: not as in the copy" in capsys.readouterr().out
    with pytest.raises(OpsdError, match="not as in the copy"):
        copy(run.path, tmp_path / "kept")


def test_copies_that_are_refused(run, tmp_path):
    with pytest.raises(OpsdError, match="lies in the run directory"):
        copy(run.path, run.path / "copy")
    (run.path / LOG).write_bytes((run.path / LOG).read_bytes().replace(b"scored", b"Scored", 1))
    with pytest.raises(OpsdError, match="damaged"):
        copy(run.path, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


# ---- invalidation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "version"),
    [
        ("version=3", 3),
        ("version=verl==0.9.1", None),
        ("version=cooperbench==0.0.29", None),
        (f"contract={CONTRACT.hash[:8]}", None),
        ("brief=process", None),
        ("brief=peer_spec+process", None),
    ],
)
def test_marks_reach_what_depends(run, tmp_path, where, version):
    child = RunDir(tmp_path / "runs" / "child")  # trained on the run's episodes: all of it depends on any mark
    write_json(child.path / "meta.json", {"opsd": {"brief": {"name": "none"}, "corpus": str(run.path)}})
    child.evidence("g", 1, 1, True)
    assert main(["evidence", "invalidate", str(tmp_path / "runs"), "--where", where, "--reason", "two installs"]) == 0
    (mark,) = marks(run.path)
    assert (mark.policy_version, mark.reason, mark.corpus) == (version, "two installs", "")
    assert [mark.covers(v) for v in (0, 3, None)] == [version is None, True, True]
    (above,) = marks(child.path)
    assert above.corpus == str(run.path) and above.covers(0) and above.covers(7)


def test_a_brief_of_the_actors_is_meant_too(run, tmp_path):
    other = tmp_path / "runs" / "actors"
    write_json(other / "meta.json", {"opsd": {"brief": {"name": "none"}, "actor_brief": {"name": "shared_backlog"}}})
    RunDir(other).evidence("g", 1, 1, True)
    assert main(["evidence", "invalidate", str(tmp_path), "--where", "brief=shared_backlog", "--reason", "x"]) == 0
    assert len(marks(other)) == 1 and marks(run.path) == []


def test_copies_of_a_log_are_not_marked(run, tmp_path, capsys):
    """A mark in a copy would make the log look rewritten."""
    assert main(["evidence", "copy", str(run.path), str(tmp_path / "runs" / "copy")]) == 0
    assert main(["evidence", "invalidate", str(tmp_path / "runs"), "--where", "version=3", "--reason", "x"]) == 0
    assert "1 of 1 runs" in capsys.readouterr().out
    assert main(["evidence", "verify", str(run.path), "--against", str(tmp_path / "runs" / "copy")]) == 0
    assert main(["evidence", "invalidate", str(tmp_path / "runs" / "copy"), "--where", "version=3", "--reason", "x"]) == 2
    assert "a copy of a log does not" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["version=4", "version=verl==0.9.0", f"contract={'0' * 8}", "brief=peer", "brief=gold_patch"])
def test_nothing_else_is_marked(run, where):
    assert main(["evidence", "invalidate", str(run.path), "--where", where, "--reason", "x"]) == 1
    assert marks(run.path) == [] and not invalidate(run.path, *parse_where(where), "x")


@pytest.mark.parametrize(
    "where", ["version=x", "version=", "version=²", "contract=123", "contract=nothexdigit", "recipe=opd", "brief=", "brief"]
)
def test_where_is_checked(run, where, capsys):
    assert main(["evidence", "invalidate", str(run.path), "--where", where, "--reason", "x"]) == 2
    assert "way out" in capsys.readouterr().err


def test_a_mark_has_a_reason(run, capsys):
    assert main(["evidence", "invalidate", str(run.path), "--where", "version=3", "--reason", " "]) == 2
    assert "--reason is empty" in capsys.readouterr().err and marks(run.path) == []


def test_a_claim_is_made_of_a_run_that_is_there(tmp_path):
    assert main(["evidence", "claim", str(tmp_path / "typo"), "a", "--status", "not established", "--text", "t"]) == 2
    assert not (tmp_path / "typo").exists()


# ---- predictions ------------------------------------------------------------------------------------------------------

# The seeds' table "anchor works if", as it would have been written down.
SEEDS = """
name: anchor
predictions:
  - {metric: eval.action.write, comparison: ">=", threshold: 0.10, denominator: {of: executed commands, at_least: 500}, baseline: {value: 0.118, source: base 9B}, works_if: about 10% or more}
  - {metric: eval.action.test, comparison: ">=", threshold: 0.04, denominator: {of: executed commands, at_least: 500}, baseline: {value: 0.058, source: base 9B}}
  - {metric: eval.action.git_inspect, comparison: "<=", threshold: 0.22, denominator: {of: executed commands, at_least: 500}, baseline: {value: 0.185, source: base 9B}}
  - {metric: eval.median_patch_bytes, comparison: ">=", threshold: 3000, denominator: {of: agents, at_least: 20}, baseline: {value: 3570, source: base 9B}}
  - {metric: eval.pairs, comparison: ">", threshold: 0.2, denominator: {of: scored pairs, at_least: 10}, baseline: {value: 0.2, of: 10, source: base 9B}}
"""


def numbers(
    write: float, test: float, git: float, patch: float, passed: int, scored: int = 10, lost: int = 0
) -> dict[str, Number]:
    return {
        "eval.action.write": Number(write, 1000, "executed commands"),
        "eval.action.test": Number(test, 1000, "executed commands"),
        "eval.action.git_inspect": Number(git, 1000, "executed commands"),
        "eval.median_patch_bytes": Number(patch, 20, "agents"),
        "eval.pairs": Number(passed / scored, scored, "scored pairs", lost=lost),
    }


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    (tmp_path / "anchor.yaml").write_text(SEEDS)
    write_down(tmp_path / "run", tmp_path / "anchor.yaml")
    return tmp_path / "run"


def verdicts(run: Path, values: dict[str, Number]) -> list[str]:
    return [j.verdict for j in judge(run, values)["anchor"]]


def test_the_seeds_own_runs(fresh):
    """Base meets all but '> 2/10'; opd-proto (6.2%, 0.8%, 33.5%, 1,326 B, 1/10) none."""
    assert verdicts(fresh, numbers(0.118, 0.058, 0.185, 3570, 2)) == ["pass"] * 4 + ["fail"]
    assert verdicts(fresh, numbers(0.062, 0.008, 0.335, 1326, 1)) == ["fail"] * 5
    assert verdicts(fresh, numbers(0.10, 0.04, 0.22, 3000, 3)) == ["pass"] * 5  # limits are met


def test_the_hash_is_the_file_s_and_comes_first(fresh, tmp_path):
    (line,) = lines(fresh)
    digest = hashlib.sha256((tmp_path / "anchor.yaml").read_bytes()).hexdigest()
    assert (line["gate"], line["value"]) == ("predicted", {"name": "anchor", "sha256": digest, "rows": 5})
    assert write_down(fresh, tmp_path / "anchor.yaml") == digest and len(lines(fresh)) == 1  # started again


def test_predictions_come_before_what_they_predict(run, tmp_path):
    (tmp_path / "anchor.yaml").write_text(SEEDS)
    with pytest.raises(OpsdError, match="4 episodes are graded"):
        write_down(run.path, tmp_path / "anchor.yaml")


def test_a_run_that_is_started_again_keeps_its_predictions(run, tmp_path, fresh):
    store = EpisodeStore(fresh / "episodes")
    RunDir(fresh).store_episode(store, episode("eval-00000-0"))
    before = (fresh / LOG).read_bytes()
    write_down(fresh, tmp_path / "anchor.yaml")
    assert (fresh / LOG).read_bytes() == before


def test_predictions_are_not_replaced(fresh, tmp_path):
    (tmp_path / "anchor.yaml").write_text(SEEDS.replace("0.10", "0.05"))
    with pytest.raises(OpsdError, match="never replaced"):
        write_down(fresh, tmp_path / "anchor.yaml")
    (kept,) = (fresh / "predictions").glob("*.yaml")
    kept.write_text(SEEDS.replace("0.10", "0.05"))
    assert [(j.verdict, j.why.split(" is ")[1]) for j in judge(fresh, {})["anchor"]] == [
        ("fail", "changed since it was written down")
    ]
    kept.unlink()
    assert [(j.verdict, j.why.split(" is ")[1]) for j in judge(fresh, {})["anchor"]] == [("fail", "gone")]


@pytest.mark.parametrize(
    ("number", "verdict", "why"),
    [
        (None, "fail", "no such number"),
        (Number(0.5, 10, "pairs that ran"), "fail", "not over scored pairs"),
        (Number(None, 10, "scored pairs"), "fail", "None"),
        (Number(float("nan"), 10, "scored pairs"), "fail", "nan"),
        (Number(0.5, 8, "scored pairs"), "fail", "8 of 10 scored pairs"),
        (Number(0.5, 8, "scored pairs", lost=1), "fail", "1 lost"),  # one more is missing without a fault
        (Number(0.5, 8, "scored pairs", lost=2), "void", "infrastructure faults took 2"),
        (Number(0.0, 6, "scored pairs", lost=4), "void", "took 4"),  # a bad value under faults is void too
        (Number(0.5, 10, "scored pairs"), "pass", ""),
        (Number(0.3, 10, "scored pairs"), "fail", ""),
    ],
)
def test_fail_closed(number, verdict, why):
    p = Prediction("eval.pairs", ">", 0.3, "scored pairs", 10)
    judged = judge_one(p, {} if number is None else {"eval.pairs": number})
    assert judged.verdict == verdict and why in judged.why


@pytest.mark.parametrize(("value", "verdict"), [(0.39, "fail"), (0.41, "pass")])
def test_against_the_baseline(value, verdict):
    p = Prediction("eval.pairs", ">=", 0.2, "scored pairs", 1, Baseline(0.2, "base"), "baseline")
    judged = judge_one(p, {"eval.pairs": Number(value, 10, "scored pairs")})
    assert judged.verdict == verdict and judged.compared == pytest.approx(value - 0.2)


def test_verdicts_are_recorded_once_and_again_when_they_change(fresh):
    for values in (numbers(0.2, 0.2, 0.1, 4000, 3), numbers(0.2, 0.2, 0.1, 4000, 3), numbers(0.2, 0.2, 0.1, 4000, 0, 8, 2)):
        record(fresh, judge(fresh, values))
    judged = [(x["gate"], x["verdict"]) for x in lines(fresh) if x["gate"].startswith("prediction:")]
    assert len(judged) == 6 and judged[-1] == ("prediction:anchor/eval.pairs >", "void") and verify(fresh)[1] == []


@pytest.mark.parametrize(
    "change",
    [
        {"comparison": "="},
        {"threshold": "10%"},
        {"threshold": True},
        {"threshold": float("nan")},
        {"denominator": 10},
        {"denominator": {"of": "scored pairs"}},
        {"denominator": {"of": "scored pairs", "at_least": 0}},
        {"against": "base"},
        {"against": "baseline"},
        {"baseline": {"value": 0.2}},
        {"treshold": 1},
        {"metric": None, "drop": "metric"},
    ],
)
def test_files_that_predict_nothing_are_refused(tmp_path, change):
    row = {"metric": "eval.pairs", "comparison": ">", "threshold": 0.2, "denominator": {"of": "scored pairs", "at_least": 10}}
    read_ok = tmp_path / "ok.yaml"
    read_ok.write_text(yaml.safe_dump({"name": "x", "predictions": [row]}))
    assert read(read_ok)[1] == (Prediction("eval.pairs", ">", 0.2, "scored pairs", 10),)
    changed = {k: v for k, v in (row | change).items() if k not in ("drop", change.get("drop"))}
    bad = tmp_path / "bad.yaml"
    for rows in ([changed], [], {"a": 1}, [row, row]):
        bad.write_text(yaml.safe_dump({"name": "x", "predictions": rows}))
        with pytest.raises(OpsdError, match=r"bad\.yaml"):
            write_down(tmp_path / "run", bad)
    for binary in (b"\xff\xfe\x00\x81", b"\x00"):
        bad.write_bytes(binary)
        with pytest.raises(OpsdError, match=r"bad\.yaml"):
            write_down(tmp_path / "run", bad)
    assert lines(tmp_path / "run") == []


# ---- claims -----------------------------------------------------------------------------------------------------------


def test_ledger_keeps_its_history(run, tmp_path):
    (tmp_path / "test_x.py").write_text("")
    known = {"eval.pairs": Number(0.5, 10, "scored pairs")}
    for new in (
        Claim("a", "pairs pass", "measured", ("eval.pairs",)),
        Claim("b", "masks are right", "verified in code", ("test_x.py::test_masks",)),
        Claim("c", "the anchor holds it", "not established"),
        Claim("a", "", "superseded", by="b"),
        Claim("c", "", "retracted", why="the log was of another run"),
    ):
        claim(run.path, new, known, tmp_path)
    a, b, c = claims(lines(run.path))
    assert (a.text, a.status, a.by, a.earlier) == ("pairs pass", "superseded", "b", ("measured",))
    assert (b.status, b.support) == ("verified in code", ("test_x.py::test_masks",))
    assert (c.text, c.status, c.why, c.earlier) == (
        "the anchor holds it",
        "retracted",
        "the log was of another run",
        ("not established",),
    )


@pytest.mark.parametrize(
    "new",
    [
        Claim("a", "text", "measured"),
        Claim("a", "text", "measured", ("eval.other",)),
        Claim("a", "text", "verified in code", ("no_such_file.py",)),
        Claim("a", "text", "verified in code"),
        Claim("a", "text", "not established", ("eval.pairs",)),
        Claim("a", "text", "superseded", by="a"),
        Claim("a", "text", "superseded", by="nobody"),
        Claim("a", "text", "retracted", why="never made"),
        Claim("a", "", "not established"),
        Claim("", "text", "not established"),
        Claim("a", "text", "proven"),
    ],
)
def test_a_status_stands_on_something(tmp_path, new):
    with pytest.raises(OpsdError, match="stands on something"):
        claim(tmp_path, new, {"eval.pairs"}, tmp_path)
    assert lines(tmp_path) == []


# ---- commands ---------------------------------------------------------------------------------------------------------


def test_commands(run, tmp_path, capsys):
    (tmp_path / "anchor.yaml").write_text(SEEDS)
    empty = tmp_path / "runs" / "b"
    assert main(["evidence", "predict", str(empty), str(tmp_path / "anchor.yaml")]) == 0
    assert main(["evidence", "predict", str(run.path), str(tmp_path / "anchor.yaml")]) == 2
    write_json(run.report, {"numbers": {"eval.pairs": {}}})
    made = [
        "evidence",
        "claim",
        str(run.path),
        "worth",
        "--status",
        "measured",
        "--text",
        "it works",
        "--support",
        "eval.pairs",
    ]
    assert main(made) == 0 and main([*made[:-1], "eval.nothing"]) == 2
    capsys.readouterr()
    assert main(["evidence", "list", str(run.path), "--gate", "claim"]) == 0
    out = capsys.readouterr().out
    assert "claim" in out and "episode" not in out
    assert main(["evidence", "verify", str(empty)]) == 0 and main(["evidence", "verify", str(tmp_path)]) == 2
    assert np.isfinite(json.loads((run.path / LOG).read_text().splitlines()[0])["time"])
