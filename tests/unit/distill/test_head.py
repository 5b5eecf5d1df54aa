"""The head: nn.Linear without a task, the float64 definition with one."""

from __future__ import annotations

import pytest
import torch
from parity import reference
from torch import nn

from verl_opsd.distill.head import HeadTask, LossPositionHead, install_head
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import Clip, SurprisalGate, Threshold, TokenValues
from verl_opsd.errors import OpsdError

H, V, B, T = 12, 57, 2, 9


class TinyLM(nn.Module):
    """Just an output embedding."""

    def __init__(self, bias: bool = False, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(V, H, dtype=dtype)
        self.lm_head = nn.Linear(H, V, bias=bias, dtype=dtype)
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def make(seed: int = 0, dtype: torch.dtype = torch.float32, n: int = 7, teacher_h: int = 5, **task):
    """A head, hidden states that require grad, and a loss task with an external teacher and an anchor."""
    g = torch.Generator().manual_seed(seed)
    model = TinyLM(dtype=dtype)
    head = install_head(model)
    with torch.no_grad():
        head.weight.copy_(0.5 * torch.randn(V, H, generator=g, dtype=dtype))
    x = torch.randn(B, T, H, generator=g, dtype=dtype, requires_grad=True)
    index = torch.randperm(B * T, generator=g)[:n]
    task = {
        "kind": "loss",
        "index_N": index,
        "labels_N": torch.randint(V, (n,), generator=g),
        "teacher": Signal(hidden_NH=torch.randn(n, teacher_h, generator=g, dtype=dtype), head_id="big"),
        "teacher_weight_VH": torch.randn(V, teacher_h, generator=g, dtype=dtype),
        "coef_N": torch.rand(n, generator=g, dtype=dtype),
        "anchor": Signal(hidden_NH=torch.randn(n, H, generator=g, dtype=dtype), head_id="student"),
        "anchor_coef_N": 0.3 * torch.rand(n, generator=g, dtype=dtype),
        **task,
    }
    return head, x, HeadTask(**task)


def run(head: LossPositionHead, x: torch.Tensor, task: HeadTask):
    """(loss, grad of x, grad of weight)."""
    head.task = task
    out = head(x)
    head.task = None
    assert out.shape == (1, 1, 1)
    gx, gw = torch.autograd.grad(out.sum(), [x, head.weight])
    return out.item(), gx, gw


def outcome_pair(student_V, teacher_V, task: HeadTask, row: int, signal: Signal):
    """(student, teacher) probabilities of one row over the outcomes of the task's support."""
    p_V, q_V = reference.softmax(student_V), reference.softmax(teacher_V)
    spec = task.loss
    if spec.support == "full":
        return p_V, q_V
    if spec.support == "signal":
        ids = [i for i in task.teacher.ids_NK[row].tolist() if i >= 0]
    else:
        ids = reference.support_of(spec.support, p_V.detach(), q_V, int(task.labels_N[row]), spec.top_k)
    return reference.outcomes(p_V, ids), reference.outcomes(q_V, ids)


def expected(head: LossPositionHead, x: torch.Tensor, task: HeadTask, teacher_logits=None):
    """(loss, grad of x, grad of weight, divergences, drift, student log-probs) from the float64 definitions.

    Analytic divergences without data-dependent weights; the anchor on its own full vocabulary only.
    """
    x64 = x.detach().double().requires_grad_()
    w64 = head.weight.detach().double().requires_grad_()
    student = x64.reshape(-1, H)[task.index_N] @ w64.T
    if teacher_logits is None:
        w_teacher = w64.detach() if task.teacher_weight_VH is None else task.teacher_weight_VH.double()
        teacher_logits = task.teacher.hidden_NH.double() @ w_teacher.T
    function = reference.DIVERGENCES[task.loss.divergence]
    rows = range(task.index_N.numel())
    div = torch.stack([function(*outcome_pair(student[i], teacher_logits[i], task, i, task.teacher)) for i in rows])
    loss = (task.coef_N.double() * div).sum()
    drift = None
    if task.anchor is not None:
        assert task.loss.support == "full"
        base = task.anchor.hidden_NH.double() @ w64.detach().T
        drift = function(reference.softmax(student), reference.softmax(base))
        loss = loss + (task.anchor_coef_N.double() * drift).sum()
    gx, gw = torch.autograd.grad(loss, [x64, w64])
    return loss.item(), gx, gw, div, drift, reference.log_softmax(student)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_loss_and_gradients_are_the_definition(chunk: int) -> None:
    head, x, task = make(chunk=chunk)
    loss, gx, gw = run(head, x, task)
    want, want_gx, want_gw, div, drift, logp = expected(head, x, task)
    assert loss == pytest.approx(want, rel=1e-5)
    assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5
    torch.testing.assert_close(task.result.divergence_N.double(), div, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(task.result.anchor_N.double(), drift, rtol=1e-5, atol=1e-7)
    picked = logp.gather(-1, task.labels_N[:, None])[:, 0]
    torch.testing.assert_close(task.result.student_logprob_N.double(), picked, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.result.entropy_N.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-6)


def test_without_task_it_is_linear() -> None:
    head, x, _ = make()
    assert torch.equal(head(x), nn.functional.linear(x, head.weight))


def test_score_returns_hidden_states_at_the_positions() -> None:
    head, x, task = make()
    head.task = HeadTask(kind="score", index_N=task.index_N)
    assert torch.equal(head(x), x.reshape(-1, H)[task.index_N][None])


def test_no_position_keeps_the_graph_and_is_finite_when_hidden_states_are_not() -> None:
    empty = Signal(hidden_NH=torch.zeros(0, H), head_id="student")
    head, x, task = make(
        n=0, teacher=empty, teacher_weight_VH=None, anchor=empty, coef_N=torch.zeros(0), anchor_coef_N=torch.zeros(0)
    )
    x = torch.full_like(x, torch.inf).requires_grad_()
    loss, gx, gw = run(head, x, task)
    assert loss == 0.0 and torch.equal(gx, torch.zeros_like(gx)) and torch.equal(gw, torch.zeros_like(gw))


def test_install_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(OpsdError, match="bias"):
        install_head(TinyLM(bias=True))
    quantised = type("Quantised", (nn.Linear,), {})  # what its forward does beside the product would be lost
    for layer in (nn.Sequential(TinyLM().lm_head), quantised(H, V, bias=False)):
        wrapped = TinyLM()
        wrapped.lm_head = layer
        with pytest.raises(OpsdError, match="before PEFT"):
            install_head(wrapped)


SPECS = [
    LossSpec(divergence=name, support=side, top_k=None if side == "full" else 4, **reference.PARAMETERS.get(name, {}))
    for name in reference.DIVERGENCES
    for side in ("full", "student_topk", "teacher_topk", "union_topk")
]


def label(spec: LossSpec) -> str:
    return f"{spec.divergence}-{spec.support}"


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_every_divergence_on_every_support(spec: LossSpec) -> None:
    anchor = {} if spec.support == "full" else {"anchor": None, "anchor_coef_N": None}
    head, x, task = make(seed=1, loss=spec, chunk=3, **anchor)
    loss, gx, gw = run(head, x, task)
    want, want_gx, want_gw, div, _, _ = expected(head, x, task)
    assert loss == pytest.approx(want, rel=1e-5)
    assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5
    torch.testing.assert_close(task.result.divergence_N.double(), div, rtol=1e-5, atol=1e-7)
    if spec.support == "full":
        assert (task.result.coverage_student_N == 1).all() and (task.result.coverage_teacher_N == 1).all()
    else:
        assert (task.result.coverage_student_N < 1).all() and (task.result.coverage_teacher_N < 1).all()


def test_support_signal_is_the_teacher_on_its_own_tokens() -> None:
    head, x, task = make(seed=2, anchor=None, anchor_coef_N=None)
    teacher = task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T
    logq = reference.log_softmax(teacher)
    ids = torch.full((7, 6), -1)
    logprobs, tail = torch.full((7, 6), -torch.inf), torch.zeros(7)
    for i in range(7):
        chosen = reference.support_of("teacher_topk", logq[i].exp(), logq[i].exp(), int(task.labels_N[i]), 5)
        ids[i, : len(chosen)] = torch.tensor(chosen)
        logprobs[i, : len(chosen)] = logq[i, chosen].float()
        tail[i] = reference.outcomes(logq[i].exp(), chosen)[-1].log().float()
    task.teacher, task.teacher_weight_VH = Signal(ids_NK=ids, logprobs_NK=logprobs, tail_N=tail), None
    for name in reference.DIVERGENCES:
        task.loss = LossSpec(divergence=name, support="signal", **reference.PARAMETERS.get(name, {}))
        loss, gx, gw = run(head, x, task)
        want, want_gx, want_gw, *_ = expected(head, x, task, teacher)
        assert loss == pytest.approx(want, rel=1e-5)
        assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5
    picked = logq.gather(-1, task.labels_N[:, None])[:, 0]
    torch.testing.assert_close(task.result.teacher_logprob_N.double(), picked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "policy_gradient", "nll"])
def test_sampled_estimators(name: str) -> None:
    head, x, task = make(seed=3, anchor=None, anchor_coef_N=None, chunk=2)
    teacher = reference.log_softmax(task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T)
    logq = teacher.gather(-1, task.labels_N[:, None])[:, 0]
    x64 = x.detach().double().requires_grad_()
    logp = reference.log_softmax(x64.reshape(-1, H)[task.index_N] @ head.weight.detach().double().T)
    logp = logp.gather(-1, task.labels_N[:, None])[:, 0]
    behaviour = logp.detach() + 0.1
    value = {
        "k1": logp - logq,
        "k2": (logp - logq) ** 2 / 2,
        "k3": (logq - logp).exp() - 1 - (logq - logp),
        "policy_gradient": -(logp - behaviour).exp() * (logq - logp).detach(),
        "nll": -logp,
    }[name]
    loss = (task.coef_N.double() * value).sum()
    (want_gx,) = torch.autograd.grad(loss, x64)
    task.loss = LossSpec(divergence=name, trust=(0.5, 2.0) if name == "policy_gradient" else None)
    if name == "policy_gradient":
        task.behaviour_logprob_N = behaviour.float()
    if name == "nll":
        task.teacher = task.teacher_weight_VH = None
    got, gx, _ = run(head, x, task)
    assert got == pytest.approx(loss.item(), rel=1e-5) and relative_error(gx, want_gx) < 1e-5
    if name in ("k1", "k3"):  # the same from a signal that holds nothing but the sampled token's log-probability
        task.teacher, task.teacher_weight_VH = Signal(logprob_N=logq.float()), None
        again, gx, _ = run(head, x, task)
        assert again == pytest.approx(loss.item(), rel=1e-5) and relative_error(gx, want_gx) < 1e-5


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "policy_gradient"])
def test_sampled_estimators_are_measured_where_they_carry_no_loss(name: str) -> None:
    """Drift and the controls have coefficients of 0. There k3 can't refuse: where exp leaves float32 its value is unknown."""
    zero = torch.zeros(7)
    head, x, task = make(seed=3, anchor_coef_N=zero, coef_N=zero.clone())
    task.loss = LossSpec(divergence=name, trust=(0.5, 2.0) if name == "policy_gradient" else None)
    w64 = head.weight.detach().double()
    logp = reference.log_softmax(x.detach().double().reshape(-1, H)[task.index_N] @ w64.T)
    logq = reference.log_softmax(task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T)
    logb = reference.log_softmax(task.anchor.hidden_NH.double() @ w64.T)
    logp, logq, logb = (t.gather(-1, task.labels_N[:, None])[:, 0] for t in (logp, logq, logb))
    if name == "policy_gradient":
        task.behaviour_logprob_N = logp.float() - 0.1

    def formula(other: torch.Tensor) -> torch.Tensor:
        r = other - logp
        return {"k1": -r, "k2": r**2 / 2, "k3": r.exp() - 1 - r, "policy_gradient": -torch.tensor(0.1).exp() * r}[name]

    loss, gx, gw = run(head, x, task)
    assert loss == 0 and (gx == 0).all() and (gw == 0).all()
    torch.testing.assert_close(task.result.divergence_N.double(), formula(logq), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.result.anchor_N.double(), formula(logb), rtol=1e-4, atol=1e-5)
    if name == "k3":
        with torch.no_grad():
            x.view(-1, H)[task.index_N[0]] *= 1e3
        run(head, x, task)
        far = task.result.teacher_logprob_N - task.result.student_logprob_N > 88
        assert far.tolist() == task.result.divergence_N.isnan().tolist() == [True] + [False] * 6
        task.coef_N = torch.ones(7)
        with pytest.raises(OpsdError, match="max_log_ratio"):
            run(head, x, task)


