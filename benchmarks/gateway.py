"""The gateway's own time a turn: one agent, 128 turns, 64k tokens, with a real tokenizer, chat template and tool parser.

    python benchmarks/gateway.py [--turns 128] [--tokens 65536] [--profile]

The engine answers at once and its time is taken off, so what is left is the gateway: checks, finding the branch, the new messages'
tokens, the record, the tool call. ``in process`` is what verl's agent loop pays. ``HTTP`` is the whole round trip of a client on the same
machine, which sends and parses the whole conversation each time, as the protocol wants. Processor time of all threads: it does
not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import datetime
import json
import pstats
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
from demo import RESULTS, machine

from verl_opsd.contract import EvalContract
from verl_opsd.models.tiny import make_tokenizer
from verl_opsd.tokens import Gateway, Generation
from verl_opsd.tokens.http import GatewayServer
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder

BASH = {"name": "bash", "description": "Execute a bash command"}
TOOLS = [{"type": "function", "function": {**BASH, "parameters": {"type": "object", "properties": {}}}}]
Chat = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]


class Instant:
    """Answers every prompt with the same tool call; counts its own time and the prompt's length."""

    def __init__(self, tokenizer: Any):
        text = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call><|im_end|>'
        self.ids = tokenizer.encode(text)
        self.seconds, self.length = 0.0, 0

    async def generate(self, prompt_ids: list[int], **_: Any) -> Generation:
        begin = time.process_time()
        self.length = len(prompt_ids) + len(self.ids)
        reply = Generation(list(self.ids), [-1.0] * len(self.ids), "stop", 0)
        self.seconds += time.process_time() - begin
        return reply


async def converse(chat: Chat, engine: Instant, turns: int, result: str) -> np.ndarray:
    """Milliseconds of each turn, without the engine's."""
    history = [{"role": "system", "content": "You are agent1."}, {"role": "user", "content": "Find the fault."}]
    spent = []
    for _ in range(turns):
        messages = [dict(m) for m in history]
        begin, engine_before = time.process_time(), engine.seconds
        message = await chat(messages)
        spent.append(time.process_time() - begin - (engine.seconds - engine_before))
        call = message["tool_calls"][0]["id"]
        history = [*history, message, {"role": "tool", "tool_call_id": call, "content": result}]
    return np.array(spent) * 1e3


def row(name: str, ms: np.ndarray) -> str:
    """One line of the table; the first turns, which load what is loaded once, are left out."""
    ms = ms[2:]
    tail = ms[-16:]
    return f"{name:<28}{ms.mean():>8.2f}{np.median(ms):>8.2f}{np.percentile(ms, 99):>8.2f}{tail.mean():>14.2f}"


async def main() -> None:
    """Prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--profile", action="store_true", help="where the time in process goes; prints only")
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    contract = EvalContract(max_tokens=256, context_length=2 * args.tokens)

    def gateway() -> tuple[Gateway, Instant]:
        engine = Instant(tokenizer)
        return Gateway(engine, VerlTokenBuilder(tokenizer, "qwen3"), VerlReplyParser(tokenizer, "hermes"), contract), engine

    line = "-rw-r--r-- 1 agent agent 1024 setup.py\n"
    new_tokens = args.tokens // args.turns - len(Instant(tokenizer).ids) - 12
    result = line * round(new_tokens / len(tokenizer.encode(line)))

    core, engine = gateway()
    session = core.session("episode", "agent1")

    async def in_process(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return (await session.chat(messages, TOOLS)).message

    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    direct = await converse(in_process, engine, args.turns, result)
    if args.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        return
    if {t.branch for t in session.records()} != {0}:
        raise SystemExit("the conversation was not one branch")
    length = engine.length

    core, engine = gateway()
    async with GatewayServer(core) as server:
        access = server.open("episode", "agent1")
        headers = {"Authorization": f"Bearer {access.secret}"}
        async with httpx.AsyncClient(base_url=access.url, headers=headers, timeout=60, trust_env=False, verify=False) as http:

            async def over_http(messages: list[dict[str, Any]]) -> dict[str, Any]:
                body = json.dumps({"model": "student", "messages": messages, "tools": TOOLS})
                answer = await http.post("/chat/completions", content=body)
                return answer.raise_for_status().json()["choices"][0]["message"]

            remote = await converse(over_http, engine, args.turns, result)
    lines = [
        f"{datetime.date.today()}, {machine()}: python benchmarks/gateway.py",
        f"one agent, {args.turns} turns, {length} tokens at the end, about {length // args.turns} new tokens a turn",
        "",
        f"{'ms of processor time a turn':<28}{'mean':>8}{'p50':>8}{'p99':>8}{'last 16 turns':>14}",
        row("in process", direct),
        row("HTTP, client and server", remote),
        row("HTTP's part of it", remote - direct),
    ]
    print("\n".join(lines))
    (RESULTS / "gateway.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
