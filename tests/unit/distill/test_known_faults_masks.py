"""Faults that users of this field have hit, in reduction, alignment, shifts and masks: one test a kind."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from parity import reference

from distill.paths import ALL_PATHS, bare_head, cut
from distill.test_head import B, H, T, V, make, relative_error, run
from verl_opsd.distill.head import HeadTask, LossPositionHead
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.reduction import coefficients
from verl_opsd.distill.signal import Signal
from verl_opsd.distill.weights import SurprisalGate, Threshold, class_weight, segment_mask, turn_mask
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.rows import check_row
from verl_opsd.verl_adapter.passes import layout_index
from verl_opsd.verl_adapter.ulysses import local_task

# Normalisation and reduction


@pytest.mark.parametrize(
    "spec",
    [LossSpec(), LossSpec(weights=(Threshold(1.0), SurprisalGate(1.0, -2.0))), LossSpec(divergence="jsd", beta=0.5)],
    ids=["plain", "data-dependent weights", "jsd"],
)
@pytest.mark.parametrize("parts", [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [5, 1, 2]])
def test_loss_and_gradient_do_not_depend_on_micro_batches(spec: LossSpec, parts: list[int]) -> None:
    head, x, task = make(seed=1, n=8, loss=spec)
    whole = run(head, x, task)
    loss, gx, gw, start = 0.0, torch.zeros_like(x), torch.zeros_like(head.weight), 0
    for size in parts:
        part = run(head, x, cut(task, torch.arange(start, start + size)))
        loss, gx, gw, start = loss + part[0], gx + part[1], gw + part[2], start + size
    assert loss == pytest.approx(whole[0], rel=1e-5)
    assert relative_error(gx, whole[1].double()) < 1e-5 and relative_error(gw, whole[2].double()) < 1e-5


def test_positions_outside_the_loss_have_exactly_zero_gradient() -> None:
    head, x, task = make(seed=2)
    _, gx, _ = run(head, x, task)
    outside = torch.ones(B * T, dtype=torch.bool)
    outside[task.index_N] = False
    assert (gx.reshape(-1, H)[outside] == 0).all() and (gx.reshape(-1, H)[~outside] != 0).any(-1).all()


@pytest.mark.parametrize("spec", ALL_PATHS, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_masked_positions_have_exactly_zero_gradient_whatever_they_hold(spec: LossSpec, poison: float) -> None:
    head, x, task = make(seed=3, loss=spec)
    task.coef_N[2] = task.anchor_coef_N[2] = 0.0
    clean_loss, clean_gx, clean_gw = run(head, x, task)
    at = int(task.index_N[2])
    with torch.no_grad():
        x.view(-1, H)[at] = poison
        task.teacher.hidden_NH[2] = -poison
    loss, gx, gw = run(head, x, task)
    assert loss == clean_loss and torch.equal(gx, clean_gx) and torch.equal(gw, clean_gw)
    assert (gx.view(-1, H)[at] == 0).all()


def test_loss_is_the_sum_over_positions_divided_once_by_hand() -> None:
    # Identity head, 2 tokens, uniform teacher: logits (ln 3, 0) and (0, 0) give p = (3/4, 1/4) and (1/2, 1/2).
    head = bare_head(2, 2)
    torch.nn.init.eye_(head.weight)
    x = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])
    coef = coefficients("token", [torch.tensor([0, 0])], ["b"], ["e"], [torch.ones(2)])
    head.task = HeadTask(
        kind="loss",
        index_N=torch.tensor([0, 1]),
        teacher=Signal(hidden_NH=torch.zeros(2, 2), head_id="student"),
        coef_N=coef[0],
    )
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert head(x).item() == pytest.approx(by_hand / 2, rel=1e-6)


# Alignment, shift, masks


@pytest.mark.parametrize("how", ["whole", "chunks", "compiled", "anchor", "float64"])
@pytest.mark.parametrize("spec", [*ALL_PATHS, LossSpec(divergence="policy_gradient", trust=(0.5, 2.0))], ids=str)
def test_identity_teacher_is_zero_on_every_path_and_a_shift_by_one_is_not(spec: LossSpec, how: str) -> None:
    """The GPU kernels' identity is in ``tests/gpu``, that of sequence parallelism in ``tests/integration/engine``."""
    dtype = torch.float64 if how == "float64" else torch.float32
    chunk = {"chunks": 3, "whole": None}.get(how, 8)
    head, x, task = make(seed=4, n=8, dtype=dtype, loss=spec, chunk=chunk, teacher_weight_VH=None)
    flat = x.detach().reshape(-1, H)
    task.index_N, task.coef_N = torch.arange(8), torch.ones(8, dtype=dtype)
    own, one = Signal(hidden_NH=flat[task.index_N], head_id="student"), torch.ones(8, dtype=dtype)
    task.teacher, task.anchor, task.anchor_coef_N = own, *((own, one) if how == "anchor" else (None, None))
    if spec.divergence == "policy_gradient":
        logp = (flat[:8] @ head.weight.detach().T).log_softmax(-1)
        task.behaviour_logprob_N = logp.gather(-1, task.labels_N[:, None])[:, 0]

    def measure() -> tuple[float, torch.Tensor]:
        if how != "compiled":
            return run(head, x, task)[:2]
        torch._dynamo.reset()
        head.task = task
        out = torch.compile(head, backend="eager")(x)
        head.task = None
        return out.item(), torch.autograd.grad(out.sum(), x)[0]

    loss, gx = measure()
    assert abs(loss) <= 8e-7 and task.result.divergence_N.abs().max() <= 1e-7
    if how == "anchor":
        assert task.result.anchor_N.abs().max() <= 1e-7
    if spec.divergence != "k1":  # the gradient of k1 is not that of a divergence
        assert gx.abs().max() <= 1e-6
    for shift in (-1, 1):
        task.teacher = Signal(hidden_NH=flat.roll(shift, 0)[task.index_N], head_id="student")
        measure()
        assert task.result.divergence_N.abs().mean() > 0.05


