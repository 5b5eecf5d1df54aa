"""Stopping a pair: calls in flight are given up at once, limits hold, errors keep their kind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
import redis

from verl_opsd.cooperbench.stopping import (
    PairStopped,
    RunGuard,
    StopSignal,
    WallLimitReached,
    located,
    tripwires_in,
)
from verl_opsd.errors import InfraFault, OpsdError


def test_the_first_cause_is_kept():
    stop, first = StopSignal(), ValueError("first")
    assert not stop.is_set
    stop.set(first)
    stop.set(ValueError("second"))
    assert stop.is_set and stop.cause is first


def test_a_finished_call_gives_its_result_or_error():
    guard = RunGuard(StopSignal(), 10)
    done, failed = Future(), Future()
    done.set_result(7)
    failed.set_exception(KeyError("x"))
    assert guard.result(done) == 7
    with pytest.raises(KeyError):
        guard.result(failed)


def test_a_stop_ends_a_wait_at_once_and_cancels_the_call():
    stop, call = StopSignal(), Future()
    threading.Timer(0.1, stop.set).start()
    started = time.monotonic()
    with pytest.raises(PairStopped):
        RunGuard(stop, 60).result(call)
    assert time.monotonic() - started < 30 and call.cancelled()
    with pytest.raises(PairStopped):
        RunGuard(stop, 60).check()


def test_the_wall_limit_ends_a_wait_and_cancels_the_call():
    guard, call = RunGuard(StopSignal(), 0.2), Future()
    guard.check()
    with pytest.raises(WallLimitReached):
        guard.result(call)
    assert call.cancelled()
    with pytest.raises(WallLimitReached):
        guard.check()


def test_a_long_wait_shows_signs_of_life(monkeypatch):
    monkeypatch.setattr("verl_opsd.cooperbench.stopping.HEARTBEAT_S", 0.02)
    beats, call = [], Future()
    threading.Timer(0.3, lambda: call.set_result(None)).start()
    RunGuard(StopSignal(), 10, lambda: beats.append(1)).result(call)
    assert len(beats) >= 3


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("bash: line 1: gh: command not found\n", {"gh_missing"}),
        ("a\n./x.sh: 3: gh: not found\nb", {"gh_missing"}),
        ("x.sh: line 12: send_message: command not found", {"send_message_missing"}),
        ("fatal: could not read Username for 'https://github.com': No such device", {"remote_is_upstream"}),
        ("grep finds: 'gh: command not found'", set()),
        ("docs: line 3 says send_message: command not found, sometimes", set()),
        ("bash: line 1: ghc: command not found", set()),
        ("", set()),
    ],
)
def test_tripwires(output, names):
    assert tripwires_in(output) == names


def test_errors_that_leave_the_harness():
    fault = located(InfraFault("engine_died", "what", "rule", "way"), "repo/task1/f1_f2")
    assert isinstance(fault, InfraFault) and fault.kind == "engine_died" and fault.what == "repo/task1/f1_f2: what"
    assert (fault.rule, fault.way_out) == ("rule", "way")
    refusal = OpsdError("a", "b", "c")
    assert located(refusal, "x") is refusal
    assert located(redis.ConnectionError("gone"), "x").kind == "message_store"
    bug = located(ZeroDivisionError("oops"), "here")
    assert bug.kind == "harness_bug" and "here: ZeroDivisionError: oops" in bug.what