GATE = SurprisalGate(0.7, -3.0)
#: name -> (weights, their definition), each given a limit in nats that lies among the divergences at hand
WEIGHTS = {
    "threshold": lambda limit: ((Threshold(limit),), lambda div, logp: (div > limit).double()),
    "gate": lambda limit: ((GATE,), lambda div, logp: 1 / (1 + (-0.7 * (logp + 3.0)).exp())),
    "clip": lambda limit: ((Clip(limit),), lambda div, logp: torch.where(div > limit, limit / div, 1.0)),
    "all": lambda limit: (
        (Threshold(limit / 2), GATE, Clip(limit)),
        lambda div, logp: (div > limit / 2) / (1 + (-0.7 * (logp + 3.0)).exp()) * torch.where(div > limit, limit / div, 1.0),
    ),
}


@pytest.mark.parametrize("which", WEIGHTS)
@pytest.mark.parametrize("base", [SPECS[0], SPECS[7], SPECS[9]], ids=label)
def test_data_dependent_weights_multiply_the_coefficient(which: str, base: LossSpec) -> None:
    plain = {"anchor": None, "anchor_coef_N": None}
    head, x, task = make(seed=4, loss=base, **plain)
    _, _, _, div, _, logp = expected(head, x, task)
    div = div.detach()
    weights, definition = WEIGHTS[which](float(div.min() + div.max()) / 2)
    weight = definition(div, logp.gather(-1, task.labels_N[:, None])[:, 0]).detach()
    assert weight.min() < weight.max()
    task.coef_N = (task.coef_N.double() * weight).float()
    want, want_gx, *_ = expected(head, x, task)
    head, x, task = make(seed=4, loss=LossSpec(**{**base.__dict__, "weights": weights}), chunk=2, **plain)
    loss, gx, _ = run(head, x, task)
    assert loss == pytest.approx(want, rel=1e-5) and relative_error(gx, want_gx) < 1e-5
    torch.testing.assert_close(task.result.weight_N.double(), weight, rtol=1e-5, atol=1e-6)


