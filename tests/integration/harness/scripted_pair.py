"""Sessions that play given replies, for whole pairs without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from verl_opsd.contract import EvalContract
from verl_opsd.tokens.gateway import Gateway, Generation, Reply, ToolCall

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PR = 'git add -A && git commit -qm work && git push -q && gh pr create --title "work" --body "work"'


def calls(*commands: str) -> dict[str, Any]:
    """An assistant message that runs commands, one tool call each."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": c})}}
            for i, c in enumerate(commands)
        ],
    }


Step = str | dict[str, Any] | BaseException | Callable[[], Any]


def until(condition: Callable[[], bool], then: Step) -> Callable[[], Any]:
    """A step that waits for a condition, then does ``then``."""

    async def step() -> Step:
        while not condition():
            await asyncio.sleep(0.02)
        return then

    return step


@dataclass
class Script:
    """A session that answers with its steps in order: a command, a message, an error to raise, or an async function
    whose result is one of these. ``seen`` keeps the messages of each call. Past the end it submits."""

    steps: Iterable[Step]
    seen: list[list[dict[str, Any]]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    prompt_tokens: int = 10

    def __post_init__(self) -> None:
        self._steps = iter(self.steps)

    async def chat(self, messages, tools=None, *, kind="policy"):
        self.seen.append([dict(m) for m in messages])
        self.kinds.append(kind)
        step = next(self._steps, SUBMIT)
        while callable(step):
            step = await step()
        if isinstance(step, BaseException):
            raise step
        message = calls(step) if isinstance(step, str) else step
        return Reply(message, len(self.kinds) - 1, self.prompt_tokens, 1)

    def mark(self, turn: int, kind: str) -> None:
        self.kinds[turn] = kind

    def observations(self) -> list[str]:
        """All tool results that the model has read, in order."""
        return [m["content"] for m in self.seen[-1] if m["role"] == "tool"]


class ScriptedEngine:
    """Engine, tokenization and parser of a real gateway in which a token is a byte, and a reply is a
    command, except ``no call``. Both agents of a pair play the same replies."""

    def __init__(self, replies: list[str]):
        self._replies = replies

    def gateway(self, contract: EvalContract) -> Gateway:
        return Gateway(self, self, self, contract)

    def initial(self, messages, tools):
        return list(json.dumps([m["content"] for m in messages]).encode())

    def extend(self, previous, updated, ids, tools):
        return self.initial(updated[len(previous) :], tools)

    async def generate(self, prompt_ids, *, session, turn, sampling):
        ids = list(self._replies[min(turn, len(self._replies) - 1)].encode())
        return Generation(ids, [-1.0] * len(ids), "stop", 0)

    async def parse(self, ids, tools):
        text = bytes(ids).decode()
        return text, [] if text == "no call" else [ToolCall("bash", json.dumps({"command": text}))]
