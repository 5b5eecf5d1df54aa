"""The gateway: append-only ids, forks, refusals, faults, and its own time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from stub_chat import ASSISTANT, END, LINE, RESULT, START, SYSTEM, USER, StubEngine, make_gateway

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens import ContextOverflow, Generation, Sampling

SYS = {"role": "system", "content": "10"}
TASK = {"role": "user", "content": "11 12"}
PROMPT = [START, SYSTEM, LINE, 10, END, LINE, START, USER, LINE, 11, 12, END, LINE, START, ASSISTANT, LINE]


def tool(content: str) -> dict:
    return {"role": "tool", "tool_call_id": "c", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def run(session, *calls):
    async def go():
        return [await session.chat(*c) if isinstance(c, tuple) else await session.chat(c) for c in calls]

    return asyncio.run(go())


def test_golden_two_turns_append_and_keep_ids_exact():
    # 121 is another encoding of 21: the reply's text is "21 22", its ids stay [121, 22, END].
    engine = StubEngine([[121, 22, END], [23]])
    session = make_gateway(engine).session("e", "agent1")
    (first,) = run(session, [SYS, TASK])
    assert first.message["content"] == "21 22" and (first.turn, first.prompt_tokens, first.completion_tokens) == (
        0,
        16,
        3,
    )
    assert first.message["tool_calls"][0]["id"] == "call_0_0"
    (second,) = run(session, [SYS, TASK, {**first.message, "extra": {"cost": 1}}, tool("30")])
    prompt = [*PROMPT, 121, 22, END, LINE, START, USER, LINE, RESULT, 30, END, LINE, START, ASSISTANT, LINE]
    assert engine.seen == [(PROMPT, [121, 22, END]), (prompt, [23])]
    # The second reply was cut off: its turn end is context of the next turn.
    third = [SYS, TASK, first.message, tool("30"), second.message, user("31")]
    run(session, third)
    assert engine.seen[2][0] == [*prompt, 23, END, LINE, START, USER, LINE, 31, END, LINE, START, ASSISTANT, LINE]
    one, two, three = session.records()
    assert (one.branch, one.start, one.new_ids.tolist(), one.response_ids.tolist()) == (0, 0, PROMPT, [121, 22, END])
    assert (two.branch, two.start, two.prompt_len, two.end) == (0, 19, 30, 31)
    assert (three.branch, three.start, three.new_ids.tolist()[:2]) == (0, 31, [END, LINE])
    assert one.response_logprobs.dtype == np.float32 and one.response_logprobs.tolist() == [-0.25, -0.5, -0.75]
    assert (one.t_start, one.t_end, one.model_version, one.fork_reason, one.parent_branch) == (0.0, 1.0, 7, "start", -1)


def test_only_new_messages_are_rendered():
    engine = StubEngine()
    gateway = make_gateway(engine)
    session = gateway.session("e", "a")
    history = [SYS, TASK]
    for i in range(5):
        (reply,) = run(session, history)
        history = [*history, reply.message, tool(str(40 + i))]
    assert gateway.builder.rendered == 2 + 4
    assert {t.branch for t in session.records()} == {0}


@pytest.mark.parametrize("spoilt", [1, 2])
def test_retry_drops_the_last_reply_and_keeps_earlier_ids(spoilt):
    """After a format error the harness drops the reply; however often, earlier replies keep their non-canonical ids."""
    engine = StubEngine([[121, END], *[[50 + k, END] for k in range(spoilt)], [60, END]])
    session = make_gateway(engine).session("e", "a")
    (first,) = run(session, [SYS, TASK])
    history = [SYS, TASK, first.message, tool("30")]
    for k in range(spoilt):
        (bad,) = run(session, history)
        session.mark(bad.turn, "malformed")
        history = [*history, user(f"7{k}")]
    run(session, history)
    shared = [*PROMPT, 121, END, LINE, START, USER, LINE, RESULT, 30, END, LINE, START]
    errors = [i for k in range(spoilt) for i in (START, USER, LINE, 70 + k, END, LINE)]
    assert engine.seen[-1][0] == [*shared[:-1], *errors, START, ASSISTANT, LINE]
    last = session.records()[-1]
    # The fork is where the prompts part: behind the <|im_start|> that once opened the dropped reply.
    assert (last.branch, last.parent_branch, last.fork_reason) == (spoilt, spoilt - 1, "retry")
    assert last.fork_position == len(shared) + 6 * (spoilt - 1)
    assert [t.kind for t in session.records()] == ["policy", *["malformed"] * spoilt, "policy"]


def test_retry_of_the_first_reply_and_of_the_same_prompt():
    engine = StubEngine([[21, END], [22, END]])
    session = make_gateway(engine).session("e", "a")
    run(session, [SYS, TASK], [SYS, TASK])
    again = session.records()[1]
    assert (again.branch, again.fork_reason, again.fork_position, again.new_ids.tolist()) == (1, "retry", 16, [])
    assert engine.seen[1][0] == PROMPT


def test_compaction_forks_twice_and_side_calls_do_not_end_the_branch():
    engine = StubEngine([[21, END], [22, END], [23, END], [24, END]])
    session = make_gateway(engine).session("e", "a")
    (first,) = run(session, [SYS, TASK])
    summary = asyncio.run(session.chat([user("80")], kind="summarizer"))
    (side,) = run(session, [SYS, TASK, first.message, tool("30")])  # the history goes on as if nothing had happened
    compact = [SYS, TASK, {**summary.message, "extra": {"summary": True}}, side.message, tool("31")]
    asyncio.run(session.chat([user("81")], kind="summarizer"))
    run(session, compact)
    turns = session.records()
    assert [t.branch for t in turns] == [0, 1, 0, 2, 3]
    assert [t.fork_reason for t in turns] == ["start", "compaction", "start", "compaction", "compaction"]
    assert turns[4].parent_branch == 0 and turns[4].fork_position == 16  # system, task and generation header are shared
    assert turns[1].fork_position == 1  # <|im_start|> of another first message


@pytest.mark.parametrize(
    "change",
    [
        lambda h: [h[0], user("99"), *h[2:]],
        lambda h: [*h[:2], {**h[2], "content": "99"}, *h[3:]],
        lambda h: [*h[:2], tool("31")] if len(h) > 4 else [h[0], *h[3:]],
    ],
    ids=["task", "reply", "dropped messages"],
)
def test_rewritten_history_is_a_template_rewrite(change):
    engine = StubEngine()
    session = make_gateway(engine).session("e", "a")
    (first,) = run(session, [SYS, TASK])
    run(session, change([SYS, TASK, first.message, tool("30")]))
    assert session.records()[1].fork_reason == "template_rewrite" and session.records()[1].branch == 1


def test_other_tools_do_not_continue_a_branch():
    engine = StubEngine()
    session = make_gateway(engine).session("e", "a")
    (first,) = run(session, ([SYS, TASK], [{"name": "bash"}]))
    run(session, ([SYS, TASK, first.message, tool("30")], [{"name": "sh"}]))
    assert [t.branch for t in session.records()] == [0, 1]


def test_history_mutated_by_the_caller_is_noticed():
    engine = StubEngine()
    session = make_gateway(engine).session("e", "a")
    task = dict(TASK)
    (first,) = run(session, [SYS, task])
    task["content"] = "77"
    run(session, [SYS, task, first.message, tool("30")])
    assert session.records()[1].branch == 1 and 77 in engine.seen[1][0]


def test_context_overflow_is_refused_before_the_engine_and_leaves_the_session_unchanged():
    engine = StubEngine()
    session = make_gateway(engine, max_tokens=16, context_length=32).session("e", "a")  # 16 + 16 just fits
    (first,) = run(session, [SYS, TASK])
    with pytest.raises(ContextOverflow, match="context_length=32"):
        run(session, [SYS, TASK, first.message, tool("30")])
    assert len(engine.samplings) == 1 and len(session.records()) == 1
    with pytest.raises(ContextOverflow):
        run(make_gateway(engine, max_tokens=16, context_length=31).session("e", "a"), [SYS, TASK])
    assert engine.samplings == [Sampling(1.0, 1.0, -1, 16)]


@pytest.mark.parametrize(
    "reply",
    [
        Generation([], [], "stop", 0),
        Generation([10, 11], [-1.0], "stop", 0),
        Generation([10], [-1.0, -1.0], "stop", 0),
        Generation([10], [float("nan")], "stop", 0),
        Generation([10], [float("-inf")], "stop", 0),
        Generation([-1], [-1.0], "stop", 0),
        Generation([10.5], [-1.0], "stop", 0),
        Generation([10] * 17, [-1.0] * 17, "length", 0),
    ],
    ids=["empty", "short logprobs", "long logprobs", "nan", "inf", "negative id", "fraction", "past max_tokens"],
)
def test_bad_replies_are_infrastructure_faults(reply):
    session = make_gateway(StubEngine([reply, [20, END]])).session("e", "a")
    with pytest.raises(InfraFault) as caught:
        run(session, [SYS, TASK])
    assert caught.value.kind == "engine_bad_reply" and session.records() == ()
    assert run(session, [SYS, TASK])[0].turn == 0  # nothing was left behind


def test_dead_engine_chains_its_cause_and_typed_faults_pass():
    cause = ConnectionError("gone")
    typed = InfraFault("engine_overloaded", "a", "b", "c")
    session = make_gateway(StubEngine([cause, typed, [20, END]])).session("e", "a")
    with pytest.raises(InfraFault) as caught:
        run(session, [SYS, TASK])
    assert caught.value.kind == "engine_died" and caught.value.__cause__ is cause
    with pytest.raises(InfraFault) as caught:
        run(session, [SYS, TASK])
    assert caught.value is typed
    assert run(session, [SYS, TASK])[0].prompt_tokens == 16


def test_dead_parser_is_a_fault_and_its_turn_is_kept():
    engine = StubEngine([[20, END], [21, END]])
    gateway = make_gateway(engine)
    good = gateway.parser

    class Broken:
        async def parse(self, ids, tools):
            raise ValueError("odd")

    gateway.parser = Broken()
    session = gateway.session("e", "a")
    with pytest.raises(InfraFault) as caught:
        run(session, [SYS, TASK])
    assert caught.value.kind == "parser_died" and [t.kind for t in session.records()] == ["malformed"]
    gateway.parser = good
    run(session, [SYS, TASK])
    assert (session.records()[1].branch, session.records()[1].fork_reason) == (1, "retry")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [SYS, TASK, {"role": "exit", "content": "LimitsExceeded"}],
        [SYS, TASK, {"role": "assistant", "content": "5"}],
        [SYS, {"role": "user", "content": [{"type": "text", "text": "1"}]}],
        [{"content": "1"}],
    ],
    ids=["empty", "exit", "ends with assistant", "parts", "no role"],
)
def test_bad_messages_are_refused(messages):
    engine = StubEngine()
    with pytest.raises(OpsdError):
        run(make_gateway(engine).session("e", "a"), messages)
    assert engine.samplings == []


def test_one_call_at_a_time_and_free_again_after_cancellation():
    class Slow(StubEngine):
        async def generate(self, *args, **kwargs):
            await asyncio.sleep(0.05)
            return await super().generate(*args, **kwargs)

    async def go():
        session = make_gateway(Slow()).session("e", "a")
        task = asyncio.create_task(session.chat([SYS, TASK]))
        await asyncio.sleep(0)
        with pytest.raises(OpsdError, match="one call at a time"):
            await session.chat([SYS, TASK])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await session.chat([SYS, TASK])).turn == 0

    asyncio.run(go())


@pytest.mark.parametrize("where", ["engine", "parser"])
def test_a_cancelled_call_leaves_nothing(where):
    """Cancelled while the engine samples, or after that while the reply is read: no turn, no branch, no message."""

    async def go():
        gateway = make_gateway(StubEngine([[20, END], [21, END]]))
        waiting, part, method = asyncio.Event(), getattr(gateway, where), "generate" if where == "engine" else "parse"
        real = getattr(part, method)

        async def slow(*args, **kwargs):
            waiting.set()
            await asyncio.sleep(60)

        setattr(part, method, slow)
        session = gateway.session("e", "a")
        call = asyncio.create_task(session.chat([SYS, TASK]))
        await waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert session.records() == ()
        setattr(part, method, real)
        await session.chat([SYS, TASK])
        (only,) = session.records()
        assert (only.turn, only.branch, only.fork_reason, only.new_ids.tolist()) == (0, 0, "start", PROMPT)

    asyncio.run(go())


def test_work_of_a_call_does_not_grow_with_dropped_replies():
    """64k tokens, then 40 refused replies: each is a branch, and the last ones cost what the first ones did."""
    session = make_gateway(StubEngine(), max_tokens=16).session("e", "a")
    history = [SYS, user(" ".join(["44"] * 64_000))]
    history = [*history, run(session, history)[0].message]

    async def go():
        nonlocal history
        times = []
        for i in range(40):
            history = [*history, user(str(10 + i))]
            begin = time.process_time()
            reply = await session.chat(history)
            times.append(time.process_time() - begin)
            session.mark(reply.turn, "malformed")
        return times

    times = asyncio.run(go())
    assert {t.fork_reason for t in session.records()[2:]} == {"retry"} and session.records()[-1].branch == 39
    print(f"a fork at 64k tokens: {1e3 * min(times[1:9]):.1f} ms with few branches, {1e3 * min(times[-8:]):.1f} ms with 40")
    assert min(times[-8:]) <= 10e-3


def test_unknown_turns_are_refused():
    gateway = make_gateway(StubEngine())
    session = gateway.session("e", "a")
    for number in (-1, 0, 1):
        with pytest.raises(OpsdError, match="turn"):
            session.mark(number, "malformed")
    with pytest.raises(OpsdError, match="kinds are"):
        asyncio.run(session.chat([SYS, TASK], kind="solver"))
    run(session, [SYS, TASK])
    with pytest.raises(OpsdError, match="kinds are"):
        session.mark(0, "bad")


def test_own_time_per_turn_at_64k_tokens():
    """128 turns to 64k tokens: at most 5 ms of own CPU time a turn; no string object is shared between calls."""
    spent = [0.0]

    class Timed(StubEngine):
        async def generate(self, prompt_ids, *, session, turn, sampling):
            begin = time.process_time()
            ids = [20 + turn % 50] * 63 + [END]
            result = Generation(ids, [-0.5] * 64, "stop", 0)
            spent[0] += time.process_time() - begin
            self.length = len(prompt_ids) + 64
            return result

    engine = Timed()
    session = make_gateway(engine, max_tokens=64).session("e", "a")

    async def go():
        history = [SYS, TASK]
        total = 0.0
        for _ in range(128):
            fresh = [{**m, "content": m["content"].replace(" ", "  ").replace("  ", " ")} for m in history]
            begin = time.process_time()
            reply = await session.chat(fresh)
            total += time.process_time() - begin
            history = [*history, reply.message, tool(" ".join(["44"] * 430))]
        return total

    total = asyncio.run(go())
    assert engine.length > 62_000 and {t.branch for t in session.records()} == {0}
    per_turn = (total - spent[0]) / 128
    print(f"own time {per_turn * 1e3:.2f} ms a turn")
    assert per_turn <= 5e-3
