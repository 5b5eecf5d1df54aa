"""The gateway over HTTP, through real sockets: same records as in process, and what clients and engines do wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time

import httpx
import numpy as np
import pytest
from stub_chat import ASSISTANT, END, LINE, RESULT, START, USER, StubEngine, converse, make_gateway, random_conversation
from test_gateway import PROMPT, SYS, TASK, tool, user

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens import Reply
from verl_opsd.tokens.http import Access, GatewayServer, Habits, HttpLimits

BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


class Held(StubEngine):
    """An engine that answers when it is let go; counts calls, and those that were cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.calls, self.cancelled = asyncio.Event(), 0, 0

    async def generate(self, *args, **kwargs):
        self.calls += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(*args, **kwargs)


async def until(condition) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s
        await asyncio.sleep(0.005)


def client(access: Access, secret: str | None = None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {secret or access.secret}"}
    return httpx.AsyncClient(base_url=access.url, headers=headers, timeout=30, trust_env=False, verify=False)


async def ask(access: Access, messages=(SYS, TASK), **fields) -> httpx.Response:
    async with client(access) as http:
        return await http.post("/chat/completions", json={"model": "student", "messages": list(messages), **fields})


def served(work, engine=None, limits=None, habits=None, **contract):
    """Runs ``work(server, access)`` against a server with one open session."""

    async def go():
        async with GatewayServer(make_gateway(engine or StubEngine(), **contract), limits=limits) as server:
            return await work(server, server.open("e", "agent1", habits))

    return asyncio.run(go())


class HttpSession:
    """A session's methods, over HTTP."""

    def __init__(self, access: Access, http: httpx.AsyncClient):
        self.access, self.http = access, http

    async def chat(self, messages, tools=None, *, kind="policy"):
        messages = [{k: v for k, v in m.items() if k != "extra"} for m in messages]
        body = {"model": "student", "messages": messages, **({"tools": tools} if tools else {})}
        answer = (await self.http.post("/chat/completions", json=body)).raise_for_status().json()
        message, usage = answer["choices"][0]["message"], answer["usage"]
        # What litellm adds to a reply that a harness sends back.
        message = {**message, "function_call": None, "provider_specific_fields": {"refusal": None}}
        turn = int(answer["id"].rsplit("-", 1)[1])
        return Reply(message, turn, usage["prompt_tokens"], usage["completion_tokens"])

    def mark(self, turn, kind):
        self.access.session.mark(turn, kind)


def same(a, b) -> bool:
    pairs = zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True)
    return all(np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in pairs)


@pytest.mark.parametrize("seed", range(12))
def test_both_faces_make_the_same_records(seed):
    """Tool results, peer messages, format errors, compaction, rewritten histories: equal to the last id and time stamp."""
    direct, engine = asyncio.run(random_conversation(random.Random(seed), 12))
    rng = random.Random(seed)
    other = StubEngine(rng=rng)

    async def work(server, access):
        async with client(access) as http:
            await converse(HttpSession(access, http), rng, 12)
        return access.session.records()

    habits = Habits(kind=lambda messages, tools: "summarizer" if len(messages) == 1 else "policy")
    over_http = served(work, other, habits=habits)
    assert len(direct) == len(over_http) and all(map(same, direct, over_http))
    assert engine.seen == other.seen
    assert {t.fork_reason for t in direct} >= {"start"}


