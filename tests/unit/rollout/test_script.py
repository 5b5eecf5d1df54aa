"""Scripts of the scripted backend: every form of entry, and errors that name pair, agent and turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tokenizer
from verl_opsd.verl_adapter.rollout.scripted import Script, reply_text


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("hello", {"content": "hello"}),
        ({"text": "only text"}, {"content": "only text"}),
        ({"command": "ls"}, {"content": "", "tool_calls": [("bash", {"command": "ls"})]}),
        (
            {"text": "look", "command": "cat <<'EOF'\n\"é\"\\n\t<b>&\nEOF"},
            {"content": "look", "tool_calls": [("bash", {"command": "cat <<'EOF'\n\"é\"\\n\t<b>&\nEOF"})]},
        ),
        (
            {"tool": "send", "arguments": {"to": "agent2", "n": 1}},
            {"content": "", "tool_calls": [("send", {"to": "agent2", "n": 1})]},
        ),
    ],
)
def test_reply_is_what_the_chat_template_renders(entry, message):
    calls = [{"function": {"name": n, "arguments": a}} for n, a in message.get("tool_calls", [])]
    rendered = make_tokenizer().apply_chat_template(
        [{"role": "assistant", "content": message["content"], "tool_calls": calls}], tokenize=False
    )
    assert rendered == f"<|im_start|>assistant\n{reply_text(entry)}<|im_end|>\n"


def test_entries_are_found_by_session_and_turn():
    script = Script({"repo|task|f1": {"agent1": ["a", "b"]}, "p": {"agent2": ["c"]}})
    assert script.entry("repo|task|f1|episode-7|agent1", 1) == "b"  # a pair's key may hold the separator
    assert script.entry("p|e|agent2", 0) == "c"


@pytest.mark.parametrize(
    ("session", "turn", "text"),
    [
        ("p|e|agent1", 2, "pair p, agent1, turn 2: the script has 2 replies"),
        ("p|e|agent1", -1, "turn -1"),
        ("p|e|agent2", 0, "pair p, agent2, turn 0: the script has 0 replies"),
        ("q|e|agent1", 0, "pair q, agent1, turn 0"),
        ("agent1", 0, "needs a session"),
        (None, 0, "needs a session"),
    ],
)
def test_what_the_script_does_not_hold_is_named(session, turn, text):
    with pytest.raises(OpsdError) as e:
        Script({"p": {"agent1": ["a", "b"]}}).entry(session, turn)
    assert text in str(e.value)


@pytest.mark.parametrize(
    "entry",
    ["", 3, None, [], {}, {"text": ""}, {"fault": "sleep"}, {"fault": "die", "text": "x"}, {"tool": "bash"},
     {"command": "ls", "tool": "bash", "arguments": {}}, {"comand": "ls"}],
)  # fmt: skip
def test_malformed_entries_are_refused_when_the_script_is_read(entry):
    with pytest.raises(OpsdError, match=r"pair p, agent2, turn 1"):
        Script({"p": {"agent2": ["fine", entry]}})


def test_files(tmp_path: Path):
    path = tmp_path / "script.json"
    for bad in (None, str(path)):
        with pytest.raises(OpsdError, match="plays a script file"):
            Script.load(bad)
    path.write_text("{")
    with pytest.raises(OpsdError, match="is a JSON file"):
        Script.load(str(path))
    path.write_text(json.dumps({"p": {"agent1": [{"fault": "die"}]}}))
    assert Script.load(str(path)).entry("p|e|agent1", 0) == {"fault": "die"}
