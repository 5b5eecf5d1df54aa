"""The weights of `OpsdEngine`: how they are built, which earlier ones are kept, and what runs under which of them.

Suffixes: H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.utils import model as verl_model
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_opsd.distill.head import LossPositionHead, install_head
from verl_opsd.errors import OpsdError
from verl_opsd.models import attention, checkpointing, kernels, multimodal, rotary
from verl_opsd.models.forward import adapters_off
from verl_opsd.teachers.base import Voice
from verl_opsd.verl_adapter import ulysses
from verl_opsd.verl_adapter.copies import WeightCopy, copy_for
from verl_opsd.verl_adapter.loss import COPIES, OpsdLoss
from verl_opsd.verl_adapter.step import Head, OutsideTeacher

ulysses.register()
attention.register()


class WeightsEngine(FSDPEngineWithLMHead):
    """verl's engine with the loss-position head, fp32 adapters, and copies of earlier weights."""

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
        self._multimodal = multimodal.is_multimodal(model_config.hf_config)
        if self._multimodal:  # verl would build the whole; positions, kernels and memory are those of its text model
            model_config = copy.copy(model_config)
            model_config.hf_config = multimodal.text_config(model_config.hf_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._forget()

    def _forget(self) -> None:
        """What is known about a model that is not there any more."""
        self._prepared: OpsdLoss | None = None
        self._moved = False  # whether the weights are no longer those that were loaded
        self._initial: list[Tensor] | None = None
        self._initial_head_VH: Tensor | None = None
        self._trained_B: list[Tensor] | None = None  # lora_B while random values are in its place
        self._copy: WeightCopy | None = None  # a teacher made of the student's earlier weights
        self._copy_head_VH: Tensor | None = None  # its vocabulary weight when it last scored, in full-parameter training
        self._outside: list[OutsideTeacher] = []  # teachers that score elsewhere, in the order of their numbers in rows

    def initialize(self) -> None:
        """Builds model, optimizer and scheduler; everything that was kept about earlier weights is dropped."""
        self._forget()
        super().initialize()

    def _build_module(self) -> nn.Module:
        with _complete():
            module = super()._build_module()
        rotary.restore(module)
        self.head: LossPositionHead = install_head(module)
        self.kernels = choice = kernels.choose(kernels.Facts.of_this_process())
        if kernels.is_hybrid(module):
            if choice.delta == "fla":  # before any training, on a layer of the model's own shapes
                kernels.require(module.config.get_text_config(), get_device_id(), torch.bfloat16, choice)
            if self.use_remove_padding and module.config._attn_implementation == "sdpa":
                module.set_attn_implementation(attention.ATTENTION)  # transformers' would build a mask over all packed rows
            print(f"kernels: {choice}; attention: {module.config._attn_implementation}", flush=True)
        kernels.install(module, choice)
        if self.engine_config.ulysses_sequence_parallel_size > 1:
            ulysses.share_sequences(module)
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
        kernels.fuse_adapters(adapted)
        return adapted

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """verl's, by the names of the checkpoint that servers load."""
        named, peft_config = super().get_per_tensor_param(*args, **kwargs)
        return ((multimodal.stored_name(n), t) for n, t in named) if self._multimodal else named, peft_config

    def set_activations(self, chosen: checkpointing.Plan) -> None:
        """Which layers keep their activations from now on, in place of verl's all or none. Every rank gets the same plan: a layer that
        runs forward twice is gathered twice.

        Raises:
            OpsdError: verl was told to checkpoint nothing or to move activations itself, or the plan is of another number of layers.
        """
        if not self.model_config.enable_gradient_checkpointing or self.model_config.enable_activation_offload:
            raise OpsdError(
                f"an activation plan with model.enable_gradient_checkpointing={self.model_config.enable_gradient_checkpointing} "
                f"enable_activation_offload={self.model_config.enable_activation_offload}",
                "one side says which layers are checkpointed and where their inputs wait",
                "set actor_rollout_ref.model.enable_gradient_checkpointing=true enable_activation_offload=false, or "
                "opsd.activations.keep=verl",
            )
        checkpointing.apply(self.module, chosen)

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

    def rehearse(self, scale: float | None) -> None:
        """Puts random normal values of this scale in place of every lora_B, the same however the weights are sharded; the optimizer and
        everything else stays. None puts the trained values back, bit for bit; without replaced ones it does nothing."""
        self._reshard()
        params = [p.detach() for k, p in self.module.named_parameters() if "lora_B" in k]
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in params]
        if scale is None:
            for shard, saved in zip(shards, self._trained_B or shards, strict=True):
                shard.copy_(saved)
            self._trained_B = None
            return
        if self._trained_B is None:
            self._trained_B = [s.to("cpu", copy=True) for s in shards]
        generator = torch.Generator().manual_seed(0)
        for p, shard in zip(params, shards, strict=True):
            whole = torch.randn(p.shape, generator=generator) * scale
            if isinstance(p, DTensor):  # every rank has drawn the whole, and takes its part
                whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()
            shard.copy_(whole)

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


class _Complete:
    """A loader of transformers' that refuses files which lack a weight; left to itself it fills the place at random."""

    def __init__(self, auto_class: Any):
        self._auto_class = auto_class

    def from_pretrained(self, pretrained_model_name_or_path: str, **kwargs: Any) -> nn.Module:
        """transformers'.

        Raises:
            OpsdError: a weight of the student is in none of its files.
        """
        model, info = self._auto_class.from_pretrained(pretrained_model_name_or_path, **kwargs, output_loading_info=True)
        multimodal.require_complete("the student", pretrained_model_name_or_path, info)
        return model  # type: ignore[no-any-return]


@contextmanager
def _complete() -> Iterator[None]:
    """verl's engine loads with :class:`_Complete`; it looks the loader up when it builds a model."""
    original = verl_model.get_hf_auto_model_class
    verl_model.get_hf_auto_model_class = lambda hf_config: _Complete(original(hf_config))
    try:
        yield
    finally:
        verl_model.get_hf_auto_model_class = original
