"""The examples in the docstrings run: each computes a divergence a second time by hand. What the page says of estimators is so."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import torch
from parity import reference

from verl_opsd.distill import divergence
from verl_opsd.distill.loss import SAMPLED_OBJECTIVES

PAGE = " ".join((Path(__file__).parents[3] / "docs" / "distillation.md").read_text().split())


def test_docstrings_of_divergence() -> None:
    outcome = doctest.testmod(divergence)
    assert outcome.attempted >= 6 and outcome.failed == 0


def test_page_names_every_objective_and_its_default() -> None:
    assert all(f"`{name}`" in PAGE for name in (*reference.DIVERGENCES, *SAMPLED_OBJECTIVES))
    assert "Default: exact reverse KL" in PAGE and "the exact expectation over the next token, not an estimate" in PAGE


def test_page_says_what_the_gradient_of_each_estimator_is() -> None:
    """The sentence, read word by word, against expectations over the whole vocabulary in float64."""
    said = re.search(
        r"the gradients of (.*?) are that of reverse KL, the gradient of (.*?) that of forward KL; that of (.*?) is 0", PAGE
    )
    assert said is not None
    reverse, forward, nothing = (re.findall(r"`(\w+)`", part) for part in said.groups())
    assert sorted([*reverse, *forward]) == sorted(SAMPLED_OBJECTIVES) and nothing == ["k1"]
    g = torch.Generator().manual_seed(0)
    s, t = (torch.randn(9, dtype=torch.float64, generator=g) for _ in range(2))
    p, q = reference.softmax(s), reference.softmax(t)

    def of_kl(loss) -> torch.Tensor:
        leaf = s.clone().requires_grad_()
        return torch.autograd.grad(loss(reference.softmax(leaf)), leaf)[0]

    for names, want in (
        (reverse, of_kl(lambda x: reference.kl(x, q))),
        (forward, of_kl(lambda x: reference.kl(q, x))),
        (nothing, torch.zeros(9, dtype=torch.float64)),
    ):
        for name in names:
            leaf = s.clone().requires_grad_()
            more = (p.log(), (0.0, 1e9)) if name == "policy_gradient" else ()
            value = getattr(divergence, name)(leaf.log_softmax(-1), q.log(), *more)
            torch.testing.assert_close(torch.autograd.grad((p * value).sum(), leaf)[0], want, rtol=1e-9, atol=1e-12)
