"""What keeping and stripping earlier reasoning costs: branches, and tokens read for each token of the loss.

    python benchmarks/thinking.py

A synthetic agent of 60 turns with about 150 tokens of reasoning, a command and 300 tokens of output a turn, and a peer's message every
few turns, through the real gateway. Where reasoning is kept the numbers depend on the lengths alone.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from verl_opsd.contract import EvalContract
from verl_opsd.models.tiny import make_tokenizer
from verl_opsd.tokens import Gateway, Generation, build_trajectories, statistics
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder

TURNS, REASONING, OUTPUT = 60, 150, 300
WORDS = [
    "the",
    "parser",
    "returns",
    "values",
    "that",
    "a",
    "caller",
    "then",
    "sorts",
    "by",
    "name",
    "before",
    "it",
    "writes",
    "them",
]


def text(rng: random.Random, tokens: int) -> str:
    """About as many tokens of words."""
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


class Talker:
    """An engine whose every reply reasons and then calls a command."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.rng = tokenizer, random.Random(0)

    async def generate(self, prompt_ids: list[int], **_: Any) -> Generation:
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "git status"}}\n</tool_call>'
        ids = self.tokenizer.encode(
            f"<think>\n{text(self.rng, REASONING)}\n</think>\n\n{call}<|im_end|>", add_special_tokens=False
        )
        return Generation(ids, [-0.1] * len(ids), "stop", 0)


def measured(thinking: str, every: int | None) -> dict[str, Any]:
    """Statistics of one agent with a message after every ``every``-th turn."""
    tokenizer, rng = make_tokenizer(), random.Random(1)
    contract = EvalContract(thinking=thinking, context_length=262144)  # type: ignore[arg-type]
    gateway = Gateway(Talker(tokenizer), VerlTokenBuilder(tokenizer, "qwen3"), VerlReplyParser(tokenizer, "hermes"), contract)
    session = gateway.session("e", "agent1")
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "You are agent1."},
        {"role": "user", "content": text(rng, 2000)},
    ]
    for turn in range(1, TURNS + 1):
        reply = asyncio.run(session.chat(history))
        history += [reply.message, {"role": "tool", "tool_call_id": "c", "content": text(rng, OUTPUT)}]
        if every and turn % every == 0:
            history.append({"role": "user", "content": f"[Message from agent2]: {text(rng, 60)}"})
    return statistics(build_trajectories(session.records()))


def main() -> None:
    """Prints the table."""
    print(
        "| a message every | reasoning | branches | tokens read | tokens read for each token of the loss |\n|---|---|---|---|---|"
    )
    for every in (None, 20, 10, 5, 2):
        for thinking in ("keep", "strip"):
            s = measured(thinking, every)
            when = "never" if every is None else f"{every} turns"
            ratio = s["tokens_per_loss_token"]
            print(f"| {when} | {thinking} | {s['branches']} | {s['sequence_tokens']:,} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