def test_left_right_and_no_padding_give_the_same_values() -> None:
    head, x, task = make(seed=5, n=6)
    seq = x.detach()[0]
    task.index_N = torch.tensor([1, 2, 3, 5, 6, 7])
    run(head, x.detach().requires_grad_(), task)
    want = task.result.divergence_N
    pad = torch.randn(4, H)
    for padded, offset in ((torch.cat([pad, seq]), 4), (torch.cat([seq, pad]), 0), (seq, 0)):
        task.index_N = torch.tensor([1, 2, 3, 5, 6, 7]) + offset
        run(head, padded[None].clone().requires_grad_(), task)
        torch.testing.assert_close(task.result.divergence_N, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", [LossSpec(), LossSpec(divergence="jsd", beta=0.3)], ids=str)
def test_packed_and_padded_batches_give_the_same_loss(spec: LossSpec) -> None:
    """Sequences of 5 and 3 tokens, one after another, and each in a row of its own whose padding holds NaN."""
    head, x, task = make(seed=6, n=5, loss=spec, chunk=2)
    sequences = [x.detach()[0, :5], x.detach()[1, :3]]
    positions = [torch.tensor([0, 2, 3]), torch.tensor([0, 1])]
    padded = torch.full((2, 5, H), torch.nan)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    found = []
    for given, packed in ((torch.cat(sequences)[None], True), (padded, False)):
        task.index_N = layout_index([5, 3], positions, packed)
        loss, gx, gw = run(head, given.clone().requires_grad_(), task)
        found.append((loss, gx.reshape(-1, H)[task.index_N], gw, gx.count_nonzero(), task.result.divergence_N))
    assert task.index_N.tolist() == [0, 2, 3, 5, 6]  # padded: the second row starts at 5
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_view_that_does_not_hold_the_students_own_tokens_is_refused() -> None:
    """Re-encoding gives other ids or another number of them; both are found before anything is scored."""
    ids = torch.tensor([5, 6, 7, 8, 9])
    one = torch.ones(2)
    row = {
        "opsd_position": torch.tensor([1, 3]),
        **{f"opsd_{k}": one for k in ("coef", "anchor", "behaviour", "reward")},
        **{f"opsd_{k}": torch.zeros(2, dtype=torch.int64) for k in ("class", "turn")},
        "opsd_view_ids": torch.tensor([5, 1, 1, 6, 7, 8, 9]),
        "opsd_view_len": torch.tensor([7]),
        "opsd_view_pos": torch.tensor([3, 5]),
    }
    check_row(ids, row)
    other = row["opsd_view_ids"].clone()
    other[4] = 70
    for broken in ({"opsd_view_ids": other}, {"opsd_view_pos": torch.tensor([3])}, {"opsd_view_pos": torch.tensor([4, 6])}):
        with pytest.raises(OpsdError, match="rebuild the row"):
            check_row(ids, row | broken)


def test_log_probs_are_those_of_the_full_logits() -> None:
    head, x, task = make(seed=7)
    run(head, x, task)
    full = torch.log_softmax(head(x), -1).reshape(-1, V)[task.index_N].gather(-1, task.labels_N[:, None])[:, 0]
    torch.testing.assert_close(task.result.student_logprob_N, full, rtol=1e-5, atol=1e-6)


def test_a_support_signal_has_one_tail_a_position() -> None:
    with pytest.raises(OpsdError, match=r"tail \(3,\)"):
        Signal(ids_NK=torch.zeros(2, 3, dtype=torch.int64), logprobs_NK=torch.zeros(2, 3), tail_N=torch.zeros(3))


def test_a_support_signal_of_another_shape_is_refused() -> None:
    with pytest.raises(OpsdError, match="N x K"):
        Signal(ids_NK=torch.zeros(3, 4, dtype=torch.int64), logprobs_NK=torch.zeros(3, 3), tail_N=torch.zeros(3))


def with_support_signal(seed: int, k: int) -> tuple[LossPositionHead, torch.Tensor, HeadTask, torch.Tensor]:
    """A task whose teacher gives its own top ``k`` and the label, and the divergences by hand in float64."""
    head, x, task = make(seed=seed, loss=LossSpec(support="signal"), anchor=None, anchor_coef_N=None)
    p = reference.softmax(x.detach().double().reshape(-1, H)[task.index_N] @ head.weight.detach().double().T)
    q = reference.softmax(task.teacher.hidden_NH.double() @ task.teacher_weight_VH.double().T)
    ids = torch.full((7, k + 1), -1)
    logprobs, tail, want = torch.full((7, k + 1), -torch.inf), torch.full((7,), -torch.inf), []
    for i in range(7):
        chosen = reference.support_of("teacher_topk", p[i], q[i], int(task.labels_N[i]), k)
        ids[i, : len(chosen)] = torch.tensor(chosen)
        logprobs[i, : len(chosen)] = q[i, chosen].log().float()
        tail[i] = reference.outcomes(q[i], chosen)[-1].log().float()
        want.append(reference.kl(reference.outcomes(p[i], chosen), reference.outcomes(q[i], chosen)))
    task.teacher, task.teacher_weight_VH = Signal(ids_NK=ids, logprobs_NK=logprobs, tail_N=tail), None
    return head, x, task, torch.stack(want)


@pytest.mark.parametrize("chunk", [1, 2, 7, 50])
def test_every_position_keeps_its_own_k_entries_however_the_batch_is_cut(chunk: int) -> None:
    """N x K supports through chunks, micro-batches in any order, and slices of a packed sequence over ranks."""
    head, x, task, want = with_support_signal(seed=12, k=4)
    task.chunk = chunk
    run(head, x, task)
    torch.testing.assert_close(task.result.divergence_N.double(), want, rtol=1e-5, atol=1e-7)
    order = torch.tensor([6, 2, 0, 5, 1, 3, 4])
    for rows in (order[:3], order[3:]):
        part = dataclasses.replace(
            task,
            index_N=task.index_N[rows],
            labels_N=task.labels_N[rows],
            coef_N=task.coef_N[rows],
            teacher=task.teacher.rows(rows),
        )
        assert part.teacher.ids_NK.shape == (len(rows), 5) and part.teacher.tail_N.shape == (len(rows),)
        run(head, x, part)
        torch.testing.assert_close(part.result.divergence_N.double(), want[rows], rtol=1e-5, atol=1e-7)
    for start in (0, B * T // 2):
        part, mine = local_task(task, start, B * T // 2)
        assert part.teacher.ids_NK.shape == (int(mine.sum()), 5)
        run(head, x.reshape(1, -1, H)[:, start : start + B * T // 2], part)
        torch.testing.assert_close(part.result.divergence_N.double(), want[mine], rtol=1e-5, atol=1e-7)


def test_a_support_that_is_the_vocabulary_is_the_full_divergence() -> None:
    head, x, task, _ = with_support_signal(seed=13, k=V)
    assert (task.teacher.tail_N == -torch.inf).all()
    loss, gx, _ = run(head, x, task)
    full_head, x, full = make(seed=13, anchor=None, anchor_coef_N=None)
    want, want_gx, _ = run(full_head, x, full)
    assert loss == pytest.approx(want, rel=1e-5) and relative_error(gx, want_gx.double()) < 1e-5


def test_turns_and_spans_carry_exactly_their_weight() -> None:
    """Seven positions of turns 0, 0, 1, 1, 1, 2, 2 at tokens 3, 4, 8 to 10, 14, 15; turns 1 and 2, tokens 9 to 14, class weights 2, 1."""
    head, x, task = make(seed=14, anchor=None, anchor_coef_N=None)
    turn, token = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([3, 4, 8, 9, 10, 14, 15])
    by_class = class_weight(torch.tensor([0, 0, 0, 0, 1, 1, 0]), {0: 2.0, 1: 1.0})
    weights = turn_mask(turn, {1, 2}) * segment_mask(token - 1, [(9, 15)]) * by_class
    assert weights.tolist() == [0, 0, 0, 2, 1, 1, 0]
    for reduction, want in (("token", [0, 0, 0, 0.5, 0.25, 0.25, 0]), ("turn", [0, 0, 0, 1 / 3, 1 / 6, 0.5, 0])):
        (task.coef_N,) = coefficients(reduction, [turn], ["b"], ["e"], [weights])
        assert task.coef_N.tolist() == pytest.approx(want)
        loss, gx, _ = run(head, x, task)
        assert loss == pytest.approx(float((torch.tensor(want) * task.result.divergence_N).sum()), rel=1e-6)
        moved = (gx.reshape(-1, H)[task.index_N] != 0).any(-1)
        assert moved.tolist() == [w > 0 for w in want]
