"""The kernels of the full vocabulary, interpreted on the CPU, against float64. On an accelerator ``tests/gpu`` runs them compiled."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from parity import reference

from distill import logit_rows
from verl_opsd.distill.loss import LossSpec

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip(
        "kernels are interpreted with TRITON_INTERPRET=1 and triton installed (3.6 with numpy below 2.4)",
        allow_module_level=True,
    )

from verl_opsd.distill import dense_triton

NAMES = sorted(reference.DIVERGENCES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_triton, "BLOCK", 128)
    monkeypatch.setattr(dense_triton, "SPAN", 128)


def passes(name: str, student: torch.Tensor, teacher: torch.Tensor) -> dense_triton.KernelPasses:
    mixture = LossSpec(name, **reference.PARAMETERS.get(name, {})).mixture
    return dense_triton.KernelPasses(student, teacher, mixture)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", logit_rows.CASES)
def test_value_and_gradient_are_the_definition(name: str, case: str) -> None:
    student, teacher = logit_rows.make(case)
    got = passes(name, student, teacher)
    logit_rows.check(got.value_C, got.grad(torch.ones(6), torch.float32), logit_rows.wanted(name, student, teacher))
    logp = reference.log_softmax(student)
    torch.testing.assert_close(got.norms.entropy_C.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-6)
    mine = (student - got.norms.student_top_C[:, None]) - got.norms.student_log_C[:, None]
    torch.testing.assert_close(mine.double(), logp, rtol=1e-6, atol=1e-6)
    assert torch.equal(got.norms.agree_C.bool(), student.argmax(-1) == teacher.argmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_identical_masked_and_weighted_rows(name: str) -> None:
    student = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    teacher = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    teacher[0], student[1] = student[0], torch.nan
    got = passes(name, student, teacher)
    coef = torch.tensor([1.0, 0.0, 0.3, 0.0])
    grad = got.grad(coef, torch.float32)
    assert got.value_C[0] == 0 and (grad[[0, 1, 3]] == 0).all()
    _, want = logit_rows.wanted(name, student[2:3], teacher[2:3])
    torch.testing.assert_close(grad[2:3].double(), 0.3 * want, rtol=1e-4, atol=1e-9)
