"""A process that episodes run in: busy is not dead, and dead is an error that says which one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.watch import ActorWatch


@pytest.fixture(autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Actor:
    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(60)


def test_death_is_found_and_being_busy_is_not():
    actors = [Actor.remote() for _ in range(3)]
    pids = ray.get([a.pid.remote() for a in actors])
    watch = ActorWatch(actors, "agent-loop worker")
    actors[0].sleep.remote()
    for _ in range(5):
        watch.require()
        time.sleep(0.1)
    os.kill(pids[2], signal.SIGKILL)
    deadline = time.monotonic() + 30
    with pytest.raises(OpsdError, match="agent-loop worker 2 has died") as caught:
        while time.monotonic() < deadline:
            watch.require()
            time.sleep(0.1)
    assert "way out: read the output above" in str(caught.value)
