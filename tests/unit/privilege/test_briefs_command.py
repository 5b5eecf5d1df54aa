"""``opsd briefs``: exit codes, and that answers are shown only when asked for."""

from __future__ import annotations

import json

import pytest

from verl_opsd.cli.main import main
from verl_opsd.privilege import brief_names
from verl_opsd.privilege.workflows import parse_workflow

PAIR = ["--pairs", "pocket_ledger_task/task1/f1_f2"]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["briefs", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_list_names_every_brief(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "list")
    assert code == 0 and all(name in out for name in brief_names()) and "untested" in out


def test_show(capsys):
    code, out, _ = run(capsys, "show", "role_owner", *PAIR)
    assert code == 0 and "You own the files" in out and "agent1 owns the files" in out


def test_answers_are_redacted_unless_revealed(capsys):
    code, out, err = run(capsys, "show", "gold_patch", *PAIR)
    assert code == 2 and "allow_answer" in err
    for argv, revealed in ((["show"], False), (["audit"], False), (["show", "--reveal"], True), (["audit", "--reveal"], True)):
        code, out, err = run(capsys, argv[0], "gold_patch", *PAIR, "--allow-answer", *argv[1:])
        assert code == 0 and ("def transfer" in out) == revealed, argv


@pytest.mark.parametrize(("name", "code"), [("peer_spec+process", 0), ("shared_backlog", 0), ("peer_spec+peer_spec", 2)])
def test_audit_codes(name, code, capsys):
    assert run(capsys, "audit", name)[0] == code


def test_audit_fails_on_a_leak(capsys, monkeypatch):
    from verl_opsd.privilege import Section, briefs, compose, register_brief

    monkeypatch.setattr(briefs, "_MAKERS", dict(briefs._MAKERS))
    register_brief("leaky", lambda case: compose(Section("x", "guidance", "Edit line 61."), name="leaky"))
    code, out, _ = run(capsys, "audit", "leaky", *PAIR)
    assert code == 1 and "line_number" in out and "2 not answer-free" in out


def test_draft_and_import(capsys, tmp_path):
    code, out, _ = run(capsys, "draft", *PAIR)
    text = out.split("\n", 1)[1]
    assert code == 0 and parse_workflow(text, "f", PAIR[1]).pair == PAIR[1]
    blocks = tmp_path / "blocks.json"
    blocks.write_text(json.dumps({PAIR[1]: {"shape": "handoff", "agents": {"agent1": "Do.", "agent2": "Wait."}}}))
    assert run(capsys, "import", str(blocks), str(tmp_path / "out"))[0] == 0
    code, out, _ = run(capsys, "show", "workflow", *PAIR, "--files", str(tmp_path / "out"), "--allow-answer", "--reveal")
    assert code == 0 and "Do." in out and "Wait." in out and "an unpublished branch scores zero" in out
    code, _, err = run(capsys, "import", str(blocks), str(tmp_path / "out"))
    assert code == 2 and "never overwritten" in err
    blocks.write_text("[")
    assert run(capsys, "import", str(blocks), str(tmp_path / "out2"))[0] == 2
    assert run(capsys, "audit", "workflow", "--files", str(tmp_path / "out"), "--allow-answer")[0] == 2  # other pairs have none
