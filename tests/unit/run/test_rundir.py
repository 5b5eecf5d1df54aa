"""The run directory: atomic files, append-only evidence, gates that fail closed, stages without half manifests."""

import json
import threading

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir, write_json


def lines(run: RunDir) -> list[dict]:
    return [json.loads(x) for x in (run.path / "evidence.jsonl").read_text().splitlines()]


def test_evidence_is_appended_and_complete_under_concurrent_writers(tmp_path):
    run = RunDir(tmp_path)
    threads = [
        threading.Thread(target=lambda n=n: [run.evidence(f"g{n}", i, 0, True, "x" * 500) for i in range(50)]) for n in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seen = lines(run)
    assert len(seen) == 400
    for n in range(8):
        assert [x["value"] for x in seen if x["gate"] == f"g{n}"] == list(range(50))


def test_failed_gate_is_recorded_before_it_stops(tmp_path):
    run = RunDir(tmp_path)
    run.require("good", 1, 2, True, "nothing")
    with pytest.raises(OpsdError, match="gate bad: 3 against 2"):
        run.require("bad", 3, 2, False, "look")
    assert [(x["gate"], x["verdict"]) for x in lines(run)] == [("good", "pass"), ("bad", "fail")]


def test_stage_that_fails_leaves_no_manifest(tmp_path):
    run = RunDir(tmp_path)
    with run.stage(1, "collect", {"a": 1}) as out:
        out["rows"] = 4
    with pytest.raises(ValueError), run.stage(1, "train"):
        raise ValueError
    (only,) = run.stages()
    assert (only["stage"], only["outputs"], only["inputs"], only["state"]) == ("collect", {"rows": 4}, {"a": 1}, "done")
    assert only["seconds"] >= 0


def test_write_json_replaces_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "a" / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"ä": [1, None]})
    assert json.loads(path.read_text()) == {"ä": [1, None]}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_run_directory_must_be_known(monkeypatch):
    monkeypatch.delenv("OPSD_RUN_DIR", raising=False)
    with pytest.raises(OpsdError, match="OPSD_RUN_DIR"):
        RunDir.from_env()
