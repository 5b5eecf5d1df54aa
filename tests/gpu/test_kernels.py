"""On an accelerator: the Triton kernels against the definitions, and the head in bf16 against fp32."""

from __future__ import annotations

import pytest
import torch
from parity import reference

from verl_opsd.distill import dense
from verl_opsd.distill.head import HeadTask, install_head
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal

pytestmark = pytest.mark.gpu


SPECS = {
    name: LossSpec(divergence=name, **reference.PARAMETERS.get(name, {})).mixture for name in sorted(reference.DIVERGENCES)
}


def check_rows(got: dense.Passes, exact: dense.Passes, coef: torch.Tensor) -> None:
    """Value and gradient of every position by itself, float32 kernels against float64 in plain torch (which the CPU's tests compare with
    the definition)."""
    want, want_grad = exact.value_C, exact.grad(coef.double(), torch.float64)
    error = (got.value_C - want).abs()
    assert (error <= torch.clamp(1e-5 * want, min=1e-7)).all(), error
    error = (got.grad(coef, torch.float32) - want_grad).norm(dim=-1)
    # A gradient is p (h - h_top). Where the sides are 50 nats apart all h but one are equal to a last digit of float32 (2^-23 of about 1
    # nat), so that digit times p stays, while the gradient itself may be as small as the p of that one token.
    assert (error <= 1e-5 * want_grad.norm(dim=-1) + 1e-8).all(), error / want_grad.norm(dim=-1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows, vocab, apart", [(3, 7, 2.0), (5, 4096, 2.0), (4, 10001, 50.0), (16, 248320, 0.1)])
def test_kernels_are_the_definition(name: str, rows: int, vocab: int, apart: float) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    student = 3 * torch.randn(rows, vocab, device="cuda", generator=g)
    teacher = student + apart * torch.randn(rows, vocab, device="cuda", generator=g)
    coef = torch.rand(rows, device="cuda", generator=g) + 0.1
    assert dense.uses_triton(student)
    got = dense.score(student, teacher, SPECS[name])
    check_rows(got, dense.score(student.double(), teacher.double(), SPECS[name]), coef)
    leaf = student.double().requires_grad_()
    want = reference.DIVERGENCES[name](reference.softmax(leaf), reference.softmax(teacher))
    (want_grad,) = torch.autograd.grad((coef.double() * want).sum(), leaf)
    torch.testing.assert_close(got.value_C.double(), want, rtol=1e-5, atol=1e-7)
    assert (got.grad(coef, torch.float32) - want_grad).norm() < 1e-5 * want_grad.norm() + 1e-8
    logp = reference.log_softmax(student)
    norms = got.norms
    torch.testing.assert_close(norms.entropy_C.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ((student - norms.student_top_C[:, None]) - norms.student_log_C[:, None]).double(), logp, rtol=1e-6, atol=2e-6
    )
    assert torch.equal(norms.agree_C.bool(), student.argmax(-1) == teacher.argmax(-1))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("student_at, teacher_at", [(0.0, 300.0), (1e4, 1e4), (1e4, 0.0)])
def test_kernels_count_logits_from_the_largest(name: str, student_at: float, teacher_at: float) -> None:
    g = torch.Generator("cuda").manual_seed(1)
    student = 3 * torch.randn(8, 5000, device="cuda", generator=g)
    teacher = student + torch.randn(8, 5000, device="cuda", generator=g) + teacher_at
    student = student + student_at
    exact = dense.score(student.double(), teacher.double(), SPECS[name])
    check_rows(dense.score(student, teacher, SPECS[name]), exact, torch.ones(8, device="cuda"))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("student_rest, teacher_rest", [(1e-2, 0.9), (1e-4, 2e-4), (1e-6, 0.5), (0.9, 1e-4)])
def test_kernels_keep_the_gradient_of_whoever_is_sure(name: str, student_rest: float, teacher_rest: float) -> None:
    g = torch.Generator("cuda").manual_seed(2)
    student, teacher = (torch.randn(8, 5000, device="cuda", generator=g) for _ in range(2))
    for logits, rest in ((student, student_rest), (teacher, teacher_rest)):
        logits[:, 0] = (logits[:, 1:].double().logsumexp(-1) + torch.tensor(1 / rest - 1).double().log()).float()
    exact = dense.score(student.double(), teacher.double(), SPECS[name])
    check_rows(dense.score(student, teacher, SPECS[name]), exact, torch.ones(8, device="cuda"))


@pytest.mark.parametrize("name", SPECS)
def test_kernels_on_identical_masked_and_extreme_rows(name: str) -> None:
    student = torch.randn(4, 5000, device="cuda")
    student[1], student[2] = torch.nan, 5e3 * student[2].sign()
    teacher = student.clone()
    teacher[2] *= -1
    coef = torch.tensor([1.0, 0.0, 1.0, 0.5], device="cuda")
    scored = dense.score(student, teacher, SPECS[name])
    value, grad = scored.value_C, scored.grad(coef, torch.bfloat16)
    assert value[[0, 3]].abs().max() <= 1e-7 and (grad[1] == 0).all() and grad[[0, 3]].abs().max() <= 1e-9
    exact = dense.score(student[2:3].double(), teacher[2:3].double(), SPECS[name])
    assert torch.isfinite(grad[2]).all() and value[2].item() == pytest.approx(exact.value_C.item(), rel=1e-5)


def bf16_case(rows: int, vocab: int, student: int, teacher: int, scale: float = 0.1) -> tuple[torch.Tensor, ...]:
    """bf16 hidden states and weights of both sides, on the GPU, with logits of a few nats."""
    g = torch.Generator("cuda").manual_seed(0)

    def random(n: int, width: int, size: float) -> torch.Tensor:
        return (size * torch.randn(n, width, device="cuda", generator=g)).bfloat16()

    return random(rows, student, 1.0), random(vocab, student, scale), random(rows, teacher, 1.0), random(vocab, teacher, scale)


def one_pass(
    hidden: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, other_weight: torch.Tensor, coef: torch.Tensor
) -> tuple[torch.Tensor, dense.Norms, torch.Tensor]:
    """(KL, norms, gradient in bf16) of ``blocks_triton``, from slices of three blocks."""
    from verl_opsd.distill import blocks_triton

    assert blocks_triton.takes(weight, other_weight)
    blocks = blocks_triton.Blocks(len(hidden), len(weight), weight.device)
    for at in range(0, len(weight), 3 * blocks_triton.BLOCK):
        part = slice(at, at + 3 * blocks_triton.BLOCK)
        sides = (hidden, weight[part]), (other, other_weight[part])
        blocks.add(at, *(torch.mm(h, w.T, out_dtype=torch.float32) for h, w in sides))
    norms, kl = blocks.combine()
    return kl, norms, blocks.grad(coef, torch.bfloat16)


@pytest.mark.parametrize(
    "shape",
    [(70, 3001, 256, 320), (128, 256, 64, 64), (1, 130, 8, 8), (300, 50000, 512, 256), (130, 248320, 128, 128)],
    ids=str,
)
def test_one_pass_is_the_definition(shape: tuple[int, int, int, int]) -> None:
    """Values to float32's digits; a gradient in bf16 about as far from the exact one as one from kept logits is."""
    hidden, weight, other, other_weight = bf16_case(*shape)
    coef = torch.rand(shape[0], device="cuda") + 0.1
    kl, norms, grad = one_pass(hidden, weight, other, other_weight, coef)
    leaf = (hidden.double() @ weight.double().T).requires_grad_()
    q = reference.softmax(other.double() @ other_weight.double().T)
    want = reference.kl(reference.softmax(leaf), q)
    (want_grad,) = torch.autograd.grad((coef.double() * want).sum(), leaf)
    assert ((kl - want).abs() <= torch.clamp(1e-5 * want, min=1e-7)).all()
    logp = reference.log_softmax(leaf.detach())
    torch.testing.assert_close(norms.entropy_C.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(norms.agree_C.bool(), leaf.argmax(-1) == q.argmax(-1))
    student, teacher = (torch.mm(h, w.T, out_dtype=torch.float32) for h, w in ((hidden, weight), (other, other_weight)))
    passes = dense.score(student, teacher).grad(coef, torch.bfloat16)
    error, theirs = ((x.double() - want_grad).norm() / want_grad.norm() for x in (grad, passes))
    print(f"{shape}: gradient {error:.2e}, from kept logits {theirs:.2e}, KL {((kl - want) / want).abs().max():.1e}")
    assert error < 1.2 * theirs < 3e-3


@pytest.mark.parametrize("offset", [0.0, 300.0, 1e4])
@pytest.mark.parametrize("rest, teacher_p", [(2.5e-3, 0.01), (3.4e-4, 0.1), (4.5e-5, 0.1), (4.5e-5, 1e-9), (0.9, 0.1)])
def test_one_pass_keeps_the_gradient_of_a_student_that_is_sure(rest: float, teacher_p: float, offset: float) -> None:
    """Each position by itself, from logits: one norm over a batch would hide such a row behind the others."""
    from verl_opsd.distill import blocks_triton

    g = torch.Generator("cuda").manual_seed(3)
    student, teacher = (torch.randn(8, 20000, device="cuda", generator=g) for _ in range(2))
    for logits, p in ((student, 1 - rest), (teacher, teacher_p)):
        logits[:, 0] = (logits[:, 1:].double().logsumexp(-1) + torch.tensor(p / (1 - p)).double().log()).float()
    student, teacher = student + offset, teacher + offset
    blocks = blocks_triton.Blocks(8, 20000, student.device)
    for at in range(0, 20000, 3 * blocks_triton.BLOCK):
        part = slice(at, at + 3 * blocks_triton.BLOCK)
        blocks.add(at, student[:, part].contiguous(), teacher[:, part].contiguous())
    _, kl = blocks.combine()
    exact = dense.score(student.double(), teacher.double())
    want = exact.grad(torch.ones(8, device="cuda").double(), torch.float64)
    kept, got = (blocks.grad(torch.ones(8, device="cuda"), dtype) for dtype in (torch.float32, torch.bfloat16))
    assert ((kl - exact.value_C).abs() <= torch.clamp(1e-5 * exact.value_C, min=1e-7)).all()
    # Of 8 significant bits bf16 rounds a number by up to 2^-8, and such a row is nearly one number: nothing averages. The two factors that
    # are kept have 11 bits, (1 + 2^-11)^2 more, the second 2^-25 nats at best.
    size, errors = want.norm(dim=-1), [(x - want).norm(dim=-1) for x in (kept, got)]
    assert (errors[0] <= 2**-10 * size + 2**-25).all(), errors[0] / size
    assert (errors[1] <= (2**-8 + 2**-10) * size + 2**-25).all(), errors[1] / size


def test_one_pass_on_identical_near_and_masked_rows() -> None:
    hidden, weight, _, _ = bf16_case(8, 5000, 256, 256)
    other = hidden.clone()
    other[1] += 0.01 * torch.randn_like(other[1])
    hidden[2], other[3] = torch.nan, torch.inf
    coef = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], device="cuda")
    kl, norms, grad = one_pass(hidden, weight, other, weight, coef)
    assert kl[[0, 4, 5, 6, 7]].abs().max() <= 1e-12 and grad[[0, 4, 5, 6, 7]].abs().max() <= 1e-7
    assert (grad[[2, 3]] == 0).all()
    assert (norms.agree_C[[0, 4, 5, 6, 7]] == 1).all()
    p, q = (reference.softmax(h[1:2].double() @ weight.double().T) for h in (hidden, other))
    assert abs(float(kl[1] - reference.kl(p, q))) < 1e-5 * float(kl[1]) + 1e-9


