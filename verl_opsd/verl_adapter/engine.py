"""`OpsdEngine`: verl's FSDP2 language-model engine with distillation from privileged context.

What it adds to verl's engine: the loss-position head, a scoring pass that gives teacher and anchor hidden states, a loss step
that uses them, fp32 adapters over a base of any dtype, a frozen copy of the initial weights for full-parameter training, and a
stop at a non-finite gradient. It is chosen by verl's own engine registry under the vendor key ``opsd``; a loss function that is
not an :class:`OpsdLoss` (SFT, PPO) takes verl's own path. Weights are in ``engine_weights``, forwards in ``engine_forwards``.

Suffixes: N loss positions, H hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.copies import load_copy, save_copy
from verl_opsd.verl_adapter.engine_forwards import ScoringEngine
from verl_opsd.verl_adapter.loss import OpsdLoss
from verl_opsd.verl_adapter.step import kept_coefficient, loss_task, metrics_of, task_reward_loss, values_by_row


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor="opsd")
class OpsdEngine(ScoringEngine):
    """See the head of this file. Methods that run the model are collective: every rank calls them in the same order."""

    def _forget(self) -> None:
        super()._forget()
        self.optimizer_steps = 0
        self._kept = torch.zeros(())  # sum of kept coefficients of this rank's micro-batches of a step

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """verl's loop over micro-batches; one row each where rows that share a forward would see each other, or have teachers of their own."""
        if isinstance(loss_function, OpsdLoss) and (not self.shares_forwards() or len(self._outside) > 1):
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        self._kept = torch.zeros((), dtype=torch.float64, device=get_device_id())
        out = super().forward_backward_batch(data, loss_function, forward_only)
        if isinstance(loss_function, OpsdLoss) and loss_function.divide_by_kept and not forward_only:
            self._divide_by_kept(out)
        return out

    def _divide_by_kept(self, out: dict[str, Any]) -> None:
        """Makes the step's sum over kept positions their mean: gradients, losses and reported coefficients.

        Raises:
            OpsdError: the step keeps no position; on every rank.
        """
        dist.all_reduce(self._kept, group=self.get_data_parallel_group())
        kept = float(self._kept)
        if kept == 0:
            raise OpsdError(
                f"no position of optimizer step {self.optimizer_steps} is above the threshold",
                "a mean over the kept positions needs one",
                "lower opsd.loss.threshold.above, or divide by all positions (opsd.loss.threshold.denominator=all)",
            )
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad.div_(kept)
        out["loss"] = [x / kept for x in out["loss"]]
        out["metrics"]["opsd/coef"] = [x / kept for x in out["metrics"]["opsd/coef"]]

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> tuple[Tensor, dict]:
        """One micro-batch. With an :class:`OpsdLoss` the rows bring their signal in ``opsd_signal`` (and ``opsd_base``): hidden
        states [N_r, H] of the teacher that the loss names (``opsd_base``: of the reference), under that teacher's vocabulary head.

        Returns:
            The loss times the data-parallel size (FSDP averages over ranks), and verl's record: ``loss``, ``metrics`` with a
            flat list for each token value, and in ``forward_only`` the same values by row in ``model_output``.
        """
        if not isinstance(loss_function, OpsdLoss):
            return super().forward_step(micro_batch, loss_function, forward_only)
        self.prepare(loss_function)
        batch = micro_batch.to(get_device_id())
        tu.assign_non_tensor(batch, temperature=1.0)
        packed = tu.get_non_tensor_data(batch, "use_remove_padding", True)
        task = loss_task(batch, loss_function, *self._heads_of(loss_function), self.get_data_parallel_size(), packed)
        loss = self.run(batch, task).sum()
        assert task.result is not None
        if loss_function.task_reward is not None:
            clip, ranks = loss_function.task_reward, self.get_data_parallel_size()
            loss = loss + task_reward_loss(batch, task, clip, ranks, self.mine_N if self.use_ulysses_sp else None)
        if loss_function.divide_by_kept:
            assert loss_function.kept_above is not None
            self._kept += kept_coefficient(batch, task.result, loss_function.kept_above)
        metrics = metrics_of(batch, task.result, self.optimizer_steps)
        output = values_by_row(batch, task.result) if forward_only else {}
        record = {"model_output": output, "loss": self.over_sequence(loss).item(), "metrics": metrics}
        return loss * self.ulysses_sequence_parallel_size, record  # FSDP averages over the sequence-parallel ranks too

    def optimizer_step(self) -> float:
        """verl's step; a non-finite gradient stops every rank before a parameter has changed.

        Raises:
            OpsdError: the gradient's norm is not finite.
        """
        norm: float = super().optimizer_step()
        if not math.isfinite(norm):
            raise OpsdError(
                f"gradient norm {norm} at optimizer step {self.optimizer_steps}",
                "a step with a non-finite gradient is never taken, and never skipped silently",
                "look at opsd/divergence of this step; lower the learning rate or the coefficients",
            )
        self._moved = True
        self.optimizer_steps += 1
        if self._copy is not None:
            self._copy.stepped(self._trainable_shards())
        return norm

    def round_begins(self) -> None:
        """Tells a teacher made of the student's earlier weights that an update's rows are scored and its steps follow."""
        if self._copy is not None:
            self._reshard()
            self._copy.round_begins(self._trainable_shards())

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's, and the teacher's copy."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._copy is not None:
            save_copy(self._copy, local_path, dist.get_rank(), dist.get_world_size())

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's, and the teacher's copy; afterwards the weights are no longer the initial ones.

        Raises:
            OpsdError: the checkpoint holds no copy of the teacher that :meth:`keep` was told of, or another one.
        """
        self._moved = True
        super().load_checkpoint(local_path, *args, **kwargs)
        if self._copy is not None:
            load_copy(self._copy, local_path, dist.get_rank(), dist.get_world_size())
