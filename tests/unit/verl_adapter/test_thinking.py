"""Reasoning of earlier turns: kept, or taken out once a user message follows it, on a real tokenizer."""

from __future__ import annotations

import asyncio
import random
import re

import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.contract import EvalContract
from verl_opsd.tokens import Gateway, Generation, Session, build_trajectories, statistics
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


class OddEngine:
    """Replies with given texts, cut into tokens at random places: other ids than the tokenizer's own."""

    def __init__(self, texts: list[str], rng: random.Random):
        self.texts, self.rng = texts, rng
        self.seen: list[tuple[list[int], list[int]]] = []

    async def generate(self, prompt_ids: list[int], **_: object) -> Generation:
        text, ids, encode = self.texts.pop(0) + "<|im_end|>", [], chat_tokenizer().encode
        while text:
            n = self.rng.randint(1, 6) if not text.startswith("<|im_end|>") else len(text)
            at = text.find("<|im_end|>")
            n = min(n, at) if at > 0 else n
            ids += encode(text[:n], add_special_tokens=False)
            text = text[n:]
        self.seen.append((prompt_ids, ids))
        return Generation(ids, [-0.5] * len(ids), "stop", 0)


def open_session(texts: list[str], thinking: str, seed: int = 0) -> tuple[Session, OddEngine]:
    tokenizer, engine = chat_tokenizer(), OddEngine(texts, random.Random(seed))
    builder, parser = VerlTokenBuilder(tokenizer, "qwen3"), VerlReplyParser(tokenizer, "hermes")
    return Gateway(engine, builder, parser, EvalContract(max_tokens=500, thinking=thinking)).session("e", "agent1"), engine


def by_hand(messages: list[dict]) -> list[dict]:
    """What a template of a reasoning model shows, by a regular expression."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    pattern = re.compile(r"\A(?:(?!<tool_call>).)*?</think>\n*", re.DOTALL)
    return [
        {**m, "content": pattern.sub("", m["content"])} if m["role"] == "assistant" and i < last else m
        for i, m in enumerate(messages)
    ]


def talk(session: Session, engine: OddEngine, thinking: str, events: list[str]) -> list[str]:
    """One call an event (what comes before the next call), and checks every prompt's text; the fork reasons of new branches."""
    tokenizer, seen, reasons = chat_tokenizer(), set(), []
    history: list[dict] = [{"role": "system", "content": "You are agent1."}, {"role": "user", "content": "Build it."}]
    for event in events:
        reply = asyncio.run(session.chat(history))
        shown = by_hand(history) if thinking == "strip" else history
        whole = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(engine.seen[-1][0]) == whole
        record = session.records()[-1]
        reasons += [record.fork_reason] if record.branch not in seen else []
        seen.add(record.branch)
        if event == "retry":  # the harness drops the reply and says why
            history = [*history, {"role": "user", "content": "No tool call."}]
            continue
        history = [*history, reply.message, {"role": "tool", "tool_call_id": "c", "content": "a.py"}]
        if event == "message":
            history = [*history, {"role": "user", "content": "[Message from agent2]: hello"}]
        if event == "compaction":
            history = [*history[:2], {"role": "assistant", "content": "A summary."}, *history[-2:]]
    return reasons


def assert_exact(session: Session, engine: OddEngine) -> None:
    """Every prompt and reply is rebuilt from the records; every sampled token is in one branch's loss, with its own id."""
    trajectories = {t.branch: t for t in build_trajectories(session.records())}
    for record, (prompt, ids) in zip(session.records(), engine.seen, strict=True):
        row = trajectories[record.branch]
        assert row.input_ids[: record.prompt_len].tolist() == prompt
        assert row.input_ids[record.prompt_len : record.end].tolist() == ids
        assert row.loss_mask[record.prompt_len : record.end].all()
    sampled = sum(len(ids) for _, ids in engine.seen)
    assert sum(int(t.loss_mask.sum()) for t in trajectories.values()) == sampled


EVENTS = st.lists(st.sampled_from(["tool", "message", "retry", "compaction"]), min_size=1, max_size=7)
TEXTS = ["<think>\nlook é\n</think>\n\nA.", "<think>\n\n</think>\n" + CALL, "B.", CALL, "<think>never closed", "t</think>x"]


