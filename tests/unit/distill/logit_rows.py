"""Rows of logits of both sides that lose digits where a formula is careless, and what every one of them must keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from parity import reference
from torch import Tensor

Rows = tuple[Tensor, Tensor]


def _sure(g: torch.Generator, rest: float, vocab: int, at: int = 0) -> Tensor:
    """Logits of which token ``at`` has all but ``rest`` of the mass."""
    logits = torch.randn(6, vocab, generator=g)
    others = logits[:, torch.arange(vocab) != at].double().logsumexp(-1)
    logits[:, at] = (others + math.log(1 / rest - 1)).float()
    return logits


def _offset(student: float, teacher: float) -> Callable[[torch.Generator, int], Rows]:
    def rows(g: torch.Generator, vocab: int) -> Rows:
        s = 3 * torch.randn(6, vocab, generator=g)
        return s + student, s + torch.randn(6, vocab, generator=g) + teacher

    return rows


def _ratio(size: float) -> Callable[[torch.Generator, int], Rows]:
    def rows(g: torch.Generator, vocab: int) -> Rows:
        s, t = (torch.randn(6, vocab, generator=g).sign() * size / 2 + torch.randn(6, vocab, generator=g) for _ in range(2))
        return s, t

    return rows


CASES: dict[str, Callable[[torch.Generator, int], Rows]] = {
    **{f"offsets {a:g} and {b:g}": _offset(a, b) for a, b in [(0, 0), (0, 300), (300, 300), (1e4, 1e4), (1e4, 0), (300, 1e4)]},
    **{f"log-ratios of {size:g}": _ratio(size) for size in (100.0, 1e3, 1e4)},
    "50 nats apart": lambda g, vocab: (
        s := 3 * torch.randn(6, vocab, generator=g),
        s + 50 * torch.randn(6, vocab, generator=g),
    ),
    "student sure": lambda g, vocab: (_sure(g, 1e-4, vocab), torch.randn(6, vocab, generator=g)),
    "student very sure": lambda g, vocab: (_sure(g, 1e-6, vocab), torch.randn(6, vocab, generator=g)),
    "teacher sure": lambda g, vocab: (torch.randn(6, vocab, generator=g), _sure(g, 1e-4, vocab)),
    "both sure of one": lambda g, vocab: (_sure(g, 1e-4, vocab), _sure(g, 2e-4, vocab)),
    "sure of two": lambda g, vocab: (_sure(g, 1e-4, vocab), _sure(g, 1e-4, vocab, at=1)),
}


def make(case: str, vocab: int = 300) -> Rows:
    """(student, teacher) logits, float32 [6, vocab]."""
    return CASES[case](torch.Generator().manual_seed(0), vocab)


def wanted(name: str, student: Tensor, teacher: Tensor, outcomes: Callable[[Tensor], Tensor] = lambda logp: logp) -> Rows:
    """(value [6], gradient of its sum by the student's logits [6, V]) in float64; ``outcomes``: log-probabilities of a support."""
    leaf = student.double().requires_grad_()
    value = reference.of_logprobs(name, *(outcomes(reference.log_softmax(z)) for z in (leaf, teacher)))
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), grad


def check(value: Tensor, grad: Tensor, want: Rows, atol: float = 1e-9) -> None:
    """Every row by itself: a norm over the batch hides the ones that matter."""
    error = (value - want[0]).abs()
    assert (error <= torch.clamp(1e-5 * want[0], min=1e-7)).all(), error / want[0]
    error, size = (grad - want[1]).norm(dim=-1), want[1].norm(dim=-1)
    assert (error <= 1e-5 * size + atol).all(), error / size