class Fixed:
    """Weights held fixed, for a numerical gradient."""

    def __init__(self, weight_N: torch.Tensor):
        self.weight_N = weight_N

    def __call__(self, values: TokenValues) -> torch.Tensor:
        return self.weight_N.to(values.divergence_C.dtype)


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_gradcheck_with_weights_and_supports_held_fixed(spec: LossSpec) -> None:
    spec = LossSpec(**{**spec.__dict__, "weights": (Fixed(torch.tensor([0.2, 0.0, 1.5])),)})
    head, x, task = make(seed=5, dtype=torch.float64, n=3, loss=spec)
    head.task = task
    assert torch.autograd.gradcheck(lambda x: head(x), x, atol=1e-6, fast_mode=True)
    task.anchor = task.anchor_coef_N = None  # the anchor reads the head's weight, detached: a numerical gradient would not
    assert torch.autograd.gradcheck(lambda w: head(x.detach()), head.weight, atol=1e-6, fast_mode=True)


def test_gradient_is_scaled_by_what_follows() -> None:
    head, x, task = make()
    _, gx, gw = run(head, x, task)
    head.task = task
    got = torch.autograd.grad(2.5 * head(x).sum(), [x, head.weight])
    torch.testing.assert_close(got, (2.5 * gx, 2.5 * gw))


