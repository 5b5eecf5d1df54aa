"""A process that episodes run in: busy is not dead, and dead is an error that says which one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import ray

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.watch import ActorWatch, queue_actors


@pytest.fixture(scope="module", autouse=True)
def shut_down() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def local_ray(request: pytest.FixtureRequest) -> None:
    """One Ray for all tests, but for those that kill a process which all of its jobs share: these begin with a new one."""
    if "which" in request.fixturenames:
        ray.shutdown()
    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)


@ray.remote(num_cpus=0)
class Actor:
    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(60)


def test_death_is_found_and_being_busy_is_not():
    actors = [Actor.remote() for _ in range(3)]
    pids = ray.get([a.pid.remote() for a in actors])
    watch = ActorWatch(actors, "agent-loop worker", "its episodes are lost")
    actors[0].sleep.remote()
    for _ in range(5):
        watch.require_alive()
        time.sleep(0.1)
    os.kill(pids[2], signal.SIGKILL)
    deadline = time.monotonic() + 30
    with pytest.raises(OpsdError, match="agent-loop worker 2 has died in round 3") as caught:
        watch.require_alive(" in round 3", wait_s=30)  # others may learn of it before Ray does
    assert time.monotonic() < deadline
    assert "rule: its episodes are lost" in str(caught.value) and "way out: read the output above" in str(caught.value)


def test_an_error_that_a_death_has_caused_is_told_as_the_death():
    actors = [Actor.remote() for _ in range(2)]
    pids = ray.get([a.pid.remote() for a in actors])
    watch = ActorWatch(actors, "student rank", "the others would wait for it")
    with pytest.raises(ConnectionError, match="broken"), watch.naming(lambda: " in round 1", wait_s=0.5):
        raise ConnectionError("broken pipe")  # and nobody has died
    with pytest.raises(OpsdError, match="student rank 1 has died in round 2"), watch.naming(lambda: " in round 2", wait_s=30):
        os.kill(pids[1], signal.SIGKILL)
        raise ConnectionError("Connection closed by peer")
    with pytest.raises(OpsdError, match="another"), watch.naming(lambda: " in round 2"):
        raise OpsdError("another", "rule", "way out")


def test_a_call_that_waits_for_all_ends_with_the_first_death():
    """Ranks that wait for a dead one in an exchange may wait for long: the driver does not wait for them."""
    actors = [Actor.remote() for _ in range(2)]
    pids = ray.get([a.pid.remote() for a in actors])
    calls = [a.sleep.remote() for a in actors]
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(calls)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("wait", ["ray", "lock", "sleep"])
def test_a_wait_without_end_is_ended_by_a_death(wait: str):
    busy, dies = Actor.remote(), Actor.remote()
    pid = ray.get(dies.pid.remote())
    watch = ActorWatch([dies], "process of TransferQueue", "it holds rows")
    before = signal.getsignal(signal.SIGUSR2)
    waits = {"ray": lambda: ray.get(busy.sleep.remote()), "lock": Future().result, "sleep": lambda: time.sleep(60)}
    started = time.monotonic()
    with (
        pytest.raises(OpsdError, match="process of TransferQueue 0 has died in round 2"),
        watch.interrupting(lambda: " in round 2"),
    ):
        os.kill(pid, signal.SIGKILL)
        waits[wait]()
    assert time.monotonic() - started < 50
    assert signal.getsignal(signal.SIGUSR2) == before


def test_what_ends_otherwise_is_left_as_it_is():
    watch = ActorWatch([Actor.remote()], "process of TransferQueue", "it holds rows")
    with watch.interrupting(lambda: ""):
        pass
    for error in (KeyboardInterrupt(), OpsdError("a", "b", "c"), SystemExit(3)):
        with pytest.raises(type(error)) as caught, watch.interrupting(lambda: "", wait_s=0):
            raise error
        assert caught.value is error
    assert "actor-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("which", [0, 1], ids=["controller", "storage unit"])
def test_a_process_of_the_queue_that_dies_is_found(which: int):
    import transfer_queue as tq

    tq.init()
    try:
        actors = queue_actors()
        assert len(actors) == 3  # its controller and its default of two storage units
        watch = ActorWatch(actors, "process of TransferQueue", "it holds the rows of this round")
        watch.require_alive()
        os.kill(ray.get(actors[which].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        with pytest.raises(OpsdError, match=f"process of TransferQueue {which} has died in round 1"):
            watch.require_alive(" in round 1", wait_s=30)
    finally:
        tq.close()
