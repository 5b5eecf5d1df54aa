"""The model over a session: what is asked, what is recorded, and which replies are refused as malformed."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from cooperbench.agents.mini_swe_agent_v2.exceptions import FormatError

from verl_opsd.cooperbench.identity import coop_config
from verl_opsd.cooperbench.model import GatewayModel
from verl_opsd.cooperbench.stopping import RunGuard, StopSignal
from verl_opsd.tokens.gateway import Reply


class OneReply:
    def __init__(self, message):
        self.message, self.calls, self.marks = message, [], []

    async def chat(self, messages, tools=None, *, kind="policy"):
        self.calls.append((messages, tools, kind))
        return Reply(self.message, 3, 1234, 5)

    def mark(self, turn, kind):
        self.marks.append((turn, kind))


@pytest.fixture
def make():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def model(message):
        session = OneReply(message)
        guard = RunGuard(StopSignal(), 30)
        return GatewayModel(session, loop=loop, guard=guard, templates=coop_config()["model"]), session

    yield model
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def call(arguments, name="bash"):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": text}}


def assistant(*calls):
    return {"role": "assistant", "content": "think", "tool_calls": list(calls)}


HISTORY = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u", "extra": {"x": 1}},
    {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
    {"role": "user", "content": "nudge"},
]


def test_query_drops_exit_messages_and_extras_and_offers_bash(make):
    model, session = make(assistant(call({"command": "ls"})))
    message = model.query(HISTORY)
    sent, tools, kind = session.calls[0]
    assert sent == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "user", "content": "nudge"},
    ]
    assert [t["function"]["name"] for t in tools] == ["bash"] and kind == "policy"
    assert message["content"] == "think" and message["tool_calls"] == session.message["tool_calls"]
    extra = message["extra"]
    assert extra["actions"] == [{"tool_name": "bash", "tool_call_id": "c1", "command": "ls"}]
    assert extra["response"]["usage"]["prompt_tokens"] == 1234 and extra["cost"] == 0 and extra["turn"] == 3
    assert session.marks == []
    model.query(HISTORY)
    assert (model.prompt_tokens, model.completion_tokens) == (2468, 10)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "nothing"},
        assistant(call("{not json")),
        assistant(call({"cmd": "ls"})),
        assistant(call({"command": "ls"}, name="python")),
        assistant(call({"command": ["ls"]})),
        assistant(call({"command": None})),
        assistant(call({"command": 5})),
        assistant(call('["command"]')),
        assistant(call('"command"')),
        assistant(call("null")),
        assistant(call({"command": "ls"}), call({"command": 1})),
        assistant(call({"recipient": "agent2", "content": 3}, name="send_message")),
    ],
)
def test_malformed_replies_are_marked_and_answered(make, message):
    model, session = make(message)
    with pytest.raises(FormatError) as caught:
        model.query(HISTORY)
    assert session.marks == [(3, "malformed")] and (model.prompt_tokens, model.completion_tokens) == (1234, 5)
    answer = caught.value.messages[0]
    assert answer["role"] == "user" and "Tool call error" in answer["content"]


def test_arguments_cannot_rename_a_call(make):
    model, _ = make(assistant(call({"command": "ls", "tool_name": "send_message", "tool_call_id": "other"})))
    assert model.query(HISTORY)["extra"]["actions"] == [{"tool_name": "bash", "tool_call_id": "c1", "command": "ls"}]


def test_summary_is_a_turn_of_its_own_kind_without_tools(make):
    model, session = make({"role": "assistant", "content": "short"})
    summary = model.summarize_context([*HISTORY, assistant(call({"command": "ls"}))], "Summarise.")
    (sent,), tools, kind = session.calls[0]
    assert (kind, tools) == ("summarizer", None)
    assert sent["content"].startswith("Summarise.\n\n--- BEGIN TRANSCRIPT ---\n[system]\ns\n")
    assert sent["content"].endswith("--- END TRANSCRIPT ---") and "[exit]" not in sent["content"]
    assert '-> tool_call bash({"command": "ls"})' in sent["content"]
    assert (summary["role"], summary["content"], summary["extra"]["summary"]) == ("assistant", "short", True)
    assert (model.prompt_tokens, model.completion_tokens) == (1234, 5)
