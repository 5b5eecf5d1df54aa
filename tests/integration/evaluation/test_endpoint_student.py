"""`opsd eval --endpoint` plays pairs against a student that another process serves: the tiny one, behind the gateway's HTTP face."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_endpoint import MANIFEST

from verl_opsd.cli.main import main
from verl_opsd.models.tiny import make_tiny
from verl_opsd.tokens.store import EpisodeStore

LIMITS = ["step_limit=2", "max_tokens=24"]


@pytest.fixture
def address(tmp_path):
    student, port = make_tiny(tmp_path / "tiny"), tmp_path / "port"
    command = [sys.executable, str(Path(__file__).with_name("tiny_server.py")), str(student), str(port), *LIMITS]
    with subprocess.Popen(command) as process:
        while not port.exists():
            assert process.poll() is None
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port.read_text()}/v1"
        process.terminate()


@pytest.mark.slow
def test_a_served_student_plays_with_and_without_a_manifest(address, tmp_path, capsys):
    subset, manifest = tmp_path / "subset.json", tmp_path / "manifest.yaml"
    subset.write_text(json.dumps({"tasks": [{"repo": "pocket_textkit_task", "task_id": 0, "pairs": [[1, 2]]}]}))
    manifest.write_text(yaml.safe_dump(MANIFEST | {"engine": "embedded"}))
    rest = ["--endpoint", address, "--model", "tiny", "--subset", str(subset), "--no-alone", "--set", *LIMITS]
    for name, more in (("unknown", []), ("known", ["--manifest", str(manifest)])):
        run = tmp_path / name
        assert main(["eval", str(run), *rest, *more]) == 0
        said = capsys.readouterr().out
        assert "planned 1, ran 1, scored 1, void 0" in said and ("unverified" in said) == (name == "unknown")
        (episode,) = EpisodeStore(run / "episodes").episodes()
        assert {a.status for a in episode.agents} == {"LimitsExceeded"} and episode.turns == ()
        assert main(["standings", str(run), "--json", str(tmp_path / "s.json")]) == 0
        assert ("manifest unverified" in " ".join(capsys.readouterr().out.split())) == (name == "unknown")
        (row,) = json.loads((tmp_path / "s.json").read_text())["standings"]
        assert row["serving"].get("engine") == (None if name == "unknown" else "embedded")