def test_openais_own_client_with_tools_and_streaming():
    openai = pytest.importorskip("openai")

    async def work(server, access):
        async with openai.AsyncOpenAI(base_url=access.url, api_key=access.secret, max_retries=0) as api:
            first = await api.chat.completions.create(model="m", messages=[SYS, TASK], tools=BASH)
            message = first.choices[0].message
            assert (message.content, first.choices[0].finish_reason) == ("21 22", "tool_calls")
            assert (message.tool_calls[0].id, message.tool_calls[0].function.name) == ("call_0_0", "bash")
            assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(PROMPT) + 1, 3)
            history = [SYS, TASK, message.model_dump(exclude_none=True), tool("30")]
            stream = await api.chat.completions.create(
                model="m", messages=history, tools=BASH, stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
        deltas = [p.choices[0].delta for p in parts if p.choices]
        assert "".join(d.content or "" for d in deltas) == "23 24"
        assert [c.function.arguments for d in deltas for c in d.tool_calls or ()] == ["{}"]
        assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "tool_calls"
        assert parts[-1].usage.completion_tokens == 3 and not parts[-1].choices
        return access.session.records()

    one, two = served(work, StubEngine([[121, 22, END], [123, 24, END]]))
    # The ids that were sampled (121 is another encoding of 21) stay in the prompt: nothing is tokenized again.
    assert (two.branch, two.start, one.response_ids.tolist()) == (0, one.end, [121, 22, END])
    assert two.new_ids.tolist() == [LINE, START, USER, LINE, RESULT, 30, END, LINE, START, ASSISTANT, LINE]


def test_a_session_has_a_secret_of_its_own():
    engine = StubEngine()

    async def work(server, access):
        other = server.open("e", "agent2")
        assert len({access.secret, other.secret, access.url, other.url}) == 4
        answers = []
        for url, secret in ((access.url, other.secret), (access.url, "no"), (access.url[:-4] + "x/v1", access.secret)):
            async with httpx.AsyncClient(trust_env=False, verify=False) as http:
                headers = {"Authorization": f"Bearer {secret}"}
                answers.append(await http.post(f"{url}/chat/completions", headers=headers, json={}))
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            answers.append(await http.post(f"{access.url}/chat/completions", json={}))
        assert [a.status_code for a in answers] == [401] * 4
        assert len({a.content for a in answers}) == 1, "an answer tells nothing of which sessions there are"
        assert (await ask(access)).status_code == 200
        server.close(access)
        assert (await ask(access)).status_code == 401 and (await ask(other)).status_code == 200

    served(work, engine)
    assert len(engine.seen) == 2


def test_the_list_of_models_needs_the_sessions_secret():
    openai = pytest.importorskip("openai")

    async def work(server, access):
        async with openai.AsyncOpenAI(base_url=access.url, api_key=access.secret, max_retries=0) as api:
            (model,) = [m async for m in api.models.list()]
            answer = await api.chat.completions.create(model=model.id, messages=[SYS, TASK])
        assert (model.id, model.max_model_len, answer.model) == ("policy", 777, "policy")
        other = server.open("e", "agent2")
        async with client(access, other.secret) as http, client(access) as mine:
            assert (await http.get("/models")).status_code == 401
            assert (await mine.get("/models")).status_code == 200
            server.close(access)
            assert (await mine.get("/models")).status_code == 401

    served(work, context_length=777, max_tokens=16)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "localhost", "example.org", "127.0.0.1.example.org"])
def test_no_other_host_than_loopback(host):
    with pytest.raises(OpsdError, match="loopback"):
        GatewayServer(make_gateway(StubEngine()), host=host)


def test_it_listens_on_loopback_only():
    async def work(server, access):
        assert server._socket.getsockname()[0] == "127.0.0.1"

    served(work)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.2}, "temperature=0.2"),
        ({"top_p": 0.5}, "top_p=0.5"),
        ({"max_tokens": 15}, "max_tokens=15"),
        ({"max_completion_tokens": 17}, "max_completion_tokens=17"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2}, "n"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"seed": 1}, "seed"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
        ({"messages": [TASK, {"role": "assistant", "content": "1", "reasoning_content": "think"}, TASK]}, "reasoning"),
        ({"messages": [{"role": "developer", "content": "1"}]}, "developer"),
    ],
)
def test_what_the_contract_decides_or_nothing_reads_is_refused(fields, named):
    engine = StubEngine()

    async def work(server, access):
        answer = await ask(access, **fields)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text
        given = {"temperature": 1.0, "top_p": 1, "max_tokens": 16, "n": 1, "tool_choice": "auto", "user": "me"}
        assert (await ask(access, **given)).status_code == 200  # what agrees is taken
        parts = {**TASK, "content": [{"type": "text", "text": "11 "}, {"type": "text", "text": "12"}]}
        assert (await ask(access, [SYS, parts])).status_code == 200
        assert engine.seen[1][0] == engine.seen[0][0] == PROMPT

    served(work, engine)


