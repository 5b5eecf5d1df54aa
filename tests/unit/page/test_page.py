"""The page of a made-up run: what its links show, what it leaves out, what it marks; and the commands that write it."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from page_run import make_run

from verl_opsd.cli.main import main
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.page.episodes import Options
from verl_opsd.evaluation.page.gather import read_meta
from verl_opsd.evaluation.write import write_report
from verl_opsd.evidence.chain import lines
from verl_opsd.evidence.predictions import write_down
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.store import EpisodeStore

PREDICTIONS = """
name: first
predictions:
  - {metric: eval.pairs_passed, comparison: ">=", threshold: 0.0, denominator: {of: scored pairs, at_least: 1}, works_if: anything}
  - {metric: eval.pairs_passed, comparison: ">", threshold: 0.0, denominator: {of: scored pairs, at_least: 500}}
  - {metric: kl.mean, comparison: "<", threshold: 1.0, denominator: {of: loss positions, at_least: 100}}
  - {metric: eval.no_such_metric, comparison: "<", threshold: 1.0, denominator: {of: scored pairs, at_least: 1}}
"""


class Reader(html.parser.HTMLParser):
    """Ids, links with their bitmaps, texts of scripts, and what a browser would load."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.anchors: list[str] = []
        self.links: dict[str, str] = {}
        self.scripts: dict[str, str] = {}
        self.loads: list[str] = []
        self._script: str | None = None
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a["id"]} if "id" in a else set()
        if tag == "a":
            self.anchors.append(a["href"])
            if "data-e" in a:
                self.links[a["data-t"]] = a["data-e"]
        if tag == "script":
            self._script = a.get("id", "code")
        self.loads += [v for k, v in a.items() if k in ("src", "srcset", "data") or (k == "href" and tag != "a")]

    def handle_endtag(self, tag):
        self._script = None if tag == "script" else self._script

    def handle_data(self, data):
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        else:
            self.words += data

    @property
    def rows(self) -> list[dict]:
        return json.loads(self.scripts["index"])["rows"]

    def behind(self, title: str) -> set[str]:
        """Episodes that a number's link shows."""
        bits = base64.b64decode(self.links[title])
        return {r["id"] for i, r in enumerate(self.rows) if bits[i >> 3] & (1 << (i & 7))}

    def block(self, episode: str):
        n = next(r["block"] for r in self.rows if r["id"] == episode)
        return json.loads(zlib.decompress(base64.b64decode(self.scripts[f"b{n}"])))


def read(run: RunDir) -> Reader:
    return Reader((run.path / "report.html").read_text())


def write(run: RunDir, **options) -> Reader:
    write_report(run, read_meta(run)[1], Options(**options))
    return read(run)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> RunDir:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "first.yaml").write_text(PREDICTIONS)
    write_down(folder / "a", folder / "first.yaml")
    run = make_run(folder / "a", skill=0.8)
    write(run)
    return run


@pytest.fixture
def run(made, tmp_path) -> RunDir:
    """A copy that a test may change."""
    shutil.copytree(made.path, tmp_path / "a")
    return RunDir(tmp_path / "a")


def test_one_file_that_loads_nothing_and_whose_links_resolve(made):
    page = read(made)
    assert page.loads == ["data:,"]
    assert {a.removeprefix("#") for a in page.anchors} <= page.ids
    assert {
        "standings",
        "tasks",
        "distillation",
        "behaviour",
        "merges",
        "gates",
        "predictions",
        "claims",
        "evidence",
        "provenance",
        "episodes",
    } <= page.ids
    assert not re.search(r"https?://(?!www\.w3\.org)", (made.path / "report.html").read_text())


def test_each_number_shows_the_episodes_behind_it(made):
    """Of every episode the store says whether it belongs behind a number."""
    page = read(made)
    episodes = [e for e in EpisodeStore(made.episodes).episodes() if e.split == "eval" and e.model_version == 3]
    both = {e.episode_id for e in episodes if e.grade and all(f.passed for f in e.grade.features)}
    some = {e.episode_id for e in episodes if e.grade and any(f.passed for f in e.grade.features)}
    assert both and both < some
    assert page.behind("evaluation, version 3: pairs passed") == both
    assert page.behind("evaluation, version 3: features passed") == some
    assert page.behind("evaluation, version 3: episodes") == {e.episode_id for e in episodes}
    assert page.behind("evaluation, version 3: coordinate") <= {e.episode_id for e in episodes}
    assert f"{len(both)}/{sum(e.scored for e in episodes)}" in page.words


def test_conversations_hold_every_token_and_its_divergence(made):
    page = read(made)
    (trained,) = [e for e in EpisodeStore(made.episodes).episodes() if e.episode_id == "train-00001-00002-0"]
    talk = page.block(trained.episode_id)
    for agent, said in zip(("agent1", "agent2"), talk["agents"], strict=True):
        replies = [i for i in said["items"] if i["r"] == "assistant"]
        turns = [t for t in trained.turns if t.agent_id == agent]
        assert [len(r["k"]) for r in replies] == [len(t.response_ids) for t in turns] == [len(r["c"]) for r in replies]
    evaluated = page.block("eval-00003-00000-0")
    assert all("k" not in i for a in evaluated["agents"] for i in a["items"])


