"""Faults that users of this field have hit, in estimators, supports and memory: one test a kind."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from parity import reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from distill.paths import ALL_PATHS, bare_head
from distill.test_head import H, V, make, relative_error, run
from verl_opsd.distill import divergence, support
from verl_opsd.distill.head import HeadTask
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal

# Estimators, top-k


def test_forward_kl_on_a_support_where_the_student_has_more_mass_than_the_teacher() -> None:
    """Three tokens, support {0}: the truncated sum q_0 log(q_0 / p_0) is negative; clamped, it has no gradient."""
    student = torch.tensor([[0.8, 0.1, 0.1]]).log().requires_grad_()
    q = torch.tensor([[0.6, 0.3, 0.1]])
    ids = torch.tensor([[0]])
    value = divergence.forward_kl(support.with_tail(student.log_softmax(-1), ids), support.with_tail(q.log(), ids))
    assert 0.6 * math.log(0.6 / 0.8) < 0
    assert value.item() == pytest.approx(0.6 * math.log(0.6 / 0.8) + 0.4 * math.log(0.4 / 0.2), rel=1e-5)
    (grad,) = torch.autograd.grad(value.sum(), student)
    # d/dz of KL(q || p) over (token 0, rest): p - q, the rest shared in proportion to the student's 0.1 : 0.1
    torch.testing.assert_close(grad, torch.tensor([[0.2, -0.1, -0.1]]), rtol=1e-5, atol=1e-6)


def optimise_toy(loss_of, side: str) -> tuple[float, float]:
    """Mass of student and teacher on the support, after 300 steps on the logits of one position."""
    g = torch.Generator().manual_seed(0)
    z = (2 * torch.randn(1, 40, generator=g)).requires_grad_()
    logq = (2 * torch.randn(1, 40, generator=g)).log_softmax(-1)
    optimizer = torch.optim.Adam([z], lr=0.05)
    for _ in range(300):
        logp = z.log_softmax(-1)
        token = torch.multinomial(logp.detach().exp(), 1, generator=g)[:, 0]
        ids = support.support_ids(side, logp, logq, token, 5)
        optimizer.zero_grad()
        loss_of(support.with_tail(logp, ids), support.with_tail(logq, ids)).sum().backward()
        optimizer.step()
    p_out, q_out = support.with_tail(z.detach().log_softmax(-1), ids), support.with_tail(logq, ids)
    return support.coverage(p_out).item(), support.coverage(q_out).item()


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("side", ["student_topk", "teacher_topk", "union_topk"])
def test_optimising_under_a_support_does_not_leak_mass_into_the_tail(name: str, side: str) -> None:
    student, teacher = optimise_toy(getattr(divergence, name), side)
    assert student == pytest.approx(teacher, abs=0.03)


def test_without_the_tail_bucket_mass_does_leak() -> None:
    """The control: the same optimisation with the reverse KL's sum over the support alone."""
    student, teacher = optimise_toy(lambda p, q: (p.exp() * (p - q))[:, :-1].nan_to_num().sum(-1), "teacher_topk")
    assert student < teacher - 0.2


def test_top_k_goes_to_the_full_divergence_through_the_head() -> None:
    head, x, task = make(seed=8)
    task.anchor = task.anchor_coef_N = None
    full = run(head, x, task)
    for side in ("student_topk", "teacher_topk", "union_topk"):
        task.loss = LossSpec(support=side, top_k=V)
        loss, gx, _ = run(head, x, task)
        assert loss == pytest.approx(full[0], rel=1e-5) and relative_error(gx, full[1].double()) < 1e-5


def test_coverage_tells_both_sides() -> None:
    head, x, task = make(seed=9, loss=LossSpec(support="teacher_topk", top_k=4), anchor=None, anchor_coef_N=None)
    run(head, x, task)
    p = reference.softmax(x.detach().double().reshape(-1, H)[task.index_N] @ head.weight.detach().double().T)
    q = reference.softmax(task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T)
    for i in range(7):
        ids = reference.support_of("teacher_topk", p[i], q[i], int(task.labels_N[i]), 4)
        assert task.result.coverage_student_N[i].item() == pytest.approx(float(p[i][ids].sum()), rel=1e-5)
        assert task.result.coverage_teacher_N[i].item() == pytest.approx(float(q[i][ids].sum()), rel=1e-5)


def test_the_default_is_analytic_and_has_less_variance_than_a_sampled_token() -> None:
    assert LossSpec() == LossSpec(divergence="reverse_kl", support="full")
    g = torch.Generator().manual_seed(0)
    student = torch.randn(50, generator=g, dtype=torch.float64).requires_grad_()
    logq = torch.randn(50, generator=g, dtype=torch.float64).log_softmax(-1)
    logp = student.log_softmax(-1)
    (exact,) = torch.autograd.grad(divergence.reverse_kl(logp, logq), student, retain_graph=True)
    tokens = torch.multinomial(logp.detach().exp(), 400, replacement=True, generator=g)
    samples = torch.stack([torch.autograd.grad(divergence.k2(logp[t], logq[t]), student, retain_graph=True)[0] for t in tokens])
    noise = (samples - exact).norm(dim=-1).mean()
    assert noise > 1.0 * exact.norm()  # one sampled token is mostly noise; the analytic gradient has none
    assert (samples.mean(0) - exact).norm() < 0.35 * noise


# Memory


