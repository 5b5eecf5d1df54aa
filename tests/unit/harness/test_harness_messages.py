"""The embedded message store behind the harness' own connector."""

from __future__ import annotations

import time

import pytest

from verl_opsd.cooperbench.messages import MessageStore


@pytest.fixture
def store():
    store = MessageStore()
    yield store
    store.close()


def test_messages_reach_the_peer_of_the_same_pair_only(store):
    one, two = (store.connect(a, ["agent1", "agent2"], "left") for a in ("agent1", "agent2"))
    other = store.connect("agent2", ["agent1", "agent2"], "right")
    assert one.send("agent2", "héllo\r\n$5")
    assert other.receive() == []
    assert [m["content"] for m in two.receive()] == ["héllo\r\n$5"]
    two.mark_exited(published=True)
    assert one.has_exited("agent2") and one.has_published("agent2") and not one.send("agent2", "late")
    assert not store.connect("agent1", ["agent1", "agent2"], "right").has_exited("agent2")


def test_forget_removes_a_pair_and_leaves_others(store):
    one = store.connect("agent1", ["agent1", "agent2"], "a")
    store.connect("agent1", ["agent1", "agent2"], "ab")
    one.send("agent2", "x")
    assert store.keys("a") == ["run:a:agent1:alive", "run:a:agent2:inbox"]
    store.forget("a", [one])
    assert store.keys("a") == [] and store.keys("ab") == ["run:ab:agent1:alive"]


def test_close_is_quick_idempotent_and_a_later_use_starts_fresh(store):
    store.connect("agent1", ["agent1", "agent2"], "a")
    started = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - started < 3
    assert store.keys("a") == []