def test_frozen_weight_gets_no_gradient_and_no_grad_makes_none() -> None:
    head, x, task = make()
    _, gx, _ = run(head, x, task)
    head.weight.requires_grad_(False)
    head.task = task
    head(x).sum().backward()
    assert torch.equal(x.grad, gx) and head.weight.grad is None
    with torch.no_grad():
        assert not head(x).requires_grad


def test_tied_weight_gets_both_gradients() -> None:
    head, _, task = make()
    ids = torch.arange(B * T).reshape(B, T) % V
    embed = nn.Embedding(V, H)
    embed.weight = head.weight
    task.anchor = task.anchor_coef_N = None  # an external teacher alone: only the student reads the tied weight
    head.task = task
    head(embed(ids)).sum().backward()
    w64 = head.weight.detach().double().requires_grad_()
    student = w64[ids].reshape(-1, H)[task.index_N] @ w64.T
    teacher = task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T
    div = reference.kl(reference.softmax(student), reference.softmax(teacher))
    (want,) = torch.autograd.grad((task.coef_N.double() * div).sum(), w64)
    assert relative_error(head.weight.grad, want) < 1e-5


def test_autocast_does_not_reach_the_loss() -> None:
    head, x, task = make()
    loss, gx, _ = run(head, x, task)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, gx_again, _ = run(head, x, task)
    assert loss == again and torch.equal(gx, gx_again)


