"""The forwards of `OpsdEngine`: a head task over verl's inputs, hidden states at positions, and the scoring pass.

Suffixes: N loss positions, H hidden size, P positions asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group

from verl_opsd.distill.head import HeadTask
from verl_opsd.models.forward import run_head
from verl_opsd.verl_adapter import ulysses
from verl_opsd.verl_adapter.engine_weights import WeightsEngine
from verl_opsd.verl_adapter.loss import COPIES, OpsdLoss
from verl_opsd.verl_adapter.passes import Pass, group_passes, jagged, layout_index, own_passes, rows_of, view_passes

#: Largest relative difference of a hidden state between a sequence alone and beside another one, by compute dtype.
LAYOUT_THRESHOLD = {torch.float32: 1e-4, torch.bfloat16: 1e-1}


def worst_of_ranks(error: Tensor) -> float:
    """The largest of all ranks' errors. A NaN counts as infinite: a maximum over ranks leaves it out or not, by their order."""
    worst = torch.where(error.isnan(), torch.inf, error)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


class ScoringEngine(WeightsEngine):
    """Methods are collective: every rank calls them in the same order."""

    def _forget(self) -> None:
        super()._forget()
        self.forwards = 0  # calls of the model by this rank, outside verl's own path
        self.layout_error: float | None = None  # set by measure_layout
        #: With sequence parallelism: of the last loss task, this rank's positions.
        self.mine_N = torch.zeros(0, dtype=torch.bool)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's; packed rows also say where they begin, for linear attention and :mod:`verl_opsd.models.attention`."""
        places = micro_batch["position_ids"]
        if places.dim() == 3:  # verl's form where the checkpoint has a processor of images; of text every row says the same
            micro_batch = micro_batch.copy()
            micro_batch["position_ids"] = torch.nested.nested_tensor_from_jagged(places.values()[0], places.offsets())
        model_inputs, output_args = super().prepare_model_inputs(micro_batch=micro_batch)
        if model_inputs["attention_mask"] is None:
            bounds = micro_batch["input_ids"].offsets().to(model_inputs["input_ids"].device, torch.int64)
            if output_args["pad_size"]:
                bounds = torch.cat([bounds, bounds[-1:] + output_args["pad_size"]])
            model_inputs["cu_seq_lens_q"] = bounds
        return model_inputs, output_args

    def run(self, inputs: TensorDict, task: HeadTask | None = None) -> Tensor:
        """The model's logits for verl's inputs, on the device; with a task what the head returns for it.

        With sequence parallelism a ``loss`` task gives this rank's part of the sum, and its log-probabilities and entropy are of the
        positions ``self.mine_N``; everything else is gathered.

        Raises:
            OpsdError: the model does not return its head's output as it is.
        """
        if not self.use_ulysses_sp:
            return self._run(self.prepare_model_inputs(micro_batch=inputs)[0], task)
        group, before = self.ulysses_parallel_group, get_ulysses_sequence_parallel_group()
        set_ulysses_sequence_parallel_group(group)  # verl's preparation slices by it, and attention exchanges within it
        try:
            model_inputs = self.prepare_model_inputs(micro_batch=inputs)[0]
            length = model_inputs["input_ids"].shape[1]
            if task is None:
                return ulysses.gathered_logits(self._run(model_inputs, None), inputs["input_ids"].values().numel(), group)
            part, self.mine_N = ulysses.local_task(task, dist.get_rank(group) * length, length)
            out = self._run(model_inputs, part)
            if task.kind == "score":
                return ulysses.gathered(out[0], self.mine_N, group)[None]
            assert part.result is not None
            task.result = ulysses.gathered_result(part.result, self.mine_N, group)
            task.log_probs_N, task.entropy_N = part.log_probs_N, part.entropy_N
            return out
        finally:
            set_ulysses_sequence_parallel_group(before)

    @contextmanager
    def one_rank_a_sequence(self) -> Iterator[None]:
        """Every rank of a sequence-parallel group runs whole sequences, as it would without the group."""
        size: int = self.engine_config.ulysses_sequence_parallel_size
        self.use_ulysses_sp, self.ulysses_sequence_parallel_size = False, 1
        before = get_ulysses_sequence_parallel_group()
        set_ulysses_sequence_parallel_group(None)
        try:
            yield
        finally:
            self.use_ulysses_sp, self.ulysses_sequence_parallel_size = size > 1, size
            set_ulysses_sequence_parallel_group(before)

    def over_sequence(self, part: Tensor) -> Tensor:
        """The sum of a loss task's parts over the ranks that share a sequence, detached."""
        whole = part.detach().clone()
        if self.use_ulysses_sp:
            dist.all_reduce(whole, group=self.ulysses_parallel_group)
        return whole

    def _run(self, model_inputs: dict[str, Any], task: HeadTask | None) -> Tensor:
        self.forwards += 1
        return run_head(self.module, self.head, task, self._autocast_dtype, model_inputs)

    def inputs(self, ids: Sequence[Tensor]) -> TensorDict:
        """Sequences as verl's micro-batch in the engine's layout, on the device.

        Args:
            ids: int64[T_i] each.
        """
        device = get_device_id()
        place = [torch.arange(len(x), device=device) for x in ids]
        fields = {"input_ids": jagged([x.to(device) for x in ids]), "position_ids": tu.nested_tensor_from_tensor_list(place)}
        out = TensorDict(fields, batch_size=len(ids))
        tu.assign_non_tensor(out, temperature=1.0, use_remove_padding=self.use_remove_padding)
        return out

    def hidden(self, ids: Sequence[Tensor], positions: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states that the vocabulary head reads, from one forward over all sequences.

        Args:
            ids: int64[T_i] each.
            positions: int64[P_i] each, relative to the sequence.

        Returns:
            [P_i, H] in the compute dtype, on the device.
        """
        index = layout_index([len(x) for x in ids], positions, self.use_remove_padding).to(get_device_id())
        out = self.run(self.inputs(ids), HeadTask(kind="score", index_N=index))
        return list(out[0].split([len(p) for p in positions]))

    def measure_layout(self) -> float:
        """Whether sequences that share a forward see nothing of each other: the largest relative difference of a hidden state
        between two random sequences together and each alone, over all ranks. Kept in ``layout_error``."""
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(self.head.out_features, (n,), generator=generator) for n in (13, 17)]
        every = [torch.arange(len(x)) for x in ids]
        with self.frozen():
            together = self.hidden(ids, every)
            alone = [self.hidden([x], [p])[0] for x, p in zip(ids, every, strict=True)]
        worst = torch.stack(
            [((a - b).float().norm(dim=-1) / b.float().norm(dim=-1)).max() for a, b in zip(together, alone, strict=True)]
        ).max()
        self.layout_error = worst_of_ranks(worst)
        return self.layout_error

    @property
    def layout_threshold(self) -> float:
        """Largest ``layout_error`` at which sequences may share a forward."""
        return LAYOUT_THRESHOLD[self._autocast_dtype]

    def shares_forwards(self) -> bool:
        """Whether several sequences may share a forward; measured on the real layers at the first call."""
        error = self.measure_layout() if self.layout_error is None else self.layout_error
        return error <= self.layout_threshold

    def _scoring_limits(self) -> tuple[float, float]:
        """Tokens and sequences of one scoring forward."""
        cfg = self.engine_config
        if not (self.use_remove_padding and self.shares_forwards()):
            return math.inf, 1
        if cfg.use_dynamic_bsz:
            return cfg.infer_max_token_len_per_gpu or cfg.max_token_len_per_gpu, math.inf
        return math.inf, cfg.infer_micro_batch_size_per_gpu or cfg.micro_batch_size_per_gpu

    def score(self, data: TensorDict, loss: OpsdLoss, source: Literal["view", "own"] = "view", shift: int = 0) -> list[Tensor]:
        """Hidden states at every row's loss positions, under the weights that the loss names (:meth:`frozen`).

        Args:
            data: this rank's rows (``tokens.rows``).
            loss: names the weights.
            source: ``view``: the teacher's view; ``own``: the student's own ids (anchor, identity teacher).
            shift: tokens by which every position is moved (negative control); 0 otherwise.

        Returns:
            For each row [N_r, H] on the CPU, in the compute dtype.

        Raises:
            OpsdError: a row breaks its contract, or the reference is not available.
        """
        rows = rows_of(data)
        passes = view_passes(rows, shift) if source == "view" else own_passes(rows, shift)
        return self.score_passes(passes, [r["opsd_position"].numel() for r in rows], loss)

    def score_passes(self, passes: Sequence[Pass], counts: Sequence[int], loss: OpsdLoss) -> list[Tensor]:
        """:meth:`score` for passes that are made already. Every rank makes the same number of forwards, however many passes its rows have.

        Args:
            counts: loss positions of each row.
        """
        out: list[Tensor] = [torch.empty(n, self.head.in_features, dtype=self._autocast_dtype) for n in counts]
        groups: list[list[Pass]] = group_passes(passes, *self._scoring_limits())
        count = torch.tensor(len(groups), device=get_device_id())
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.get_data_parallel_group())
        with self.frozen(loss):
            if loss.teacher in COPIES and self._head_trains:
                self._copy_head_VH = self.head_weight().to(self._autocast_dtype, copy=True)
            for group in groups:
                hidden = self.hidden([p.ids_T for p in group], [p.index_N for p in group])
                for p, h in zip(group, hidden, strict=True):
                    out[p.row][p.slots_N] = h.to("cpu", self._autocast_dtype)
            nothing = torch.zeros(0, dtype=torch.int64)
            for _ in range(int(count) - len(groups)):
                self.hidden([torch.zeros(2, dtype=torch.int64)], [nothing])
        return out
