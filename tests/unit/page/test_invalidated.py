"""An invalidation reaches every table that has a row over the run: standings, grid, comparisons, behaviour, sweep, teacher matrix, the page."""

import json
import shutil
from io import StringIO

import pytest
from page_run import make_run
from rich.console import Console

from verl_opsd.cli.main import main, parser

WHY = "served without its adapter"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run whose evaluation of version 1 is invalidated, and one that nothing is wrong with; both a job of a sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "multirun.yaml").write_text("")
    for n in (0, 1):
        make_run(folder / str(n), rounds=1, episodes=1, evaluated=4, turns=3, seed=n)
        (folder / str(n) / ".hydra").mkdir()
        (folder / str(n) / ".hydra" / "overrides.yaml").write_text(f"- opsd.loss.anchor={n}\n")
    assert main(["evidence", "invalidate", str(folder / "0"), "--where", "version=1", "--reason", WHY]) == 0
    return folder


def shown(*arguments):
    """Lines of a command, and those that it strikes through."""
    console = Console(width=400, record=True, force_terminal=True, file=StringIO())
    args = parser().parse_args([str(a) for a in arguments])
    args.func(args, console)
    lines = console.export_text(styles=True, clear=False).splitlines()
    return console.export_text().splitlines(), [x for x in lines if "\x1b[1;9m" in x or "\x1b[9m" in x]


def test_standings_grid_and_comparisons(runs, tmp_path):
    out = tmp_path / "s.json"
    lines, struck = shown("standings", runs / "0", runs / "1", "--baseline", "0@0", "--grid", "--json", out)
    assert len(struck) == 2 and all("0@1" in x for x in struck)  # the heads of both tables
    assert sum(WHY in x for x in lines) == 1
    assert [x.endswith("; invalidated: 0@1") for x in lines if " against " in x or (" 0@0" in x and "pairs" in x)].count(
        True
    ) == 2
    rows = {r["model"]: r["invalidated"] for r in json.loads(out.read_text())["standings"]}
    assert rows == {"0@0": [], "0@1": [f"invalidated (version=1): {WHY}"], "1@0": [], "1@1": []}


def test_behaviour(runs, tmp_path):
    lines, struck = shown("behaviour", runs / "0", "--json", tmp_path / "b.json")
    assert f"0@1: invalidated (version=1): {WHY}" in lines and struck
    assert json.loads((tmp_path / "b.json").read_text())["invalidated"] == {
        "0@0": [],
        "0@1": [f"invalidated (version=1): {WHY}"],
    }


def test_sweep(runs):
    lines, struck = shown("sweep", runs)
    assert f"job 0: invalidated (version=1): {WHY}" in lines and len(struck) == 1
    page = (runs / "sweep.html").read_text()
    assert page.count('<tr class="invalid">') == 1 and WHY in page


def test_teacher_matrix_and_its_gate(runs, tmp_path):
    cells = [{"context": "base", "model": m, "pairs": [1, 10]} for m in ("student", "teacher")]
    cells += [{"context": "peer_spec", "model": "student", "pairs": [9, 10]}]
    table = tmp_path / "matrix.json"
    for name, good in (("0", False), ("1", True)):
        run = shutil.copytree(runs / name, tmp_path / name, ignore=shutil.ignore_patterns("eval-00000-*"))
        meta = json.loads((run / "meta.json").read_text())
        meta["opsd"]["actor_brief"] |= {"name": "peer_spec", "where": "eval"}
        (run / "meta.json").write_text(json.dumps(meta))
        briefed = {"context": "peer_spec", "model": "teacher", "run": str(run)}
        table.write_text(json.dumps({"cells": [*cells, briefed], "answer_free": {"peer_spec": True}, "noise": 0.0}))
        lines, struck = shown("teacher-matrix", table, "--gate", "peer_spec")
        assert any(WHY in x for x in lines) == (not good) and len(struck) == (not good)
        assert any("FAIL  what it stands on is valid: invalidated: teacher with peer_spec" in x for x in lines) == (not good)


def test_every_table_of_a_comparison_page(runs, tmp_path):
    assert main(["report", "--compare", str(runs / "1"), str(runs / "0"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "comparison.html").read_text()
    assert page.count("0 (invalidated)") >= 6  # standings (3 tables), comparisons, grid, behaviour
    assert "1 (invalidated)" not in page
    said = json.loads((tmp_path / "comparison.json").read_text())
    assert [bool(s["invalidated"]) for s in said["standings"]] == [False, True]
    assert {c["model"] for c in said["comparisons"]} == {"0 (invalidated)"}


EDITS = {
    "a value": lambda x: x | {"value": 0},
    "a line that is none": lambda x: {"a": 1, "hash": x["hash"]},
    "its gate": lambda x: x | {"gate": 3},
    "its time": lambda x: x | {"time": "yesterday"},
    "its verdict": lambda x: x | {"verdict": "fine"},
}


@pytest.mark.parametrize("gate,edit", [*(("invalidated", e) for e in EDITS), ("episode", "a value"), ("identity", "its time")])
def test_every_table_says_that_the_log_was_edited(runs, tmp_path, gate, edit, capsys, monkeypatch):
    """Whatever an edit leaves of a line: the mark that it took away must not be missed without a word."""
    monkeypatch.setenv("COLUMNS", "300")
    run = shutil.copytree(runs / "0", tmp_path / "run")
    log = (run / "evidence.jsonl").read_text().splitlines()
    at = next(n for n, line in enumerate(log) if json.loads(line)["gate"] == gate)
    log[at] = json.dumps(EDITS[edit](json.loads(log[at])))
    (run / "evidence.jsonl").write_text("\n".join(log) + "\n")
    for command in ("standings", "behaviour", "report"):
        assert main([command, str(run)]) == 0
        assert "evidence.jsonl is not as it was" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert main(["evidence", "list", str(run)]) == 0
    capsys.readouterr()
    assert main(["evidence", "verify", str(run)]) == 1 and f"line {at}: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["meta.json", "evidence.head"])
def test_a_file_that_cannot_be_read_is_named(runs, tmp_path, name, capsys):
    run = shutil.copytree(runs / "0", tmp_path / "run")
    (run / name).write_text("{")
    assert main(["evidence", "invalidate", str(run), "--where", "version=0", "--reason", WHY]) == 2
    assert name in capsys.readouterr().err
    if name == "meta.json":
        assert {main([command, str(run)]) for command in ("standings", "behaviour", "report")} == {2}
        assert capsys.readouterr().err.count("rule: it holds the JSON object") == 3
