"""`+recipe=full_eval`: every pair x seeds once, standings, and a second start that runs only what is missing."""

import json
import shutil

import pytest
from job import SHORT, report, run_trainer, table

pytestmark = pytest.mark.slow

ARGUMENTS = ("+recipe=full_eval", *SHORT, "opsd.evaluation.seeds=2", "hydra.run.dir=here")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("full_eval")
    first = run_trainer(cwd, *ARGUMENTS)
    first.assert_done()
    kept = {p.name: p.stat().st_mtime_ns for p in (cwd / "here" / "episodes").glob("eval-*")}
    shutil.rmtree(cwd / "here" / "episodes" / "eval-00000-00001-0")
    return first, run_trainer(cwd, *ARGUMENTS), kept


def test_every_pair_runs_once_a_seed(runs):
    first, _, kept = runs
    assert sorted(kept) == ["eval-00000-00000-0", "eval-00000-00001-0"]
    said = json.loads((first.directory / "evaluation.json").read_text())
    assert said["planned"] == sorted(kept) and said["seeds"] == 2 and said["parameters"] > 0 and said["serving"]["node"]
    episodes = table(first.directory, "episodes", "eval")
    assert {e["outcome"] for e in episodes} == {"scored"} and len({e["task_id"] for e in episodes}) == 1
    turns = table(first.directory, "turns", "eval")
    replies = [[r["response_ids"] for r in turns if r["episode_id"] == i and r["agent_id"] == "agent1"] for i in sorted(kept)]
    assert replies[0] != replies[1]  # seeds are different samples


def test_what_the_design_shows_is_printed_before_and_standings_while_it_runs(runs):
    first, _, _ = runs
    assert "cannot be shown with this design" in first.output
    assert first.output.index("with this design") < first.output.index("planned 2, ran 2, scored 2, void 0: features")
    assert report(first.directory)["standings"]["eval"]["scored"] == 2


def test_each_patch_is_graded_alone(runs):
    first, _, kept = runs
    assert {p.stem for p in (first.directory / "alone").glob("*.json")} == set(kept)


def test_a_second_start_runs_what_is_missing(runs):
    _, second, kept = runs
    assert second.returncode == 0, second.output[-4000:]
    assert "1 of 2 episodes are on record; 1 run" in second.output
    now = {p.name: p.stat().st_mtime_ns for p in (second.directory / "episodes").glob("eval-*")}
    assert now["eval-00000-00000-0"] == kept["eval-00000-00000-0"] and set(now) == set(kept)
