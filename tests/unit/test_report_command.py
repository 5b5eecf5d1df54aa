"""`opsd report` on what is no report: an error that names the file, exit code 2."""

from __future__ import annotations

import json

import pytest

from verl_opsd.cli.main import main


@pytest.mark.parametrize("content", ["", "{", "[]", "3", json.dumps({"recipe": "opd"}), json.dumps({"train": None})])
def test_garbage(tmp_path, capsys, content):
    (tmp_path / "report.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert f"{tmp_path}/report.json is not a report" in text and "way out:" in text


def test_missing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err