@settings(max_examples=40, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 2**32), thinking=st.sampled_from(["keep", "strip"]))
def test_the_model_reads_what_a_template_shows(events: list[str], seed: int, thinking: str) -> None:
    rng = random.Random(seed)
    session, engine = open_session([rng.choice(TEXTS) for _ in events], thinking, seed)
    talk(session, engine, thinking, events)
    assert_exact(session, engine)


@pytest.mark.parametrize(
    ("thinking", "events", "reasons"),
    [
        ("keep", ["tool", "message", "tool", "message", "tool"], ["start"]),
        ("strip", ["tool", "tool", "tool"], ["start"]),
        ("strip", ["tool", "message", "tool", "message", "tool"], ["start", "thinking_stripped", "thinking_stripped"]),
        ("strip", ["message", "message", "message"], ["start", "thinking_stripped", "thinking_stripped"]),
        ("strip", ["tool", "retry", "tool"], ["start", "thinking_stripped"]),
        ("keep", ["tool", "retry", "tool"], ["start", "retry"]),
        ("strip", ["tool", "compaction", "tool"], ["start", "template_rewrite"]),
        ("strip", ["tool", "compaction", "message", "tool"], ["start", "template_rewrite", "thinking_stripped"]),
    ],
)
def test_each_peer_message_forks_where_reasoning_is_stripped(thinking: str, events: list[str], reasons: list[str]) -> None:
    session, engine = open_session([TEXTS[0]] * len(events), thinking)
    assert talk(session, engine, thinking, events) == reasons
    assert_exact(session, engine)


def test_without_reasoning_a_peer_message_forks_nothing() -> None:
    session, engine = open_session(["B.", CALL, "B."], "strip")
    assert talk(session, engine, "strip", ["message", "message", "message"]) == ["start"]


def test_stripped_history_keeps_the_sampled_ids_of_everything_else() -> None:
    session, engine = open_session(["<think>\nT\n</think>\n\nAbcdefgh ijkl.", "B."], "strip", seed=5)
    talk(session, engine, "strip", ["message", "tool"])
    (_, reply), (prompt, _) = engine.seen
    kept = VerlTokenBuilder(chat_tokenizer(), "qwen3").without_reasoning(reply)
    tail = kept[-4:]  # of the reply's own, odd ids
    assert len(kept) < len(reply) and reply[-4:] == tail
    assert any(prompt[i : i + 4] == tail for i in range(len(prompt)))


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>\nT\n</think>\n\nA", "A"),
        ("T</think>A", "A"),
        ("<think>é漢</think>\n\n\nÉ", "É"),
        ("<think></think>", ""),
        ("A", "A"),
        ("<think>A", "<think>A"),
        (CALL.replace("ls", "echo </think>"), CALL.replace("ls", "echo </think>")),
        ("<think>a</think>\nb</think>c", "b</think>c"),
    ],
)
def test_reasoning_is_cut_at_its_end(text: str, rest: str) -> None:
    tokenizer = chat_tokenizer()
    builder = VerlTokenBuilder(tokenizer, "qwen3")
    for seed in range(5):
        rng, ids, left = random.Random(seed), [], text
        while left:
            n = rng.randint(1, 4)
            ids += tokenizer.encode(left[:n], add_special_tokens=False)
            left = left[n:]
        kept = builder.without_reasoning(ids)
        assert tokenizer.decode(kept) == rest
        assert kept == ids if rest == text else len(kept) < len(ids)


def test_what_stripping_costs_is_told_by_the_statistics() -> None:
    """The same conversation: a branch a message more, and more tokens read for each token of the loss."""
    told = {}
    for thinking in ("keep", "strip"):
        session, engine = open_session([TEXTS[0]] * 6, thinking)
        talk(session, engine, thinking, ["tool", "message"] * 3)
        told[thinking] = statistics(build_trajectories(session.records()))
    keep, strip = told["keep"], told["strip"]
    assert (keep["branches"], strip["branches"]) == (1, 3) and strip["forks"] == {"start": 1, "thinking_stripped": 2}
    assert keep["loss_tokens"] == strip["loss_tokens"]
    assert strip["tokens_per_loss_token"] > 1.5 * keep["tokens_per_loss_token"]
    assert np.isclose(strip["tokens_per_loss_token"], strip["sequence_tokens"] / strip["loss_tokens"])
