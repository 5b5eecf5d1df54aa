"""What a run scored is one set of numbers: in report.json, at the run's end, in the page, and from `opsd standings`."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil

import pyarrow.parquet as pq
import pytest
from page_run import make_run

from verl_opsd.cli.main import main
from verl_opsd.evaluation.page.gather import read_meta
from verl_opsd.evaluation.write import write_report
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.store import EpisodeStore

RATES = {
    "features": "features passed",
    "features_strict": "features passed, strictly",
    "pairs": "pairs passed",
    "pairs_any": "pairs with a pass",
    "non_empty": "non-empty patches",
    "submitted": "submitted",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    """Two versions of a policy. In the last one a passed feature is a free point, and a pair died before its first turn."""
    made = make_run(tmp_path_factory.mktemp("runs") / "a", skill=0.8, seed=3)
    store = EpisodeStore(made.episodes)
    last = [e for e in store.episodes() if e.split == "eval" and e.model_version == 3]
    e = next(e for e in last if e.grade is not None and e.grade.features[0].passed)
    free = dataclasses.replace(e.grade.features[0], strict=False, note="a free point")
    grade = dataclasses.replace(e.grade, features=(free, e.grade.features[1]))
    turns = tuple(dataclasses.replace(t, episode_id="eval-00003-00100-0") for t in e.turns)
    made.store_episode(store, dataclasses.replace(e, episode_id="eval-00003-00100-0", grade=grade, turns=turns))
    dead = dataclasses.replace(
        e, episode_id="eval-00003-00101-0", outcome="infra:sandbox_died", grade=None, agents=(), turns=(), messages={}
    )
    made.store_episode(store, dataclasses.replace(dead, model_version=-1))
    write_report(made, read_meta(made)[1])
    return made


@pytest.fixture(scope="module")
def said(run) -> dict[str, dict]:
    return json.loads(run.report.read_text())["standings"]


def test_report_json_counts_what_the_store_holds(run, said):
    """Against the tables on disk."""

    def table(name: str) -> list[dict]:
        files = run.episodes.rglob(f"{name}.parquet")
        return [{**row, "episode_id": path.parent.name} for path in files for row in pq.read_table(path).to_pylist()]

    episodes, grades = table("episodes"), table("grades")
    assert sorted(said) == ["eval", "eval@0", "train"]
    for key, own in (
        ("train", [e for e in episodes if e["split"] == "train"]),
        ("eval@0", [e for e in episodes if e["split"] == "eval" and e["model_version"] == 0]),
        ("eval", [e for e in episodes if e["split"] == "eval" and e["model_version"] != 0]),
    ):
        ids = {e["episode_id"] for e in own if e["outcome"] == "scored"}
        passed = [g for g in grades if g["episode_id"] in ids and g["passed"]]
        strict = [g for g in grades if g["episode_id"] in ids and (g["passed"] if g["strict"] is None else g["strict"])]
        row = said[key]
        assert (row["ran"], row["scored"], sum(row["void"].values())) == (len(own), len(ids), len(own) - len(ids))
        assert (row["features"]["passed"], row["features"]["total"]) == (len(passed), 2 * len(ids))
        assert row["features_strict"]["passed"] == len(strict)
        assert row["pairs_any"]["passed"] == len({g["episode_id"] for g in passed})
        assert row["submitted"]["total"] == 2 * len(own) - 2 * (key == "eval")  # the agents of the pair that died never ran
    assert said["eval"]["void"]["sandbox_died"] == 1
    assert said["eval"]["features"]["passed"] - said["eval"]["features_strict"]["passed"] == 1
    assert said["eval"]["differences"] == [
        "eval-00003-00100-0: feature 1 passes for the harness and fails strictly: a free point"
    ]


def test_the_command_says_the_same(run, said, tmp_path, capsys):
    keys = {"a@0": "eval@0", "a@3": "eval"}
    assert main(["standings", str(run.path), "--json", str(tmp_path / "s.json")]) == 0
    rows = {r["model"]: r for r in json.loads((tmp_path / "s.json").read_text())["standings"]}
    assert {keys[name]: r | {"model": keys[name]} for name, r in rows.items()} == {k: said[k] for k in keys.values()}
    assert "a@3: eval-00003-00100-0: feature 1 passes for the harness" in capsys.readouterr().out


def test_the_table_at_the_end_says_the_same(run, said, capsys):
    assert main(["report", str(run.path)]) == 0
    out = capsys.readouterr().out
    for key, row in said.items():
        for attribute in ("features", "pairs", *(["features_strict"] if key == "eval" else [])):
            r = row[attribute]
            shown = f"{r['passed']} of {r['total']}  (95% {r['low']:.0%} to {r['high']:.0%})"
            assert re.search(rf"│ {key} {RATES[attribute]} +│ {re.escape(shown)}", out), (key, attribute)
    assert "1 sandbox died" in out and "a free point" in out


def test_the_page_and_the_numbers_say_the_same(run, said):
    page = (run.path / "report.html").read_text()
    labels = {"train": "training episodes", "eval@0": "evaluation, version 0", "eval": "evaluation, version 3"}
    for key, row in said.items():
        for attribute, title in RATES.items():
            if attribute == "features_strict" and key != "eval":
                continue
            r = row[attribute]
            shown = f"{r['passed']}/{r['total']}"
            found = re.findall(rf'data-t="{labels[key]}: {title}"[^>]*>(\d+/\d+)<', page)
            assert set(found) == {shown} if r["passed"] else not found, (key, attribute)
    numbers = json.loads(run.report.read_text())["numbers"]
    for key, row in said.items():
        for attribute, metric in (("features", "features_passed"), ("pairs", "pairs_passed"), ("pairs_any", "pairs_any")):
            n, r = numbers[f"{key}.{metric}"], row[attribute]
            assert (n["value"], n["n"]) == (pytest.approx(r["passed"] / r["total"]), r["total"])


def test_raw_logs_that_are_gone_are_said_everywhere(run, tmp_path, capsys):
    """One episode of the last version is gone and another was changed; of the first version nothing is left, and its row stays."""
    shutil.copytree(run.path, tmp_path / "a")
    mine = RunDir(tmp_path / "a")
    for folder in mine.episodes.glob("eval-00000-*"):
        shutil.rmtree(folder)
    shutil.rmtree(mine.episodes / "eval-00003-00001-0")
    shutil.copy(mine.episodes / "eval-00003-00003-0" / "turns.parquet", mine.episodes / "eval-00003-00002-0" / "turns.parquet")
    first = "unverifiable: 8 graded episodes are gone, and in no number here"
    last = [
        "unverifiable: 1 graded episodes are gone, and in no number here",
        "altered: the files of 1 of 9 episodes are not as graded",
    ]
    write_report(mine, read_meta(mine)[1])
    said = json.loads(mine.report.read_text())["standings"]
    assert (said["eval@0"]["ran"], said["eval@0"]["features"]["total"], said["eval@0"]["doubts"]) == (0, 0, [first])
    assert said["eval"]["doubts"] == last and said["train"]["doubts"] == []
    page = html.unescape((mine.path / "report.html").read_text())
    assert first in page and all(x in page for x in last)
    capsys.readouterr()
    assert main(["report", str(mine.path)]) == 0
    ended = capsys.readouterr().out
    assert main(["standings", str(mine.path), "--json", str(tmp_path / "s.json")]) == 0
    assert main(["behaviour", str(mine.path)]) == 0
    assert f"a@0: {first}" in capsys.readouterr().out
    rows = {r["model"]: r["doubts"] for r in json.loads((tmp_path / "s.json").read_text())["standings"]}
    assert rows == {"a@0": [first], "a@3": last} and ended.count("unverifiable: ") == 2
    shutil.rmtree(mine.episodes)
    assert main(["standings", str(mine.path), "--json", str(tmp_path / "s.json")]) == 0
    rows = {r["model"]: r["doubts"] for r in json.loads((tmp_path / "s.json").read_text())["standings"]}
    assert rows["a@0"] == [first] and rows["a@3"][0].startswith("unverifiable: ")