def test_hidden_tests_are_shown_on_demand_only(run):
    assert "hidden test output" not in (run.path / "report.html").read_text() and "must not reach" not in read(run).words
    shown = write(run, reveal=True)
    assert shown.block("eval-00003-00000-0")["grade"]["features"][0]["output"].startswith("hidden test output")
    assert "This file shows hidden tests and answers" in shown.words
    hidden = write(run)
    assert hidden.block("eval-00003-00000-0")["grade"]["features"][0]["output"] is None


def test_without_the_tasks_conversations_are_left_out_and_said(run, tmp_path):
    page = write(run, dataset=tmp_path)
    assert all(r["block"] is None and "--dataset" in r["left_out"] for r in page.rows)
    assert f"{len(page.rows)} conversations are left out" in page.words


def test_what_does_not_fit_is_left_out_and_said_and_evaluation_goes_first(run):
    whole = (run.path / "report.html").stat().st_size
    page = write(run, budget=whole - 30_000)
    left = [r["id"] for r in page.rows if r["block"] is None]
    assert left and all(x.startswith("train") for x in left) and (run.path / "report.html").stat().st_size <= whole - 30_000
    assert f"The conversations of {len(left)} episodes are left out" in page.words


def test_without_the_tokenizer_replies_are_shown_as_the_harness_read_them(run):
    meta = json.loads((run.path / "meta.json").read_text())
    (run.path / "meta.json").write_text(json.dumps(meta | {"student": "/nowhere/student"}))
    page = write(run)
    assert "without colours: the student's folder /nowhere/student is not on this machine" in page.words
    items = page.block("train-00001-00002-0")["agents"][0]["items"]
    assert all("k" not in i for i in items) and any("bash(" in str(i["t"]) for i in items)


def test_telemetry_of_another_run_colours_nothing_and_is_said(run):
    shutil.rmtree(run.episodes / "train-00001-00002-0")
    assert "Tokens are not coloured: telemetry of the row train-00001-00002-0/agent" in write(run).words


def test_predictions_and_their_verdicts(made):
    page, report = read(made), json.loads(made.report.read_text())
    assert [(p["verdict"], p["metric"]) for p in report["predictions"]["first"]] == [
        ("pass", "eval.pairs_passed"),
        ("fail", "eval.pairs_passed"),
        ("pass", "kl.mean"),
        ("fail", "eval.no_such_metric"),
    ]
    assert "2 pass, 2 fail" in page.words and "the report has no such number" in page.words
    assert [x["verdict"] for x in lines(made.path) if x["gate"].startswith("prediction:")] == ["pass", "fail", "pass", "fail"]
    assert report["gates"]["failed"] == []  # a prediction is no gate of the run