def test_bf16_weights_give_the_definition_on_the_rounded_inputs() -> None:
    head, x, task = make(dtype=torch.bfloat16)
    for name in ("coef_N", "anchor_coef_N"):
        setattr(task, name, getattr(task, name).float())
    loss, gx, gw = run(head, x, task)
    want, want_gx, want_gw, *_ = expected(head, x, task)
    assert gx.dtype == gw.dtype == torch.bfloat16
    # Logits and everything after them are float32: only the gradients by the logits and by hidden states and weight are rounded.
    assert loss == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(task.result.divergence_N.double(), expected(head, x, task)[3], rtol=1e-5, atol=1e-7)
    assert relative_error(gx, want_gx) < 5e-3 and relative_error(gw, want_gw) < 5e-3


def test_a_bf16_weights_gradient_is_summed_in_float32() -> None:
    """Sixty-four equal terms, a chunk each: in bf16 a sum stops growing by less than its last digit."""
    head, x, _ = make(dtype=torch.bfloat16)
    one, n = torch.tensor([3]), 64

    def grad_weight(copies: int, coef: float) -> torch.Tensor:
        teacher = Signal(hidden_NH=torch.zeros(copies, H, dtype=torch.bfloat16), head_id="student")  # uniform
        task = HeadTask("loss", one.repeat(copies), teacher=teacher, coef_N=torch.full((copies,), coef), chunk=1)
        return run(head, x, task)[2].float()

    torch.testing.assert_close(grad_weight(n, 1 / n), grad_weight(1, 1.0), rtol=2**-7, atol=0)


def test_a_bf16_weights_gradient_loses_nothing_between_chunks() -> None:
    """1 + 2^-10 of a position's gradient in one chunk, -1 of it in the next: 2^-10 is left, which bf16 products would have rounded away."""
    head, x, _ = make(dtype=torch.bfloat16)

    def grad_weight(*coef: float) -> torch.Tensor:
        teacher = Signal(hidden_NH=torch.zeros(len(coef), H, dtype=torch.bfloat16), head_id="student")
        index = torch.full((len(coef),), 3)
        return run(head, x, HeadTask("loss", index, teacher=teacher, coef_N=torch.tensor(coef), chunk=2))[2].float()

    torch.testing.assert_close(grad_weight(1, 2**-10, -1), grad_weight(1) / 1024, rtol=2**-7, atol=0)


def test_positions_that_repeat_add_up() -> None:
    head, x, task = make(n=4, index_N=torch.tensor([2, 9, 2, 2]))
    want, want_gx, want_gw, *_ = expected(head, x, task)
    loss, gx, gw = run(head, x, task)
    assert loss == pytest.approx(want, rel=1e-5)
    assert relative_error(gx, want_gx) < 1e-5 and relative_error(gw, want_gw) < 1e-5


