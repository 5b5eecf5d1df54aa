"""`OpsdEngine`: verl's FSDP2 language-model engine with distillation from privileged context.

What it adds to verl's engine: the loss-position head, a scoring pass that gives teacher and anchor hidden states, a loss step
that uses them, fp32 adapters over a base of any dtype, a frozen copy of the initial weights for full-parameter training, and a
stop at a non-finite gradient. It is chosen by verl's own engine registry under the vendor key ``opsd``; a loss function that is
not an :class:`OpsdLoss` (SFT, PPO) takes verl's own path.

Suffixes: N loss positions, H hidden size, V vocabulary, P positions asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_opsd.distill.head import HeadTask, LossPositionHead, install_head
from verl_opsd.errors import OpsdError
from verl_opsd.models.forward import adapters_off, run_head
from verl_opsd.teachers.base import Voice
from verl_opsd.verl_adapter import ulysses
from verl_opsd.verl_adapter.copies import WeightCopy, copy_for, load_copy, save_copy
from verl_opsd.verl_adapter.loss import COPIES, OpsdLoss
from verl_opsd.verl_adapter.passes import Pass, group_passes, jagged, layout_index, own_passes, rows_of, view_passes
from verl_opsd.verl_adapter.step import (
    Head,
    OutsideTeacher,
    kept_coefficient,
    loss_task,
    metrics_of,
    task_reward_loss,
    values_by_row,
)

#: Largest relative difference of a hidden state between a sequence alone and beside another one, by compute dtype.
LAYOUT_THRESHOLD = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}


ulysses.register()


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor="opsd")
class OpsdEngine(FSDPEngineWithLMHead):
    """See the head of this file. Methods that run the model are collective: every rank calls them in the same order."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any):
        if engine_config.strategy != "fsdp2":
            raise OpsdError(
                f"strategy={engine_config.strategy}",
                "the loss-position head and fp32 adapters over a frozen base need FSDP2's per-parameter sharding",
                "set actor_rollout_ref.actor.strategy=fsdp2 (engine.strategy=fsdp2 for SFT)",
            )
        sp, attention = engine_config.ulysses_sequence_parallel_size, model_config.hf_config._attn_implementation
        if sp > 1 and not ulysses.is_right(attention):
            raise OpsdError(
                f"ulysses_sequence_parallel_size={sp} with attn_implementation={attention}",
                "verl's sequence parallelism exchanges heads in flash attention only; others give wrong values silently",
                f"set ulysses_sequence_parallel_size=1, or use flash_attention_2 or {ulysses.ATTENTION}",
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._forget()

    def _forget(self) -> None:
        self.forwards = 0  # calls of the model by this rank, outside verl's own path
        self.optimizer_steps = 0
        self.layout_error: float | None = None  # set by measure_layout
        self._prepared: OpsdLoss | None = None
        self.mine_N = torch.zeros(
            0, dtype=torch.bool
        )  # with sequence parallelism: of the last loss task, this rank's positions
        self._kept = torch.zeros(())  # sum of kept coefficients of this rank's micro-batches of a step
        self._moved = False  # whether the weights are no longer those that were loaded
        self._initial: list[Tensor] | None = None
        self._initial_head_VH: Tensor | None = None
        self._copy: WeightCopy | None = None  # a teacher made of the student's earlier weights
        self._copy_head_VH: Tensor | None = None  # its vocabulary weight when it last scored, in full-parameter training
        self._outside: list[OutsideTeacher] = []  # teachers that score elsewhere, in the order of their numbers in rows

    def initialize(self) -> None:
        """Builds model, optimizer and scheduler; everything that was kept about earlier weights is dropped."""
        self._forget()
        super().initialize()

    # ---- building -------------------------------------------------------------------------------------------------

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        self.head: LossPositionHead = install_head(module)
        return module

    def _build_lora_module(self, module: nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):  # verl leaves a new adapter to chance: runs could not be compared
            torch.manual_seed(self.engine_config.seed)
            adapted: Any = super()._build_lora_module(module)
        if not isinstance(adapted.get_base_model().get_output_embeddings(), LossPositionHead):
            raise OpsdError(
                f"an adapter on the output embeddings (target_modules={self.model_config.target_modules})",
                "the teacher and the anchor are scored under the student's own vocabulary weight, which must not move",
                "leave lm_head out of actor_rollout_ref.model.target_modules",
            )
        for p in adapted.parameters():  # verl casts adapters to the base's dtype; small updates vanish in bf16
            if p.requires_grad:
                p.data = p.data.float()
        return adapted

    def prepare(self, loss: OpsdLoss) -> None:
        """Checks that this engine can train with ``loss`` and keeps what it needs; the same loss again does nothing.

        Raises:
            OpsdError: the engine can't give the reference that the loss names, or runs a forward that bypasses the head.
        """
        if loss == self._prepared:
            return
        if self.model_config.use_fused_kernels:
            raise OpsdError(
                "distillation with model.use_fused_kernels=true",
                "fused kernels bypass the vocabulary head",
                "set actor_rollout_ref.model.use_fused_kernels=false",
            )
        if loss.reference == "adapter_off" and not self._is_lora:
            raise OpsdError(
                "reference=adapter_off with full-parameter training",
                "there is no adapter to switch off, so the base is gone after the first step",
                "train an adapter (actor_rollout_ref.model.lora_rank > 0), or keep a frozen copy (reference=initial)",
            )
        if loss.teacher == "device" and not self._outside:
            raise OpsdError(
                "teacher=device and no teacher is known",
                "another model's signal is read in its own form, hidden states under its own vocabulary weight",
                "call add_teacher (opsd_add_teacher on the worker) before the loss is set",
            )
        self.keep(loss)
        self._prepared = loss

    def keep(self, loss: OpsdLoss) -> None:
        """Keeps what the loss needs of the weights as they are now; again does nothing.

        A run that resumes calls it before its checkpoint is loaded, so that copies are what the model was before any training.

        Raises:
            OpsdError: the weights have moved already.
        """
        if loss.reference == "initial":
            self.keep_initial()
        if loss.teacher in COPIES and self._copy is None:
            self._require_unmoved(f"teacher={loss.teacher}")
            self._reshard()
            self._copy = copy_for(loss, self._trainable_shards())

    def add_teacher(self, voice: Voice, weight_VH: Tensor | None) -> None:
        """Makes a teacher known that scores elsewhere; its number in the rows is how many there were before. One of the same name is
        replaced.

        Args:
            weight_VH: [V, H] of an exact teacher, with the student's V and the teacher's H; kept on this rank's device in the compute
                dtype.

        Raises:
            OpsdError: the name is one of the student's own heads, or the weight is missing, not needed, or of another size.
        """
        want = (self.head.out_features, voice.width) if voice.form == "exact" else None
        found = None if weight_VH is None else tuple(weight_VH.shape)
        if voice.name in ("student", "initial") or found != want:
            raise OpsdError(
                f"teacher {voice.name!r} with a head of shape {found}, expected {want} beside a student vocabulary of "
                f"{self.head.out_features}",
                "student and teacher share one vocabulary, entry by entry; 'student' and 'initial' are the student's own heads",
                "choose a teacher of the student's family with the same number of vocabulary rows",
            )
        kept = None if weight_VH is None else weight_VH.to(get_device_id(), self._autocast_dtype)
        names = [t.voice.name for t in self._outside]
        place = names.index(voice.name) if voice.name in names else len(names)
        self._outside[place : place + 1] = [OutsideTeacher(voice, kept)]

    def _heads_of(self, loss: OpsdLoss) -> tuple[Head | Sequence[OutsideTeacher], Head]:
        """Vocabulary heads of the teacher that the loss names and of the reference."""
        reference: Head = ("student", None) if self._initial_head_VH is None else ("initial", self._initial_head_VH)
        if loss.teacher == "device":
            return self._outside, reference
        if loss.teacher in COPIES and self._head_trains:
            return (loss.teacher, self._copy_head_VH), reference
        return (("student", None) if loss.teacher in COPIES else reference), reference

    @property
    def _head_trains(self) -> bool:
        return not self._is_lora

    def keep_initial(self) -> None:
        """Keeps a frozen copy of the trainable weights on the host: the reference ``initial``; see :meth:`keep`."""
        if self._initial is not None:
            return
        self._require_unmoved("reference=initial")
        self._reshard()
        self._initial = [shard.to("cpu", copy=True) for shard in self._trainable_shards()]
        if self._head_trains:
            self._initial_head_VH = self.head_weight().to(self._autocast_dtype, copy=True)

    def _require_unmoved(self, what: str) -> None:
        if self._moved:
            raise OpsdError(
                f"{what} asked for after the weights have moved",
                "a copy of the weights is taken before the first optimizer step and before a checkpoint is loaded",
                "set the loss function, or call keep, right after the workers are built",
            )

    # ---- weights --------------------------------------------------------------------------------------------------

    def _trainable_shards(self) -> list[Tensor]:
        """This rank's part of every trainable parameter, sharing its storage."""
        params = (p.detach() for p in self.module.parameters() if p.requires_grad)
        return [p.to_local() if isinstance(p, DTensor) else p for p in params]

    def _reshard(self) -> None:
        """Drops unsharded copies, so that parameters are the shards and the next forward gathers them anew."""
        for m in self.module.modules():
            if isinstance(m, FSDPModule):
                m.reshard()

    def head_weight(self) -> Tensor:
        """[V, H] the whole vocabulary weight, gathered on every rank."""
        weight = self.head.weight.detach().to(get_device_id())
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    @contextmanager
    def _with_weights(self, other: Sequence[Tensor]) -> Iterator[None]:
        """Runs under other values of the trainable weights."""
        self._reshard()
        shards = self._trainable_shards()
        current = [s.to("cpu", copy=True) for s in shards]
        try:
            for shard, value in zip(shards, other, strict=True):
                shard.copy_(value)
            yield
        finally:
            self._reshard()
            for shard, saved in zip(shards, current, strict=True):
                shard.copy_(saved)

    def _weights_of(self, loss: OpsdLoss) -> AbstractContextManager[None]:
        """The weights of the loss's teacher; of its reference where the teacher is another model."""
        if loss.teacher in COPIES:
            assert self._copy is not None  # prepare
            return self._with_weights(self._copy.shards)
        if loss.reference == "adapter_off":
            return adapters_off(self.module)
        assert self._initial is not None  # prepare
        return self._with_weights(self._initial)

    @contextmanager
    def frozen(self, teacher: OpsdLoss | None = None) -> Iterator[None]:
        """Evaluation mode without gradients; with ``teacher``, under the weights that this loss names (:meth:`_weights_of`).

        Training flags, adapter state, ``requires_grad`` and weights are afterwards what they were, whatever happens inside.
        """
        weights: AbstractContextManager[None] = nullcontext()
        if teacher is not None:
            self.prepare(teacher)
            weights = self._weights_of(teacher)
        flags = [(m, m.training) for m in self.module.modules()]
        try:
            self.module.eval()
            with torch.no_grad(), weights:
                yield
        finally:
            self._reshard()
            for m, training in flags:
                m.training = training

    # ---- forwards -------------------------------------------------------------------------------------------------

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
            if hasattr(self.module.config, "vision_config"):  # a multimodal model slices its inputs itself
                length //= self.ulysses_sequence_parallel_size
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

    def inputs(self, ids: Sequence[Tensor], rope_rows: int | None = None) -> TensorDict:
        """Sequences as verl's micro-batch in the engine's layout, on the device.

        Args:
            ids: int64[T_i] each.
            rope_rows: rows of the position ids in multimodal models (verl's 3-D form); None: 1-D positions.
        """
        device = get_device_id()
        place = [torch.arange(len(x), device=device) for x in ids]
        if rope_rows is not None:
            place = [p.expand(rope_rows, -1) for p in place]
        fields = {"input_ids": jagged([x.to(device) for x in ids]), "position_ids": tu.nested_tensor_from_tensor_list(place)}
        out = TensorDict(fields, batch_size=len(ids))
        tu.assign_non_tensor(out, temperature=1.0, use_remove_padding=self.use_remove_padding)
        return out

    def hidden(self, ids: Sequence[Tensor], positions: Sequence[Tensor], rope_rows: int | None = None) -> list[Tensor]:
        """Hidden states that the vocabulary head reads, from one forward over all sequences.

        Args:
            ids: int64[T_i] each.
            positions: int64[P_i] each, relative to the sequence.
            rope_rows: as in :meth:`inputs`.

        Returns:
            [P_i, H] in the compute dtype, on the device.
        """
        index = layout_index([len(x) for x in ids], positions, self.use_remove_padding).to(get_device_id())
        out = self.run(self.inputs(ids, rope_rows), HeadTask(kind="score", index_N=index))
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
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        self.layout_error = float(worst)
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

        Every rank makes the same number of forwards, however many passes its rows have.

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
        rope_rows = data["position_ids"].values().shape[0] if data["position_ids"].dim() == 3 else None
        out: list[Tensor] = [
            torch.empty(r["opsd_position"].numel(), self.head.in_features, dtype=self._autocast_dtype) for r in rows
        ]
        groups: list[list[Pass]] = group_passes(passes, *self._scoring_limits())
        count = torch.tensor(len(groups), device=get_device_id())
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.get_data_parallel_group())
        with self.frozen(loss):
            if loss.teacher in COPIES and self._head_trains:
                self._copy_head_VH = self.head_weight().to(self._autocast_dtype, copy=True)
            for group in groups:
                hidden = self.hidden([p.ids_T for p in group], [p.index_N for p in group], rope_rows)
                for p, h in zip(group, hidden, strict=True):
                    out[p.row][p.slots_N] = h.to("cpu", self._autocast_dtype)
            nothing = torch.zeros(0, dtype=torch.int64)
            for _ in range(int(count) - len(groups)):
                self.hidden([torch.zeros(2, dtype=torch.int64)], [nothing], rope_rows)
        return out

    # ---- training -------------------------------------------------------------------------------------------------

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