def test_bodies_that_are_no_request():
    async def work(server, access):
        async with client(access) as http:
            for body in (b"", b"{", b"[]", b"\xff"):
                assert (await http.post("/chat/completions", content=body)).status_code == 400
            assert (await http.post("/chat/completions", content=b" " * 3000)).status_code == 413
        for text in (None, 5, ["11"]):
            answer = await ask(access, [SYS, {**TASK, "content": [{"type": "text", "text": text}]}])
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        for calls in ("x", [1], [{"id": "c"}], [{"function": {"name": None, "arguments": "{}"}}]):
            answer = await ask(access, [SYS, TASK, {"role": "assistant", "content": "20", "tool_calls": calls}, tool("30")])
            assert answer.status_code == 400 and "tool_calls" in answer.json()["error"]["message"]
        assert access.session.records() == ()

    served(work, limits=HttpLimits(body_bytes=2000))


def test_exact_ids_come_back_on_request():
    async def work(server, access):
        answer = (await ask(access, return_token_ids=True)).json()
        assert answer["prompt_token_ids"] == PROMPT
        assert answer["choices"][0]["token_ids"] == [121, END]
        assert "prompt_token_ids" not in (await ask(access)).json()

    served(work, StubEngine([[121, END], [22, END]]))


def test_a_context_that_is_full_is_named_as_clients_know_it():
    async def work(server, access):
        error = (await ask(access)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 31 tokens" in error["message"]
        assert access.session.records() == () and access.faults == []

    served(work, max_tokens=16, context_length=31)


def test_a_full_queue_is_429_with_retry_after_and_loses_nothing():
    async def work(server, access):
        engine = server.gateway.engine
        sessions = [server.open("e", f"a{i}") for i in range(4)]
        calls = [asyncio.create_task(ask(s)) for s in sessions[:3]]  # two with the engine, one waits
        await until(lambda: engine.calls == 2 and server._places._waiting == 1)
        refused = await ask(sessions[3])
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        engine.go.set()
        assert [(await c).status_code for c in calls] == [200] * 3
        assert (await ask(sessions[3])).status_code == 200
        assert [len(s.session.records()) for s in sessions] == [1] * 4

    served(work, Held(), HttpLimits(active=2, queued=1))


def test_a_second_call_of_a_session_is_a_conflict():
    async def work(server, access):
        engine = server.gateway.engine
        first = asyncio.create_task(ask(access))
        await until(lambda: engine.calls)
        second = await ask(access)
        assert second.status_code == 409 and second.headers["Retry-After"] == "1"
        engine.go.set()
        assert (await first).status_code == 200

    served(work, Held())


@pytest.mark.parametrize("where", ["engine", "queue"])
def test_a_client_that_goes_away_ends_the_engines_call_and_leaves_nothing(where):
    async def work(server, access):
        engine = server.gateway.engine
        blocker = server.open("e", "blocker")
        held = asyncio.create_task(ask(blocker)) if where == "queue" else None
        await until(lambda: engine.calls == (held is not None))
        call = asyncio.create_task(ask(access))
        await until(lambda: server._places._waiting == 1 if held else engine.calls == 1)
        call.cancel()  # closes its connection
        await asyncio.wait({call})
        await until(lambda: server._places._waiting == 0 if held else engine.cancelled == 1)
        assert access.session.records() == ()
        engine.go.set()
        assert held is None or (await held).status_code == 200
        assert (await ask(access)).status_code == 200
        (only,) = access.session.records()
        assert (only.turn, only.branch, only.fork_reason) == (0, 0, "start")
        assert engine.calls == 2, "a call that waited never reached the engine"

    served(work, Held(), HttpLimits(active=1))


def test_a_call_past_its_limit_is_504_and_leaves_nothing():
    async def work(server, access):
        engine = server.gateway.engine
        assert (await ask(access)).status_code == 504
        assert engine.cancelled == 1 and access.session.records() == ()
        engine.go.set()
        assert (await ask(access)).status_code == 200 and access.session.records()[0].turn == 0

    served(work, Held(), HttpLimits(timeout_s=0.2))


def test_a_server_that_ends_takes_its_calls_along():
    async def go():
        async with GatewayServer(make_gateway(Held())) as server:
            engine, access = server.gateway.engine, server.open("e", "agent1")
            call = asyncio.create_task(ask(access))
            await until(lambda: engine.calls == 1)
        assert engine.cancelled == 1 and access.session.records() == ()
        assert (await call).status_code == 503

    asyncio.run(go())


def test_an_engine_that_restarts():
    """Two calls meet a dead engine, one a broken reply: each is named, none is recorded, the next call goes on."""
    gone, typed = ConnectionError("restarting"), InfraFault("engine_overloaded", "a", "b", "c")
    engine = StubEngine([[21, END], gone, typed, [float("nan")], [22, END]])

    async def work(server, access):
        first = (await ask(access)).json()["choices"][0]["message"]
        history = [SYS, TASK, first, tool("30")]
        answers = [await ask(access, history) for _ in range(4)]
        assert [a.status_code for a in answers] == [503, 503, 502, 200]
        assert [a.headers.get("Retry-After") for a in answers] == ["1", "1", "1", None]
        kinds = ["engine_died", "engine_overloaded", "engine_bad_reply"]
        assert [a.json()["error"]["code"] for a in answers[:3]] == kinds == [f.kind for f in access.faults]
        one, two = access.session.records()
        assert (two.turn, two.branch, two.start, two.fork_reason) == (1, 0, one.end, "start")

    served(work, engine)


def test_an_openai_client_rides_out_a_restart():
    openai = pytest.importorskip("openai")

    async def work(server, access):
        async with openai.AsyncOpenAI(base_url=access.url, api_key=access.secret, max_retries=3) as api:
            answer = await api.chat.completions.create(model="m", messages=[SYS, TASK])
        assert answer.choices[0].message.content == "22"
        assert [t.turn for t in access.session.records()] == [0] and len(access.faults) == 1

    served(work, StubEngine([ConnectionError("restarting"), [22, END]]))


def test_a_rewritten_history_is_a_branch_with_its_reason():
    async def work(server, access):
        first = (await ask(access)).json()["choices"][0]["message"]
        await ask(access, [SYS, user("99"), first, tool("30")])
        await ask(access, [SYS, user("99"), first, user("31")])
        return access.session.records()

    records = served(work)
    assert [t.fork_reason for t in records] == ["start", "template_rewrite", "template_rewrite"]
    assert records[1].fork_position == PROMPT.index(11)


def test_replies_that_a_harness_refuses_are_marked():
    async def work(server, access):
        await ask(access)
        await ask(access, [SYS, TASK, user("70")])
        return access.session.records()

    habits = Habits(malformed=lambda message: not message.get("tool_calls"))
    records = served(work, StubEngine([[20, END], [21, END]]), habits=habits)
    assert [(t.kind, t.fork_reason) for t in records] == [("malformed", "start"), ("policy", "retry")]


def test_256_sessions_at_once():
    class Steady(StubEngine):
        async def generate(self, prompt_ids, *, session, turn, sampling):
            await asyncio.sleep(0.01)
            self.replies = [[10 + int(session.split("a")[1]) % 90, 10 + turn, END]]
            return await super().generate(prompt_ids, session=session, turn=turn, sampling=sampling)

    async def one(access: Access, number: int) -> list[str]:
        said, history = [], [SYS, user(str(10 + number % 90))]
        async with client(access) as http:
            for _ in range(3):
                answer = await http.post("/chat/completions", json={"model": "m", "messages": history})
                message = answer.raise_for_status().json()["choices"][0]["message"]
                said.append(message["content"])
                history = [*history, {"role": "assistant", "content": message["content"]}, user("30")]
        return said

    async def work(server, access):
        sessions = [server.open("e", f"a{i}") for i in range(256)]
        started = time.monotonic()
        said = await asyncio.gather(*(one(s, i) for i, s in enumerate(sessions)))
        print(f"256 sessions, 3 turns each: {time.monotonic() - started:.1f} s")
        for i, (access, lines) in enumerate(zip(sessions, said, strict=True)):
            own = 10 + i % 90
            assert lines == [f"{own} {10 + turn}" for turn in range(3)]
            assert [t.response_ids.tolist() for t in access.session.records()] == [[own, 10 + k, END] for k in range(3)]
            assert access.session.records()[0].new_ids.tolist()[9] == own

    served(work, Steady(), HttpLimits(active=256))
