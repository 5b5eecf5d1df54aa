"""The attention for sequence parallelism on one rank, against attention written down per sequence; and the split of a task."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verl_opsd.distill.head import HeadTask
from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.ulysses import is_right, local_task, ulysses_sdpa
from verl_opsd.verl_adapter.worker import OpsdWorker

MODULE = SimpleNamespace(training=False)


def test_packed_sequences_see_themselves_and_their_past_alone() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 5, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    got, _ = ulysses_sdpa(MODULE, q, k, v, None, position_ids=positions, scaling=0.3)
    assert got.shape == (1, 9, 4, 5)
    for head in range(4):
        for t in range(9):
            past = range(0 if t < 4 else 4, t + 1)
            scores = torch.stack([0.3 * (q[0, head, t] * k[0, head // 2, u]).sum() for u in past]).softmax(0)
            want = sum(s * v[0, head // 2, u] for s, u in zip(scores, past, strict=True))
            torch.testing.assert_close(got[0, t, head], want)


@pytest.mark.parametrize("case", ["rows", "positions", "cache"])
def test_inputs_whose_sequences_are_not_known_are_refused(case: str) -> None:
    q = torch.randn(2 if case == "rows" else 1, 4, 6, 5)
    k = torch.randn(q.shape[0], 2, 9 if case == "cache" else 6, 5)
    positions = None if case == "positions" else torch.arange(6)[None]
    with pytest.raises(OpsdError, match="packed sequences"):
        ulysses_sdpa(MODULE, q, k, k, None, position_ids=positions)


def test_only_attentions_that_exchange_heads_are_right() -> None:
    assert [is_right(a) for a in ("flash_attention_2", "flash_attention_3", "ulysses_sdpa", "sdpa", "eager", None)] == [
        True
    ] * 3 + [False] * 3


def test_a_rank_gets_the_positions_of_its_slice() -> None:
    index = torch.tensor([0, 5, 6, 11, 12])
    n = torch.arange(5.0)
    task = HeadTask(
        kind="loss",
        index_N=index,
        labels_N=torch.arange(5),
        teacher=Signal(hidden_NH=n[:, None].repeat(1, 3), head_id="big"),
        teacher_weight_VH=torch.zeros(7, 3),
        coef_N=n,
        anchor=Signal(hidden_NH=-n[:, None], head_id="student"),
        anchor_coef_N=10 * n,
        behaviour_logprob_N=-n,
    )
    part, mine = local_task(task, start=6, length=6)
    assert mine.tolist() == [False, False, True, True, False] and part.index_N.tolist() == [0, 5]
    assert part.labels_N.tolist() == [2, 3] and part.coef_N.tolist() == [2, 3] and part.anchor_coef_N.tolist() == [20, 30]
    assert part.teacher.hidden_NH[:, 0].tolist() == [2, 3] and part.anchor.hidden_NH[:, 0].tolist() == [-2, -3]
    assert part.behaviour_logprob_N.tolist() == [-2, -3] and part.teacher_weight_VH is task.teacher_weight_VH
    parts = [local_task(task, start, 7)[0].index_N.numel() for start in (0, 7)]
    assert sum(parts) == 5  # every position on one rank


@pytest.mark.parametrize("asked", [True, False])
def test_only_one_rank_of_a_sequence_gives_rows(asked: bool) -> None:
    """verl's bridge to its queue takes rows of ranks that it collects from, and fails on others'."""
    rows = TensorDict({"value_divergence": torch.zeros(2, 3)}, batch_size=2)
    meshes: list[str] = []
    worker = SimpleNamespace(
        actor=SimpleNamespace(control=lambda data: rows), query_collect_info=lambda m: meshes.append(m) or asked
    )
    out = OpsdWorker.opsd_control(worker, TensorDict({}, batch_size=2))
    assert out.batch_size == ((2,) if asked else ()) and meshes == ["actor"]
