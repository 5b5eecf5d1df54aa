"""The kernels of the one pass, interpreted on the CPU, against float64. On an accelerator ``tests/gpu`` runs them compiled."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from parity import reference

from distill import logit_rows
from verl_opsd.distill import chunk, dense

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip(
        "kernels are interpreted with TRITON_INTERPRET=1 and triton installed (3.6 with numpy below 2.4)",
        allow_module_level=True,
    )

from verl_opsd.distill import blocks_triton
from verl_opsd.distill.head import HeadTask


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_triton, "BLOCK", 64)


def run(
    student: torch.Tensor, teacher: torch.Tensor, coef: torch.Tensor, keep: torch.dtype = torch.float32, width: int = 192
) -> tuple[dense.Norms, torch.Tensor, torch.Tensor]:
    rows, vocab = student.shape
    blocks = blocks_triton.Blocks(rows, vocab, student.device, keep)
    for at in range(0, vocab, width):
        blocks.add(at, student[:, at : at + width].contiguous(), teacher[:, at : at + width].contiguous())
    norms, kl = blocks.combine()
    return norms, kl, blocks.grad(coef, torch.float32)


def definition(student: torch.Tensor, teacher: torch.Tensor, coef: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = student.double().requires_grad_()
    kl = reference.kl(reference.softmax(leaf), reference.softmax(teacher.double()))
    (grad,) = torch.autograd.grad((coef.double() * kl).sum(), leaf)
    return kl.detach(), grad


@pytest.mark.parametrize("vocab, width", [(700, 192), (130, 64), (64, 192), (50, 64)])
@pytest.mark.parametrize("apart", [1e-3, 1e-2, 1.0, 30.0])
def test_value_norms_and_gradient_are_the_definition(vocab: int, width: int, apart: float) -> None:
    g = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(3, vocab, generator=g)
    teacher = student + apart * torch.randn(3, vocab, generator=g)
    coef = torch.tensor([0.3, 1.0, 0.7])
    norms, kl, grad = run(student, teacher, coef, width=width)
    want, want_grad = definition(student, teacher, coef)
    assert ((kl - want).abs() <= torch.clamp(1e-5 * want, min=1e-9)).all() and (kl >= 0).all()
    assert (grad - want_grad).norm() < 1e-5 * want_grad.norm()
    logp, logq = reference.log_softmax(student.double()), reference.log_softmax(teacher.double())
    got = (student - norms.student_top_C[:, None]) - norms.student_log_C[:, None]
    torch.testing.assert_close(got.double(), logp, rtol=1e-6, atol=5e-6)
    got = (teacher - norms.teacher_top_C[:, None]) - norms.teacher_log_C[:, None]
    torch.testing.assert_close(got.double(), logq, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(norms.entropy_C.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(norms.agree_C.bool(), student.argmax(-1) == teacher.argmax(-1))


def test_sixteen_bits_touch_the_gradient_alone() -> None:
    g = torch.Generator().manual_seed(1)
    student, difference, coef = 3 * torch.randn(4, 500, generator=g), torch.randn(4, 500, generator=g), torch.ones(4)
    for apart in (1e-3, 1.0):
        exact, short = (run(student, student + apart * difference, coef, keep) for keep in (torch.float32, torch.float16))
        assert torch.equal(exact[1], short[1]) and all(torch.equal(a, b) for a, b in zip(exact[0], short[0], strict=True))
        assert 1e-6 < (exact[2] - short[2]).norm() / exact[2].norm() < 2**-10  # two factors, each to 2^-11


@pytest.mark.parametrize("case", logit_rows.CASES)
def test_every_row_keeps_its_digits(case: str) -> None:
    student, teacher = logit_rows.make(case)
    _, kl, grad = run(student, teacher, torch.ones(6))
    logit_rows.check(kl, grad, logit_rows.wanted("reverse_kl", student, teacher))


@pytest.mark.parametrize(
    "rest, teacher_p", [(2.5e-3, 0.01), (3.4e-4, 0.1), (3.4e-4, 0.01), (4.5e-5, 0.1), (4.5e-5, 1e-9), (1e-6, 0.1)]
)
def test_sixteen_bits_keep_the_gradient_of_a_student_that_is_sure(rest: float, teacher_p: float) -> None:
    """Each position by itself: one norm over a batch would hide such a row behind the others."""
    g = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(8, 512, generator=g), torch.randn(8, 512, generator=g)
    for logits, p in ((student, 1 - rest), (teacher, teacher_p)):
        others = logits[:, 1:].double().logsumexp(-1)
        logits[:, 0] = (others + torch.tensor(p / (1 - p), dtype=torch.float64).log()).float()
    want = definition(student, teacher, torch.ones(8))[1]
    got = run(student, teacher, torch.ones(8), torch.float16)[2]
    exact = run(student, teacher, torch.ones(8), torch.float32)[2]
    error, floor = ((g - want).norm(dim=-1) for g in (got, exact))
    # Two factors to 2^-11 each, the second to 2^-25 nats at best; and what float32 logits leave of such a row.
    assert (error <= 2**-10 * want.norm(dim=-1) + 2**-25 + floor).all(), error / want.norm(dim=-1)


def test_identical_masked_and_extreme_rows() -> None:
    student = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    student[1], student[2] = torch.nan, 5e3 * student[2].sign()
    teacher = student.clone()
    teacher[2] *= -1
    coef = torch.tensor([1.0, 0.0, 1.0, 0.5])
    norms, kl, grad = run(student, teacher, coef)
    assert kl[0] == kl[3] == 0 and (grad[[0, 1, 3]] == 0).all() and norms.agree_C[0] == 1
    logp, logq = student[2].double().log_softmax(-1), teacher[2].double().log_softmax(-1)  # probabilities underflow even there
    d = logp - logq
    want = (logp.exp() * d).sum()
    assert kl[2].item() == pytest.approx(float(want), rel=1e-6) and kl[2] > 9e3
    torch.testing.assert_close(grad[2].double(), logp.exp() * (d - want), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("vocab", [901, 640, 128, 50])
@pytest.mark.parametrize("rows, widest", [(1, 384), (2, 128), (3, 128)])
def test_slices_are_the_vocabulary(vocab: int, rows: int, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole chunks and longer ones; few rows take wide slices, in the room of a whole chunk's. Whichever they are, values and gradient
    are the definition's."""
    seen: list[tuple[int, int]] = []

    class Seen(blocks_triton.Blocks):
        def add(self, start: int, *pair: torch.Tensor) -> None:
            seen.append((start, pair[0].shape[1]))
            super().add(start, *pair)

    monkeypatch.setattr(blocks_triton, "Blocks", Seen)
    monkeypatch.setattr(blocks_triton, "SLICE", 128)
    monkeypatch.setattr(chunk, "ONE_PASS_ROWS", 3 if rows == 1 else 2)
    g = torch.Generator().manual_seed(4)
    hidden, weight, other, other_weight = (torch.randn(n, 16, generator=g).bfloat16() for n in (rows, vocab, rows, vocab))
    coef = torch.tensor([0.3, 1.0, 0.7])[:rows]
    task = HeadTask(kind="loss", index_N=torch.arange(rows), coef_N=coef, teacher_weight_VH=other_weight)
    part = chunk.ChunkInput.cut(task, slice(0, rows), hidden, weight, torch.float32, True)
    scored = chunk._OnePass(part, other, other_weight)
    assert seen == [(at, min(widest, vocab - at)) for at in range(0, vocab, widest)]
    want, want_grad = definition(hidden.float() @ weight.float().T, other.float() @ other_weight.float().T, coef)
    torch.testing.assert_close(scored.value_C.double(), want, rtol=1e-5, atol=1e-7)
    assert (scored.grad(coef, torch.float32) - want_grad).norm() < 2**-10 * want_grad.norm()