def test_agreement_is_with_the_most_probable_token_of_either_teacher() -> None:
    """Of an exact signal and of a support, whose most probable token may stand in any slot."""
    head, x, _ = make()
    with torch.no_grad():
        student = x.reshape(-1, H)[:2] @ head.weight.T
    top, other = student.argmax(-1), student.argmin(-1)
    said = torch.stack([top[0], other[1]])  # the first agrees, the second does not
    ids = torch.stack([torch.stack([other[0], top[0]]), torch.stack([top[1], other[1]])])
    logprobs = torch.tensor([[0.2, 0.7], [0.2, 0.7]]).log()
    support = Signal(ids_NK=ids, logprobs_NK=logprobs, tail_N=torch.full((2,), 0.1).log())
    exact = Signal(hidden_NH=5.0 * torch.eye(V)[said], head_id="big")
    for signal, weight, spec in ((support, None, LossSpec(support="signal")), (exact, torch.eye(V), LossSpec())):
        task = HeadTask("loss", torch.arange(2), said, signal, weight, torch.ones(2), loss=spec)
        run(head, x, task)
        assert task.result.agree_N.tolist() == [1.0, 0.0]


BROKEN = {
    "one entry each": {"coef_N": torch.ones(3)},
    "come together": {"anchor_coef_N": None},
    "nothing to measure": {
        "teacher": None,
        "coef_N": None,
        "teacher_weight_VH": None,
        "anchor": None,
        "anchor_coef_N": None,
    },
    "own base": {"anchor": Signal(hidden_NH=torch.zeros(7, H), head_id="big")},
    "brings teacher_weight_VH": {"teacher_weight_VH": None},
    "one vocabulary": {"teacher_weight_VH": torch.zeros(V + 1, 5)},
    "one entry a position": {"teacher": Signal(hidden_NH=torch.zeros(6, 5), head_id="big")},
    "int64": {"index_N": torch.zeros(7, dtype=torch.int32)},
    "at least one loss position": {"chunk": 0},
    "score or loss": {"kind": "train"},
    "sampled tokens": {"labels_N": None, "loss": LossSpec(divergence="k2")},
    "policy_gradient needs it": {"behaviour_logprob_N": torch.zeros(7)},
    "'signal' goes with": {"loss": LossSpec(support="signal")},
    "analytic divergence needs": {"teacher": Signal(logprob_N=torch.zeros(7)), "teacher_weight_VH": None},
    "only hidden states": {"teacher": Signal(logprob_N=torch.zeros(7)), "loss": LossSpec(divergence="k1")},
    "nll takes": {"loss": LossSpec(divergence="nll")},
}


@pytest.mark.parametrize("match", BROKEN)
def test_contradicting_tasks_are_refused(match: str) -> None:
    head, x, task = make(**BROKEN[match])
    head.task = task
    with pytest.raises(OpsdError, match=match):
        head(x)


def test_a_sampled_estimator_wants_the_sampled_token_in_a_support_signal():
    ids = torch.arange(4).repeat(7, 1)
    signal = Signal(ids_NK=ids, logprobs_NK=torch.full((7, 4), 0.2).log(), tail_N=torch.full((7,), 0.2).log())
    more = {"teacher": signal, "teacher_weight_VH": None, "anchor": None, "anchor_coef_N": None}
    spec = LossSpec("k2")
    for labels, refused in ((torch.zeros(7, dtype=torch.int64), False), (torch.full((7,), 9), True)):
        head, x, task = make(loss=spec, labels_N=labels, **more)
        if refused:
            with pytest.raises(OpsdError, match="lacks the sampled token"):
                run(head, x, task)
        else:
            run(head, x, task)


def test_a_vocabulary_weight_in_float16_is_refused():
    head, x, task = make(dtype=torch.float16)
    with pytest.raises(OpsdError, match="float16"):
        run(head, x, task)
