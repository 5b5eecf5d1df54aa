"""TRL's generalised JSD on the same inputs: equal where both mean the same, and where they differ.

verl changes its behaviour when it can import TRL (and TRL 1.16 breaks it), so TRL lives beside the environment, in ``<prefix>/trl``
(``make install`` puts it there), and of it only this one function is compiled: importing its trainer takes as long as all tests here.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import inputs, reference
from verl_opsd.distill import divergence
from verl_opsd.distill.loss import LossSpec
from verl_opsd.errors import OpsdError

FOLDER = Path(sys.prefix) / "trl"
GIVEN, MILD = inputs.make(), inputs.make(scale=0.3)
ENDS = {0.0: "forward_kl", 1.0: "reverse_kl"}


def logits(given: inputs.Inputs) -> tuple[Tensor, Tensor]:
    return given.x @ given.weight.T, given.teacher @ given.teacher_weight.T


def near() -> tuple[Tensor, Tensor]:
    """Logits of 8 positions over 1000 tokens that differ by 1e-3: a student that has nearly learnt."""
    g = torch.Generator().manual_seed(0)
    student = 2 * torch.randn(8, 1000, generator=g)
    return student, student + 1e-3 * torch.randn(8, 1000, generator=g)


def cases() -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    student, teacher = (t[None] for t in logits(GIVEN))
    out: dict[str, Any] = {f"jsd{b}": (student, teacher, {"labels": GIVEN.labels[None], "beta": b}) for b in (0.1, 0.5, 0.9)}
    out["sequences"] = (student.view(3, 4, -1), teacher.view(3, 4, -1), {})
    student, teacher = (t[None] for t in logits(MILD))
    for end in ENDS:
        out[f"end{end}"] = (student, teacher, {"labels": MILD.labels[None], "beta": end})
        close = {"labels": MILD.labels[None], "beta": abs(end - 1e-6)}
        out[f"close{end}"] = (student.double(), teacher.double(), close)
    student, teacher = (t[None] for t in near())
    out |= {f"near{b}": (student, teacher, {"beta": b, "reduction": "none"}) for b in (1.0, 0.5)}
    return out


def generalized_jsd_loss() -> Any:
    """TRL's ``GKDTrainer.generalized_jsd_loss``, a static method that needs nothing but torch."""
    source = FOLDER / "trl" / "experimental" / "gkd" / "gkd_trainer.py"
    if not source.is_file():
        pytest.skip(f"TRL is not in {FOLDER}: pip install --no-deps --target {FOLDER} trl==1.14.2")
    (node,) = [
        n
        for n in ast.walk(ast.parse(source.read_text()))
        if isinstance(n, ast.FunctionDef) and n.name == "generalized_jsd_loss"
    ]
    node.decorator_list = []
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(ast.Module([node], []), str(source), "exec"), names)
    return names[node.name]


@pytest.fixture(scope="module")
def trl() -> dict[str, tuple[Tensor, Tensor]]:
    """By case: its loss, and the gradient by the student's logits."""
    function, out = generalized_jsd_loss(), {}
    for name, (student, teacher, options) in cases().items():
        leaf = student.detach().requires_grad_()
        loss = function(leaf, teacher, **options)
        out[name] = (loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0])
    return out


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_trls_in_value_and_gradient(trl, beta: float) -> None:
    theirs, by_logits = trl[f"jsd{beta}"]
    loss, gx, gw = inputs.ours(GIVEN, LossSpec(divergence="jsd", beta=beta))
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    assert inputs.relative(gx, by_logits[0] @ GIVEN.weight) < 1e-5 and inputs.relative(gw, by_logits[0].T @ GIVEN.x) < 1e-5


@pytest.mark.parametrize("beta", ENDS)
def test_trl_gives_the_ends_of_beta_another_meaning_which_is_refused_here(trl, beta: float) -> None:
    """At 0 and 1 TRL's loss is forward and reverse KL; its own formula, and the definition, tend to 0 there."""
    theirs, by_logits = trl[f"end{beta}"]
    loss, gx, _ = inputs.ours(MILD, LossSpec(divergence=ENDS[beta]))
    assert loss == pytest.approx(theirs.item(), rel=1e-5) and inputs.relative(gx, by_logits[0] @ MILD.weight) < 1e-5
    assert trl[f"close{beta}"][0].item() == pytest.approx(1e-6 * loss, rel=1e-2)  # a millionth away, a million times less
    with pytest.raises(OpsdError, match="beta"):
        LossSpec(divergence="jsd", beta=beta)


def test_without_labels_trl_divides_by_sequences_and_not_by_tokens(trl) -> None:
    every = GIVEN._replace(labels=torch.zeros_like(GIVEN.labels))
    loss, _, _ = inputs.ours(every, LossSpec(divergence="jsd", beta=0.5))
    assert trl["sequences"][0].item() == pytest.approx(4 * loss, rel=1e-5)  # 3 sequences of 4 tokens


@pytest.mark.parametrize(("beta", "name"), [(1.0, "reverse_kl"), (0.5, "jsd")])
def test_recorded_example_of_a_small_divergence_in_fp32(trl, beta: float, name: str) -> None:
    """The true value is a few 1e-7 nats. TRL sums p (log p - log q), whose terms are 1e-6 and of both signs, so most digits cancel;
    here every term is at least 0."""
    student, teacher = near()
    p, q = reference.softmax(student), reference.softmax(teacher)
    want = reference.kl(p, q) if name == "reverse_kl" else reference.jsd(p, q, beta)
    theirs = trl[f"near{beta}"][0].sum(-1)[0]
    logp, logq = student.log_softmax(-1), teacher.log_softmax(-1)
    ours = divergence.reverse_kl(logp, logq) if name == "reverse_kl" else divergence.jsd(logp, logq, beta)
    assert 5e-8 < want.min() < want.max() < 1e-6
    assert ((theirs - want) / want).abs().max() > 0.1
    assert ((ours - want) / want).abs().max() < 1e-3
