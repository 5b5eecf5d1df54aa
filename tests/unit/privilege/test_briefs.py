"""Briefs: kinds, composition, hashes, registry and leaks."""

from __future__ import annotations

import hashlib

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.privilege import (
    Brief,
    Section,
    compose,
    make_brief,
    none,
    peer_spec,
    process,
    register_brief,
    student_leak,
)
from verl_opsd.privilege import briefs as module

TASK = "Add a `timeout` parameter to Client.get so that a slow server raises Timeout after that many seconds.\n"


def test_peer_spec_holds_the_peer_and_its_task_only():
    brief = peer_spec("agent1", "agent2", TASK)
    assert brief.kind == "scope" and brief.name == "peer_spec"
    assert brief.text.endswith(TASK.strip()) and "agent2" in brief.text and "agent1" in brief.text
    assert brief == peer_spec("agent1", "agent2", TASK)


def test_none_is_empty():
    brief = none()
    assert (brief.text, brief.kind, brief.sections, brief.ids(None)) == ("", "none", (), [])


def test_kind_is_the_strongest_and_text_is_in_order():
    scope, guidance = Section("a", "scope", "A."), Section("b", "guidance", "B.")
    both = compose(guidance, compose(scope, name="inner"), none())
    assert (both.name, both.kind, both.text) == ("b+inner+none", "guidance", "B.\n\nA.")
    assert both.sections == (guidance, scope)


def test_hash_covers_everything():
    section = Section("a", "scope", "A.")
    variants = [
        compose(section),
        compose(section, name="other"),
        compose(Section("a", "scope", "A. ")),
        compose(Section("a", "guidance", "A.")),
        compose(Section("a", "scope", "A.", private=False)),
        compose(section, Section("b", "scope", "")),
        compose(Section("a", "answer", "A.", answer="gold"), allow_answer=True),
        compose(Section("a", "answer", "A.", answer="tests"), allow_answer=True),
        none(),
    ]
    assert len({b.hash for b in variants}) == len(variants)
    assert compose(section).hash == hashlib.sha256(b'["a","scope",[["a","scope","A.",true,null]]]').hexdigest()


def test_answers_need_to_be_allowed():
    gold = Section("gold", "answer", "diff --git a b", answer="gold")
    for make in (lambda: compose(gold), lambda: compose(peer_spec("a", "b", TASK), gold)):
        with pytest.raises(OpsdError, match="gold"):
            make()
    allowed = compose(process(), gold, allow_answer=True)
    assert allowed.kind == "answer"
    with pytest.raises(OpsdError):
        compose(allowed)  # permission is not inherited
    with pytest.raises(OpsdError):
        Brief("x", "scope", gold.text, (gold,))  # nor can the kind be hidden


def test_make_brief():
    peers = {"agent2": TASK}
    assert make_brief("peer_spec", "agent1", peers) == peer_spec("agent1", "agent2", TASK).__class__(
        "peer_spec", "scope", *_text_and_sections(peer_spec("agent1", "agent2", TASK))
    )
    both = make_brief("peer_spec+process", "agent1", peers)
    assert both.kind == "guidance" and both.name == "peer_spec+process"
    assert both.text == peer_spec("agent1", "agent2", TASK).text + "\n\n" + process().text
    assert make_brief("none", "agent1", {}).text == ""
    three = make_brief("peer_spec", "agent1", {"agent3": "Third task.", "agent2": TASK})
    assert three.text.index("agent2") < three.text.index("agent3")


def _text_and_sections(brief):
    return brief.text, brief.sections


def test_make_brief_refuses():
    with pytest.raises(OpsdError, match=r"'none', 'own_tests', 'partition_by_region', 'peer_spec', 'process'"):
        make_brief("peer_specs", "agent1", {"agent2": TASK})
    with pytest.raises(OpsdError, match="unknown"):
        make_brief("", "agent1", {})
    with pytest.raises(OpsdError):
        make_brief("peer_spec", "agent1", {})
    with pytest.raises(OpsdError):
        make_brief("peer_spec", "agent1", {"agent1": TASK})
    with pytest.raises(OpsdError):
        peer_spec("agent1", "agent2", " \n")


def test_register_brief(monkeypatch):
    monkeypatch.setattr(module, "_MAKERS", dict(module._MAKERS))
    gold = Section("gold", "answer", "the patch", answer="gold")
    register_brief("gold", lambda case: compose(gold, allow_answer=True))
    with pytest.raises(OpsdError, match="answer"):
        make_brief("gold", "agent1", {})
    assert make_brief("gold", "agent1", {}, allow_answer=True).text == "the patch"
    for taken in ("gold", "a+b", ""):
        with pytest.raises(OpsdError):
            register_brief(taken, lambda case: none())


def test_process_tells_what_it_must():
    text = process().text.lower()
    assert process().kind == "guidance"
    for part in ("message your peer", "commit and push", "exact commit sha", "read its diff", "never invent"):
        assert part in text


def test_student_leak_finds_runs_of_eight_words():
    brief = peer_spec("agent1", "agent2", "One two three four five six seven eight nine.")
    assert student_leak(brief, ["nothing here", brief.sections[0].text]) == []  # the introduction is not private
    seven = "one two three four five six seven"
    assert student_leak(brief, [seven, f"zero {seven} nine"]) == []
    eight = "two three four five six seven eight nine"
    assert student_leak(brief, ["x TWO, three four-five\nsix seven; eight nine!"]) == [eight]
    assert len(student_leak(brief, [f"one {eight}"] * 2)) == 2
    assert student_leak(brief, ["someone two three four five six seven eight"]) == []  # whole words only


def test_student_leak_of_short_sections():
    brief = compose(Section("port", "scope", "Port 8123"), Section("empty", "scope", " "))
    assert student_leak(brief, ["we use port 8123 today"]) == ["port 8123"]
    assert student_leak(brief, ["port 81234", ""]) == []
    assert student_leak(none(), ["anything"]) == []
