"""The head inside a model under torch.compile: the same numbers, one stated graph break, no compilation for a new step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distill.test_head import B, H, T, TinyLM, make
from verl_opsd.distill.head import HeadTask, install_head
from verl_opsd.distill.loss import LossSpec


class Model(nn.Module):
    """A layer before the head and an operation after it, so that there is something to compile on both sides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(H, H)
        self.lm = TinyLM()
        self.head = install_head(self.lm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) * 1.5


class Counter:
    """An aot_eager backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def task(seed: int, spec: LossSpec, n: int = 7) -> HeadTask:
    made = make(seed=seed, n=n, loss=spec, chunk=3)[2]
    made.policy = True
    return made


def step(model: Any, head: nn.Module, x: torch.Tensor, given: HeadTask | None) -> list[torch.Tensor]:
    """Loss, log-probabilities, and gradients by the input, the body and the head."""
    leaf = x.clone().requires_grad_()
    head.task = given
    out = model(leaf)
    head.task = None
    total = out.sum()
    values = [out.detach()]
    if given is not None and given.kind == "loss":
        total = total + (given.log_probs_N * torch.linspace(-1, 1, len(given.log_probs_N))).sum()
        values += [given.log_probs_N.detach(), given.result.divergence_N]
    grads = torch.autograd.grad(total, [leaf, *[p for p in model.parameters() if p.requires_grad]], allow_unused=True)
    return values + [g for g in grads if g is not None]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SPECS = [LossSpec(), LossSpec(divergence="jsd", beta=0.3), LossSpec(support="union_topk", top_k=4), LossSpec(divergence="k2")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.divergence}-{s.support}")
def test_compiled_is_eager_in_value_and_gradient(spec: LossSpec) -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(B, T, H, generator=torch.Generator().manual_seed(1))
    score = HeadTask(kind="score", index_N=torch.tensor([0, 3, 8]))
    for given in (lambda: task(3, spec), lambda: score, lambda: None):
        want, got = step(model, model.head, x, given()), step(compiled, model.head, x, given())
        assert len(want) == len(got) >= 4
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_one_graph_break_and_no_new_graph_for_the_tasks_of_later_steps() -> None:
    """Every step brings another task, with other values, numbers of positions and kinds: what is compiled stays."""
    model, counter = Model(), Counter()
    compiled = torch.compile(model, backend=counter, dynamic=False)
    x = torch.randn(B, T, H)
    step(compiled, model.head, x, task(0, LossSpec()))
    assert counter.graphs == 2  # before the head and after it: one break between them
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    assert all("_with_task" in why or "qualname: disable" in why for why in breaks)
    for seed in range(1, 12):
        step(compiled, model.head, x, task(seed, SPECS[seed % 4], n=3 + seed % 4))
    assert counter.graphs == 2 and breaks == dict(torch._dynamo.utils.counters["graph_break"])


def test_a_whole_graph_is_refused_by_name() -> None:
    model = Model()
    model.head.task = task(0, LossSpec())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_with_task"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(B, T, H))
