"""The library against the frozen numbers of ``golden.json``, and those against the definitions that they came from.

One version of verl is supported, so there is one set of numbers; ``tests/integration/refusals`` shows that another version is refused.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

from parity import golden, inputs, reference
from verl_opsd import SUPPORTED_VERL
from verl_opsd.distill.head import HeadTask, install_head
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal

FROZEN = json.loads(golden.PATH.read_text())


def test_frozen_numbers_are_the_definitions() -> None:
    now = golden.compute()
    assert list(now) == list(FROZEN) and len(now) == 20
    for key, case in now.items():
        for part in ("value", "gradient"):
            torch.testing.assert_close(
                torch.tensor(case[part], dtype=torch.float64),
                torch.tensor(FROZEN[key][part], dtype=torch.float64),
                rtol=1e-12,
                atol=1e-15,
            )


def test_numbers_are_of_the_one_version_of_verl_that_may_be_installed() -> None:
    pins = re.findall(r'"verl(?:\[\w+\])?(.*?)"', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert {p for p in pins if p[:1] in "=<>~!"} == {f"=={SUPPORTED_VERL}"} and version("verl") == SUPPORTED_VERL


def test_one_value_by_hand() -> None:
    """KL of position 1's students to its teacher, to second order: half the variance of the logits' difference under p."""
    p = torch.tensor(golden.STUDENT[1], dtype=torch.float64).softmax(-1)
    d = torch.tensor([0.001, 0, -0.001, 0, 0, 0, 0], dtype=torch.float64)
    want = 0.5 * float((p * d * d).sum() - (p * d).sum() ** 2)
    assert FROZEN["reverse_kl-full"]["value"][1] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", FROZEN)
def test_head_gives_the_frozen_numbers(key: str, dtype: torch.dtype) -> None:
    """An identity matrix as the vocabulary weight makes hidden states logits."""
    name, side = key.split("-")
    vocab = len(golden.STUDENT[0])
    model, linear = nn.Module(), nn.Linear(vocab, vocab, bias=False, dtype=dtype)
    model.get_output_embeddings = lambda: linear
    head = install_head(model)
    nn.init.eye_(head.weight)
    x = torch.tensor(golden.STUDENT, dtype=dtype)[None].requires_grad_()
    head.task = HeadTask(
        kind="loss",
        index_N=torch.arange(3),
        labels_N=torch.tensor(golden.LABELS),
        teacher=Signal(hidden_NH=torch.tensor(golden.TEACHER, dtype=dtype), head_id="student"),
        coef_N=torch.ones(3),
        loss=LossSpec(
            divergence=name,
            support=side,
            top_k=None if side == "full" else golden.TOP_K,
            **reference.PARAMETERS.get(name, {}),
        ),
        chunk=2,
    )
    (gx,) = torch.autograd.grad(head(x).sum(), x)
    value, gradient = (torch.tensor(FROZEN[key][k], dtype=torch.float64) for k in ("value", "gradient"))
    # Position 1: logits that differ by 1e-3 are rounded to float32 at 4.
    loose = 1e-3 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(head.task.result.divergence_N[[0, 2]].double(), value[[0, 2]], rtol=1e-5, atol=0)
    torch.testing.assert_close(head.task.result.divergence_N[1].double(), value[1], rtol=loose, atol=0)
    assert inputs.relative(gx[0], gradient) < 1e-5
    for i in range(3):  # where p is 0.997 of one token (position 2), p (d - mean d) cancels in float32
        assert inputs.relative(gx[0, i], gradient[i]) < (1e-3 if dtype == torch.float32 else 1e-6)