@torch.no_grad()
@pytest.mark.parametrize("late, tokens", [(1, 700), (128, 1000), (1000, 1777)])
def test_attention_over_carried_keys_is_the_definition(late: int, tokens: int) -> None:
    from verl_opsd.models import attention

    g = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, 256, device="cuda", generator=g).bfloat16()
        for heads, n in ((8, late), (2, tokens), (2, tokens))
    )
    if torch.cuda.get_device_capability() >= (9, 0):
        assert attention._cudnn_is_fastest(query, key, value)
    out = attention.causal(query, key, value, [0, late], None, 0.0)
    scores = query.float() @ key.float().repeat_interleave(4, 1).mT / 16
    later = torch.ones(late, tokens, dtype=torch.bool, device="cuda").triu(1 + tokens - late)
    want = scores.masked_fill(later, -torch.inf).softmax(-1) @ value.float().repeat_interleave(4, 1)
    # bf16 rounds numbers of all sizes by 1.7e-3 of their norm: once the probabilities, once each part's output, once the joined one, which
    # makes 2.8e-3. A share in bf16 would add 2e-2 at one query, where the late part is a single token.
    assert (out.float() - want).norm() < 4e-3 * want.norm()


@pytest.mark.parametrize("positions", [16384, 65536])
def test_peak_memory_does_not_grow_with_the_positions(positions: int) -> None:
    """64k loss positions of a 248k vocabulary: below 1 GB above the inputs and the gradient that is returned."""
    hidden, weight, other, other_weight = bf16_case(positions, 248320, 512, 640, 0.02)
    model, linear = torch.nn.Module(), torch.nn.Linear(512, 248320, bias=False, device="meta", dtype=torch.bfloat16)
    model.get_output_embeddings = lambda: linear
    head = install_head(model)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    leaf = hidden[None].requires_grad_()
    head.task = HeadTask(
        kind="loss",
        index_N=torch.arange(positions, device="cuda"),
        labels_N=torch.zeros(positions, dtype=torch.int64, device="cuda"),
        teacher=Signal(hidden_NH=other, head_id="big"),
        teacher_weight_VH=other_weight,
        coef_N=torch.full((positions,), 1 / positions, device="cuda"),
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head(leaf).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradient = hidden.numel() * hidden.element_size()
    print(f"{positions} positions: {peak / 1e9:.2f} GB, {(peak - gradient) / 1e9:.2f} GB beside the gradient")
    assert peak - gradient < 1e9


def test_narrow_slices_and_a_short_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk and one slice, against chunks of 256 positions with a last one of 188 in wide slices, twice: to the bit, repeated."""
    from verl_opsd.distill import blocks_triton, chunk

    positions, vocab = 700, 60001
    hidden, weight, other, other_weight = bf16_case(positions, vocab, 512, 512, 0.02)
    model, linear = torch.nn.Module(), torch.nn.Linear(512, vocab, bias=False, device="meta", dtype=torch.bfloat16)
    model.get_output_embeddings = lambda: linear
    head = install_head(model)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    monkeypatch.setattr(chunk, "ONE_PASS_ROWS", 2 * 188)

    def run(rows: int, width: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(blocks_triton, "SLICE", width * blocks_triton.BLOCK)
        leaf = hidden[None].clone().requires_grad_()
        head.task = HeadTask(
            kind="loss",
            index_N=torch.arange(positions, device="cuda").flip(0),
            teacher=Signal(hidden_NH=other, head_id="big"),
            teacher_weight_VH=other_weight,
            coef_N=torch.full((positions,), 1 / positions, device="cuda"),
            chunk=rows,
        )
        head(leaf).sum().backward()
        assert head.task.result is not None
        return head.task.result.divergence_N, head.task.result.entropy_N, leaf.grad

    whole, narrow = run(positions, 200), run(256, 3)
    assert all(torch.equal(a, b) for a, b in zip(run(256, 3), narrow, strict=True))
    torch.testing.assert_close(
        narrow[:2], whole[:2], rtol=1e-5, atol=1e-6
    )  # other shapes may choose another kernel for a product
    assert (narrow[2] - whole[2]).float().norm() < 3e-3 * whole[2].float().norm()


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(),
        LossSpec(divergence="forward_kl"),
        LossSpec(divergence="jsd", beta=0.5),
        LossSpec(divergence="skewed_reverse_kl", skew=0.1),
        LossSpec(divergence="skewed_forward_kl", skew=0.1),
        LossSpec(support="union_topk", top_k=20),
        LossSpec(divergence="k2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied_teacher", [False, True])
def test_head_in_bf16_is_the_head_in_fp32(spec: LossSpec, tied_teacher: bool) -> None:
    g = torch.Generator("cuda").manual_seed(1)
    n, hidden, vocab = 70, 256, 3001
    weight = (torch.randn(vocab, hidden, device="cuda", generator=g) * 0.1).bfloat16()
    x = torch.randn(1, 2 * n, hidden, device="cuda", generator=g).bfloat16()
    teacher = (x[0, :n].float() + torch.randn(n, hidden, device="cuda", generator=g)).bfloat16()
    teacher_weight = None if tied_teacher else weight.roll(1, 0)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        model, linear = torch.nn.Module(), torch.nn.Linear(hidden, vocab, bias=False, device="cuda", dtype=dtype)
        model.get_output_embeddings = lambda linear=linear: linear
        head = install_head(model)
        head.weight.data.copy_(weight)
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        head.task = HeadTask(
            kind="loss",
            index_N=torch.arange(n, device="cuda"),
            labels_N=torch.arange(n, device="cuda"),
            teacher=Signal(hidden_NH=teacher.cpu(), head_id="student" if tied_teacher else "big"),
            teacher_weight_VH=None if teacher_weight is None else teacher_weight.to(dtype),
            coef_N=torch.full((n,), 1 / n),
            anchor=Signal(hidden_NH=teacher.roll(1, 0), head_id="student"),
            anchor_coef_N=torch.full((n,), 0.1 / n, device="cuda"),
            loss=spec,
            chunk=32,
        )
        loss = head(leaf)
        loss.sum().backward()
        results.append((loss.item(), leaf.grad.float(), head.weight.grad.float(), head.task.result.divergence_N))
    (loss, gx, gw, div), (want, want_gx, want_gw, want_div) = results
    # Logits and softmax are float32 in both; only the gradient of the logits is rounded to bf16.
    assert loss == pytest.approx(want, rel=1e-3)
    torch.testing.assert_close(div, want_div, rtol=2e-3, atol=1e-4)
    assert (gx - want_gx).norm() < 1e-2 * want_gx.norm() and (gw - want_gw).norm() < 1e-2 * want_gw.norm()
