"""A chat world of small integers: ChatML ids, an engine, a parser, and random conversations for property tests.

Ids: 1 <|im_start|>, 2 <|im_end|>, 3 system, 4 user, 5 assistant, 6 line break, 7 <tool_response>, 8 tools. Text is
numbers separated by spaces; the number n is the id n (10..99), and the id n + 100 is another encoding of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from verl_opsd.contract import EvalContract
from verl_opsd.privilege import ChatMarkers
from verl_opsd.tokens import Gateway, Generation, Sampling, ToolCall, TurnRecord

START, END, SYSTEM, USER, ASSISTANT, LINE, RESULT, TOOLS = range(1, 9)
MARKERS = ChatMarkers(START, END, (SYSTEM,), (USER,), (ASSISTANT,), (LINE, RESULT))
GENERATE = [START, ASSISTANT, LINE]


def text_ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def message_ids(message: dict) -> list[int]:
    role = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": USER}[message["role"]]
    result = [RESULT] if message["role"] == "tool" else []
    return [START, role, LINE, *result, *text_ids(message["content"]), END, LINE]


class StubBuilder:
    """Counts the messages that it renders, so that tests can see what was rendered again."""

    def __init__(self) -> None:
        self.rendered = 0

    def initial(self, messages, tools):
        self.rendered += len(messages)
        return ([TOOLS] if tools else []) + [i for m in messages for i in message_ids(m)] + GENERATE

    def extend(self, previous, updated, ids, tools):
        new = updated[len(previous) :]
        assert updated[: len(previous)] == previous and new
        self.rendered += len(new)
        cut_off = [] if ids[-1] == END else [END]
        return cut_off + [LINE] + [i for m in new for i in message_ids(m)] + GENERATE


class StubParser:
    async def parse(self, ids, tools):
        words = [i - 100 if i > 100 else i for i in ids if i != END]
        return " ".join(map(str, words)), [ToolCall("bash", "{}")] if words and words[0] % 2 else []


@dataclass
class StubEngine:
    """Replies from a list, or at random; keeps every prompt and reply that passed."""

    replies: list = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    async def generate(self, prompt_ids, *, session, turn, sampling):
        self.samplings.append(sampling)
        if self.replies:
            reply = self.replies.pop(0)
            if isinstance(reply, BaseException):
                raise reply
            if isinstance(reply, Generation):
                return reply
            ids = list(reply)
        else:
            ids = [self.rng.choice((0, 100)) + self.rng.randint(10, 99) for _ in range(self.rng.randint(1, 5))]
            ids += [END] if self.rng.random() < 0.8 else []
        self.seen.append((list(prompt_ids), ids))
        return Generation(ids, [-0.25 * (k + 1) for k in range(len(ids))], "stop", 7)


def make_gateway(engine: StubEngine, **contract) -> Gateway:
    values = {"max_tokens": 16, "context_length": 100_000, **contract}
    clock = iter(range(1_000_000))
    return Gateway(engine, StubBuilder(), StubParser(), EvalContract(**values), clock=lambda: float(next(clock)))


async def random_conversation(rng: random.Random, calls: int) -> tuple[tuple[TurnRecord, ...], StubEngine]:
    """One agent that meets what the harness does: tool results, peer messages, format errors, compaction, rewrites."""
    engine = StubEngine(rng=rng)
    session = make_gateway(engine).session("e", "agent1")
    await converse(session, rng, calls)
    return session.records(), engine


async def converse(session, rng: random.Random, calls: int) -> None:
    """The calls of :func:`random_conversation`; ``session`` has the methods ``chat`` and ``mark``."""

    def words() -> str:
        return " ".join(str(rng.randint(10, 99)) for _ in range(rng.randint(1, 4)))

    tools = [{"name": "bash"}] if rng.random() < 0.5 else None
    history = [{"role": "system", "content": words()}, {"role": "user", "content": words()}]
    for _ in range(calls):
        event = rng.random()
        if event < 0.15 and any(
            m["role"] == "assistant" for m in history
        ):  # compaction: a summary of the old turns, the recent ones kept
            transcript = [{"role": "user", "content": words()}]
            summary = await session.chat(transcript, None, kind="summarizer")
            recent = next(i for i in range(len(history) - 1, 0, -1) if history[i]["role"] == "assistant")
            history = [*history[:2], {**summary.message, "extra": {"summary": True}}, *history[recent:]]
        elif event < 0.25 and len(history) > 3:  # an old message is rewritten
            i = rng.randrange(1, len(history))
            history[i] = {**history[i], "content": words()}
        reply = await session.chat(history, tools)
        if rng.random() < 0.25:  # format error: the harness drops the reply and says why
            session.mark(reply.turn, "malformed")
            if rng.random() < 0.8:
                history = [*history, {"role": "user", "content": words()}]
            continue
        history = [*history, {**reply.message, "extra": {"cost": 0.0}}]
        history += [{"role": "tool", "tool_call_id": "c", "content": words()} for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.3:
            history.append({"role": "user", "content": words()})  # a peer's message