class Saved:
    """A tensor that autograd keeps, in a box that dies with the graph that keeps it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("spec", ALL_PATHS, ids=str)
def test_no_tensor_of_positions_times_vocabulary_exists_and_none_is_kept(spec: LossSpec) -> None:
    vocab, hidden, n, chunk = 4096, 4, 256, 4
    head = bare_head(hidden, vocab)
    head.weight.requires_grad_(False)
    x = torch.randn(1, n, hidden, requires_grad=True)
    head.task = HeadTask(
        kind="loss",
        index_N=torch.arange(n),
        labels_N=torch.randint(vocab, (n,)),
        teacher=Signal(hidden_NH=torch.randn(n, hidden), head_id="student"),
        coef_N=torch.full((n,), 1 / n),
        loss=spec,
        chunk=chunk,
    )
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        box = Saved(tensor)
        saved.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor), LargestTensor() as largest:
        loss = head(x)
    assert largest.numel <= chunk * (vocab + 1) < n * vocab / 60
    assert saved and max(box.tensor.numel() for box in saved) <= n * hidden
    loss.sum().backward()


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have made and that are still there; the most of them at a time."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in given}

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def big_task(n: int, vocab: int, hidden: int, spec: LossSpec, chunk: int, seed: int = 0) -> HeadTask:
    g = torch.Generator().manual_seed(seed)
    return HeadTask(
        kind="loss",
        index_N=torch.arange(n),
        labels_N=torch.randint(vocab, (n,), generator=g),
        teacher=Signal(hidden_NH=torch.randn(n, hidden, generator=g), head_id="student"),
        coef_N=torch.full((n,), 1 / n),
        loss=spec,
        chunk=chunk,
    )


@pytest.mark.parametrize("spec", [LossSpec(), LossSpec(divergence="jsd", beta=0.5), LossSpec(divergence="k2")], ids=str)
def test_peak_memory_is_that_of_one_chunk_however_many_positions(spec: LossSpec) -> None:
    """Between 64 and 512 positions nothing grows but what is one vector a position: hidden states, their gradient, a few values."""
    vocab, hidden, chunk = 8192, 4, 8
    head = bare_head(hidden, vocab)
    head.weight.requires_grad_(False)
    peaks = {}
    for n in (64, 512):
        x = torch.randn(1, n, hidden, requires_grad=True)
        head.task = big_task(n, vocab, hidden, spec, chunk)
        with Live(head.weight, x) as live:
            head(x).sum().backward()
        peaks[n] = live.peak
    one_chunk = chunk * vocab * 4
    assert peaks[512] - peaks[64] < 448 * 4 * (8 * hidden + 40) < one_chunk / 2
    assert one_chunk < peaks[64]


def test_nothing_of_a_micro_batch_outlives_it() -> None:
    """Five micro-batches before one step: after each of them no logit of either side is left, and no more bytes than after the first."""
    vocab, hidden, n = 8192, 4, 32
    head = bare_head(hidden, vocab)
    head.weight.requires_grad_(False)
    left = []
    x = torch.randn(1, n, hidden, requires_grad=True)
    with Live(head.weight, x) as live:
        for i in range(5):
            head.task = big_task(n, vocab, hidden, LossSpec(), chunk=8, seed=i)
            head(x).sum().backward()
            head.task = None
            left.append(live.now)
    assert left[-1] == left[0] < vocab * 4  # less than the logits of one position


#: Products of positions x hidden size x vocabulary: logits of student and teacher, the gradient of the hidden states; and what is asked for beside.
PRODUCTS = {
    "default": ({}, 3),
    "own weight trains": ({"trains": True}, 4),
    "anchor": ({"anchor": True}, 4),  # its logits; the student's are there, and the gradients are added up first
    "support": ({"loss": LossSpec(support="union_topk", top_k=3)}, 3),
    "sampled": ({"loss": LossSpec(divergence="k2")}, 3),
    "without a teacher": ({"loss": LossSpec(divergence="nll")}, 2),
    "without a gradient": ({"grad": False}, 2),
    "a policy term": ({"policy": True}, 5),  # logits once more, and a gradient
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_distillation_alone_costs_the_products_that_it_cannot_avoid(case: str) -> None:
    """Log-probabilities, entropy and agreement come from the same logits: what only PPO needs costs nothing until it is asked for."""
    asked, want = PRODUCTS[case]
    n, hidden, vocab = 12, 8, 64
    head, spec = bare_head(hidden, vocab), asked.get("loss", LossSpec())
    head.weight.requires_grad_(asked.get("trains", False))
    task = big_task(n, vocab, hidden, spec, chunk=5)
    if spec.divergence == "nll":
        task.teacher = None
    if asked.get("anchor"):
        task.anchor, task.anchor_coef_N = Signal(hidden_NH=torch.randn(n, hidden), head_id="student"), torch.ones(n)
    task.policy = asked.get("policy", False)
    head.task = task
    x = torch.randn(1, n, hidden, requires_grad=asked.get("grad", True))
    with FlopCounterMode(display=False) as counted:
        loss = head(x).sum()
        if task.policy:
            loss = loss + task.log_probs_N.sum()
        if x.requires_grad:
            loss.backward()
    assert counted.get_total_flops() == want * 2 * n * hidden * vocab
    assert task.result.student_logprob_N.isfinite().all() and task.result.entropy_N.isfinite().all()


def test_old_log_probabilities_cost_no_pass() -> None:
    """A batch comes back as it went in: there is no worker that could have been asked."""
    from verl_opsd.verl_adapter.trainer import OpsdTrainer

    batch = object()
    assert OpsdTrainer._compute_old_log_prob(object(), batch, {}) is batch  # type: ignore[arg-type]
