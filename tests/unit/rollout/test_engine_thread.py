"""The engine's thread: ordering of commands and requests, and what waiters hear when something breaks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.verl_adapter.rollout.engine_core import EngineCore, Request
from verl_opsd.verl_adapter.rollout.engine_thread import EngineThread
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams


def request(name: str, n: int = 5, prompt: int = 10) -> Request:
    return Request(name, np.arange(3, 3 + prompt, dtype=np.int32), SamplingParams(n), name)


@pytest.fixture
def core(qwen3) -> EngineCore:
    return EngineCore(qwen3.served, {511}, 1024)


@pytest.fixture
def thread(core):
    thread = EngineThread(core)
    yield thread
    thread.close()


def test_replies_arrive_and_a_bad_request_fails_alone(thread):
    good, bad = thread.generate(request("a")), thread.generate(request("b", n=2000))
    assert len(good.result(30).token_ids) == 5
    with pytest.raises(OpsdError, match="2010"):
        bad.result(30)
    assert len(thread.generate(request("c")).result(30).token_ids) == 5


def held(thread: EngineThread) -> tuple[threading.Event, Future[None]]:
    """Holds the engine inside a command until the event is set, so that the test decides what is queued behind it."""
    gate = threading.Event()
    return gate, thread.call(lambda core: (gate.wait(30), None)[1])


def test_idle_command_runs_between_running_and_waiting_requests(core, thread):
    gate, _ = held(thread)
    first = thread.generate(request("first", n=30))
    gate.set()
    while core.running == 0 and not first.done():
        time.sleep(0.001)
    seen = thread.call(lambda c: (c.running, first.done()), when="idle")
    second = thread.generate(request("second"))
    assert seen.result(30) == (0, True)
    assert len(second.result(30).token_ids) == 5


def test_drained_command_waits_for_waiting_requests_too(thread):
    gate, _ = held(thread)
    many = [thread.generate(request(f"r{i}", n=10)) for i in range(3)]
    drained = thread.call(lambda core: [f.done() for f in many], when="drained")
    gate.set()
    assert drained.result(30) == [True, True, True]


def test_refused_command_leaves_the_engine_alive(thread):
    def refuse(core: EngineCore) -> None:
        raise OpsdError("what", "rule", "way out")

    with pytest.raises(OpsdError, match="what"):
        thread.call(refuse).result(30)
    assert len(thread.generate(request("a")).result(30).token_ids) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["step", "command"])
def test_a_crash_fails_everything_in_flight_and_afterwards(core, thread, monkeypatch, where):
    gate, _ = held(thread)

    def crash(*args: object, **kwargs: object) -> None:
        raise MemoryError("no memory")

    requests = [thread.generate(request(f"r{i}", n=50)) for i in range(3)]
    if where == "step":
        monkeypatch.setattr(core, "step", crash)
    else:
        command = thread.call(crash)
    gate.set()
    for future in requests:
        with pytest.raises(InfraFault, match="MemoryError: no memory") as e:
            future.result(30)
        assert e.value.kind == "engine_died"
    if where == "command":
        with pytest.raises(MemoryError):
            command.result(30)
    with pytest.raises(InfraFault, match="MemoryError"):
        _until_dead(thread).result(30)


def _until_dead(thread: EngineThread) -> Future:
    thread._thread.join(30)
    return thread.generate(request("late"))


def test_abort_ends_requests_with_what_they_have(thread):
    gate, _ = held(thread)
    futures = [thread.generate(request(f"r{i}", n=500)) for i in range(2)]
    aborted = thread.abort_all()
    gate.set()
    # Requests that arrived before the command are taken before it runs.
    assert sorted(aborted.result(30)) == ["r0", "r1"]
    assert {f.result(30).stop_reason for f in futures} == {"aborted"}


def test_close_fails_what_is_left(core):
    thread = EngineThread(core)
    future = thread.generate(request("a", n=900))
    thread.close()
    with pytest.raises(InfraFault, match="stopped"):
        future.result(30)
    with pytest.raises(InfraFault, match="stopped"):
        thread.call(lambda c: None).result(30)
