"""Episodes recorded through the real gateway by scripted agents, with a builder of their own; no sandbox, no model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from chat_tokenizer import chat_tokenizer

from verl_opsd.contract import EvalContract
from verl_opsd.corpus.rerender import Rendering
from verl_opsd.privilege import ChatMarkers
from verl_opsd.rundir import write_json
from verl_opsd.tokens import AgentOutcome, Episode, EpisodeStore, FeatureGrade, Gateway, Generation, Grade, ToolCall
from verl_opsd.verl_adapter.actor_briefs import HintedBuilder
from verl_opsd.verl_adapter.rendering import make_rendering

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
CONTRACT = EvalContract(max_tokens=1024, context_length=8192)
END = "<|im_end|>"


class Builder:
    """Renders by cutting the template's whole text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def _text(self, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

    def initial(self, messages, tools):
        return self.tokenizer.encode(self._text(messages, tools, True), add_special_tokens=False)

    def extend(self, previous, updated, ids, tools):
        new = self._text(updated, tools, True)[len(self._text(previous, tools, False)) :]
        end = self.tokenizer.eos_token_id
        return ([] if ids[-1] == end else [end]) + self.tokenizer.encode("\n" + new, add_special_tokens=False)


class Engine:
    """Plays texts."""

    def __init__(self, tokenizer: Any, replies: list[str | list[int]]):
        self.tokenizer, self.replies = tokenizer, replies

    async def generate(self, prompt_ids, *, session, turn, sampling):
        reply = self.replies[turn]
        ids = reply if isinstance(reply, list) else self.tokenizer.encode(reply + END, add_special_tokens=False)
        return Generation(ids, [-0.5 - i / 64 for i in range(len(ids))], "stop", 3)


class Parser:
    """Hermes tool calls."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    async def parse(self, ids, tools):
        text = self.tokenizer.decode(ids).removesuffix(END)
        found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        calls = [ToolCall(c["name"], json.dumps(c["arguments"], ensure_ascii=False)) for c in map(json.loads, found)]
        content = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
        return (content.rstrip("\n") if calls else content), calls


def call(command: str, text: str = "") -> str:
    """A reply with one tool call."""
    body = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
    return f"{text}{chr(10) if text else ''}<tool_call>\n{body}\n</tool_call>"


def rendering() -> Rendering:
    tokenizer = chat_tokenizer()
    return make_rendering(tokenizer, Builder(tokenizer), TOOLS)


async def play(
    episode: str,
    agent: str,
    replies: list[str | list[int]],
    task: str,
    contract: EvalContract,
    tool: str = "ok",
    hint: list[int] | None = None,
):
    """Turns and messages of one agent. A reply without a call is refused as the harness refuses it: its message is dropped. One that begins
    with SUMMARY is asked for by the harness, which goes on from it, and keeps it out of the history that it stores."""
    tokenizer = chat_tokenizer()
    builder: Any = Builder(tokenizer)
    if hint:
        builder = HintedBuilder(builder, hint, ChatMarkers.from_tokenizer(tokenizer))
    gateway = Gateway(Engine(tokenizer, replies), builder, Parser(tokenizer), contract)
    session = gateway.session(episode, agent)
    history = [{"role": "system", "content": f"You are {agent}."}, {"role": "user", "content": task}]
    shown = history  # what the policy reads; the stored history is more after a summary
    for text in replies:
        if isinstance(text, str) and text.startswith("SUMMARY"):
            reply = await session.chat([{"role": "user", "content": "Sum it up."}], None, kind="summarizer")
            shown = [*history[:2], {"role": "user", "content": reply.message["content"]}]
            continue
        reply = await session.chat(shown, TOOLS)
        if "tool_calls" not in reply.message:
            session.mark(reply.turn, "malformed")
            said = [{"role": "user", "content": "Use the tool."}]
        else:
            said = [{**reply.message, "extra": {"turn": reply.turn}}]
            said += [{"role": "tool", "tool_call_id": c["id"], "content": tool} for c in reply.message["tool_calls"]]
        history += said
        if shown is not history:
            shown += said
    return session.records(), history


def episode(
    name: str,
    first: list[str | list[int]],
    second: list[str | list[int]],
    passed: tuple[bool, bool] = (True, True),
    contract: EvalContract = CONTRACT,
    tool: str = "ok",
    hint: list[int] | None = None,
    **changes: Any,
) -> Episode:
    """A scored pair on features 1 and 2 of a task of its own."""
    played = {
        a: asyncio.run(play(name, a, r, f"Task of {name}.", contract, tool, hint))
        for a, r in (("agent1", first), ("agent2", second))
    }
    values: dict[str, Any] = {
        "episode_id": name,
        "repo": f"repo_{name}",
        "task_id": 1,
        "features": (1, 2),
        "split": "train",
        "contract_hash": contract.hash,
        "outcome": "scored",
        "turns": tuple(t for turns, _ in played.values() for t in turns),
        "agents": tuple(AgentOutcome(f"agent{i}", i, "Submitted", 2, "diff", 0, True) for i in (1, 2)),
        "grade": Grade("clean", None, {}, tuple(FeatureGrade(i, p, 1, 0, 0) for i, p in zip((1, 2), passed, strict=True))),
        "brief_kinds": {"agent1": "none", "agent2": "none"},
        "model_version": 3,
        "messages": {a: m for a, (_, m) in played.items()},
        **changes,
    }
    return Episode(**values)


def run_dir(path: Path, *episodes: Episode, contract: EvalContract = CONTRACT) -> Path:
    """A run directory with these episodes."""
    write_json(path / "contract.json", contract.as_dict())
    store = EpisodeStore(path / "episodes")
    for e in episodes:
        store.write(e)
    return path
