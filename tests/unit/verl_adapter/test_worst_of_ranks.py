"""A check's error over ranks: two threads are the ranks, each with its side of a real gloo group."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from verl_opsd.verl_adapter.engine_forwards import worst_of_ranks


def test_a_rank_without_a_number_is_the_worst(monkeypatch):
    nan, here, store = math.nan, threading.local(), dist.HashStore()
    errors = [[nan, 0.0], [0.0, nan], [nan, nan], [1.0, 2.0], [2.0, 1.0], [0.0, math.inf]]

    def all_reduce(x, op):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        here.group.allreduce([x], options).wait()

    def rank(n):
        here.group = dist.ProcessGroupGloo(store, n, 2, timedelta(seconds=30))
        return [worst_of_ranks(torch.tensor(pair[n])) for pair in errors]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert found[0] == found[1] == [math.inf, math.inf, math.inf, 2.0, 2.0, math.inf]
