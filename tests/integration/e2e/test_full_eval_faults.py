"""A scripted full-set evaluation: one pair is solved, one is ended by a fault of the server at every attempt."""

import json

import pytest
from job import report, run_trainer, table
from test_scripted import INIFILE, PUBLISH, SUBMIT, gold, key

from verl_opsd.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    here = tmp_path_factory.mktemp("faults")
    fault = {"agent1": [{"fault": "raise"}], "agent2": [SUBMIT] * 3}
    solved = {f"agent{i}": [gold(INIFILE, f), PUBLISH, SUBMIT] for i, f in ((1, 1), (2, 3))}
    (here / "script.json").write_text(json.dumps({key(INIFILE, (1, 2)): fault, key(INIFILE, (1, 3)): solved}))
    return run_trainer(
        here,
        "+recipe=full_eval",
        "opsd.tasks.max_eval=2",
        "opsd.evaluation.retries=1",
        "opsd.contract.max_tokens=1024",
        "actor_rollout_ref.rollout.name=opsd_scripted",
        f"+actor_rollout_ref.rollout.engine_kwargs.opsd.script={here / 'script.json'}",
    )


def test_a_fault_is_void_after_its_retries_and_no_score_of_zero(job, capsys):
    job.assert_done()
    outcomes = {e["episode_id"]: e["outcome"] for e in table(job.directory, "episodes", "eval")}
    assert outcomes["eval-00000-00001-0"] == "scored" and outcomes["eval-00000-00000-0"].startswith("infra:")
    lines = [json.loads(x) for x in (job.directory / "faults.jsonl").read_text().splitlines()]
    assert [(x["episode"], x["attempt"]) for x in lines] == [("eval-00000-00000-0", 0), ("eval-00000-00000-0", 1)]
    said = report(job.directory)["standings"]["eval"]
    assert (said["ran"], said["scored"], said["features"]["total"]) == (2, 1, 2)
    assert main(["standings", str(job.directory), "--json", str(job.cwd / "s.json")]) == 0
    (row,) = json.loads((job.cwd / "s.json").read_text())["standings"]
    assert (row["planned"], row["ran"], row["scored"], sum(row["void"].values())) == (2, 2, 1, 1)
    assert row["features"]["total"] == 2 and sum(row["work"].values()) == 1 and "ungraded" not in row["work"]
    assert main(["behaviour", str(job.directory)]) == 0 and "1 left out for infrastructure faults" in capsys.readouterr().out