def test_marks_reach_the_rows_that_depend(run, capsys):
    assert (
        main(["evidence", "invalidate", str(run.path), "--where", "version=0", "--reason", "served without its adapter"]) == 0
    )
    page = write(run)
    bad = {r["id"] for r in page.rows if r["bad"]}
    assert bad == {r["id"] for r in page.rows if r["cells"][1] == 0}
    assert (
        page.words.count("invalidated (version=0): served without its adapter") == 2
    )  # version 0, and training, which holds some of it
    assert "Invalidated, version=0" in page.words
    assert json.loads(run.report.read_text())["evidence"]["invalidated"][0]["reason"] == "served without its adapter"
    shutil.rmtree(run.episodes / "eval-00003-00001-0")
    capsys.readouterr()
    assert main(["report", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "invalidated version=0" in out and "1 unverifiable" in out and "eval.pairs_passed pass" in out


def test_rows_whose_logs_are_gone_or_changed_say_so(run):
    shutil.rmtree(run.episodes / "eval-00003-00001-0")
    grades = run.episodes / "eval-00003-00002-0" / "turns.parquet"
    shutil.copy(run.episodes / "eval-00003-00003-0" / "turns.parquet", grades)
    page = write(run)
    assert "1 episodes are not as they were graded (eval-00003-00002-0)" in page.words
    assert "altered: the files of 1 of" in page.words
    assert "unverifiable: 1 graded episodes are gone, and in no number here" in page.words
    notes = {r["id"]: r["note"] for r in page.rows if r["note"]}
    assert list(notes) == ["eval-00003-00002-0"] and "turns.parquet not as graded" in notes["eval-00003-00002-0"]


def test_a_claim_whose_rows_are_gone_is_unverifiable(run):
    made = [
        "evidence",
        "claim",
        str(run.path),
        "worth",
        "--status",
        "measured",
        "--text",
        "it helps",
        "--support",
        "eval.pairs_passed",
    ]
    assert main(made) == 0
    assert "unverifiable" not in write(run).words
    shutil.rmtree(run.episodes / next(iter(read(run).behind("evaluation, version 3: pairs passed"))))
    assert "1 episodes that it was measured on are gone" in write(run).words


def test_an_edited_log_is_the_first_thing_the_page_says(run):
    log = run.path / "evidence.jsonl"
    log.write_text(log.read_text().replace("max 2.1e-08", "max 2.1e-09"))
    assert "The evidence was changed: line" in write(run).words
    assert json.loads(run.report.read_text())["evidence"]["findings"]


def test_a_page_that_fails_is_on_record_and_loud(run, monkeypatch):
    (run.path / "report.html").unlink()
    run.report.unlink()
    monkeypatch.setattr("verl_opsd.evaluation.write.render", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(run, read_meta(run)[1])
    last = lines(run.path)[-1]
    assert (last["gate"], last["verdict"], last["detail"]) == ("report", "fail", "ZeroDivisionError: division by zero")
    assert json.loads(run.report.read_text())["standings"]["eval"]["ran"] == 8 and not (run.path / "report.html").exists()


def test_text_of_agents_is_text(tmp_path):
    """Markup in an episode's id or a reason does not become markup of the page."""
    run = make_run(tmp_path / "a<b>&", rounds=1, episodes=1, evaluated=2, turns=2)
    run.evidence("odd", 1, 2, True, "</script><script>alert(1)</script>")
    page = write(run)
    text = (run.path / "report.html").read_text()
    assert "<script>alert(1)" not in text and "</script><script>alert(1)</script>" in page.words


# ---- commands ---------------------------------------------------------------------------------------------------------


def test_report_command(run, capsys):
    (run.path / "report.html").unlink()
    assert main(["report", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "eval pairs passed" in out and str(run.path / "report.html") in out and "warning:" in out
    assert (run.path / "report.html").is_file()


def test_compare_command(made, tmp_path, capsys):
    other = make_run(tmp_path / "b", seed=9, skill=0.9, rounds=2)
    assert main(["report", "--compare", str(made.path), str(other.path), "--out", str(tmp_path / "out")]) == 0
    page = Reader((tmp_path / "out" / "comparison.html").read_text())
    said = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(said["runs"]) == ["a", "b"] and [s["model"] for s in said["standings"]] == ["a", "b"]
    assert [(c["metric"], c["model"], c["common"]) for c in said["comparisons"]] == [("pairs", "b", 3), ("features", "b", 3)]
    assert all(r["id"].startswith(("a ", "b ")) for r in page.rows) and "a and b compared" in page.words
    assert {x.split()[0] for x in page.behind("b: episodes")} == {"b"}


def test_compare_says_what_the_same_weights_explain_and_refuses_other_contracts(made, tmp_path, capsys):
    """The re-run is no model that is compared; a contract that differs is declared or refused."""
    again, other = (make_run(tmp_path / n, seed=s, skill=0.8) for n, s in (("again", 4), ("other", 9)))
    command = ["report", "--compare", *(str(r.path) for r in (made, again, other)), "--out", str(tmp_path / "out")]
    assert main([*command, "--reruns", str(again.path)]) == 0
    said = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [(c["metric"], c["model"]) for c in said["comparisons"]] == [("pairs", "other"), ("features", "other")]
    floors = {c["floor_of"] for c in said["comparisons"]}
    assert all(c["floor"] > 0 for c in said["comparisons"]) and floors == {
        "2 runs of the same weights: sampling and serving variance on one node (node not recorded)"
    }
    assert floors.pop() in Reader((tmp_path / "out" / "comparison.html").read_text()).words
    assert main([*command, "--reruns", str(made.path)]) == 2 and "not the baseline" in capsys.readouterr().err
    path = other.path / "contract.json"
    path.write_text(path.read_text().replace('"step_limit": 200', '"step_limit": 100'))
    assert main(command) == 2 and "step_limit" in capsys.readouterr().err
    assert main([*command, "--varies", "step_limit"]) == 0


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["RUN", "--compare", "RUN", "RUN"],
        ["--compare", "RUN"],
        ["--compare", "RUN", "RUN"],
        ["RUN", "--max-mb", "0"],
        ["RUN", "--max-mb", "nan"],
        ["RUN", "--max-mb", "inf"],
        ["RUN", "--dataset", "RUN/gone"],
        ["RUN", "--reruns", "RUN"],
    ],
)
def test_reports_that_are_refused(made, capsys, args):
    assert main(["report", *(a.replace("RUN", str(made.path)) for a in args)]) == 2
    assert "way out" in capsys.readouterr().err


def test_a_run_without_meta_data_has_no_page(tmp_path):
    with pytest.raises(OpsdError, match=r"meta\.json does not exist"):
        read_meta(RunDir(Path(tmp_path)))


def test_infinite_divergences_are_named_on_a_page_that_stands(tmp_path):
    run = make_run(tmp_path / "a", rounds=2, episodes=2, evaluated=1, turns=3)
    path = run.path / "telemetry" / "00002.npz"
    values = dict(np.load(path))
    values["divergence"][:3] = np.inf
    np.savez(path, **values)
    said = write_report(run, read_meta(run)[1])
    (what,) = said["distillation"]["infinite"]
    assert what.startswith("3 of ") and what.endswith(" values of divergence in round 2")
    assert f"infinite, and in no number above: {what}." in (run.path / "report.html").read_text()
    assert main(["report", str(run.path)]) == 0
