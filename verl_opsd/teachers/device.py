"""`DeviceTeacher`: another model, on one device or spread over several, that scores by hidden states under its own vocabulary weight.

It is a transformers model, nothing offloaded, and runs one sequence a forward, so that no sequence can see another and a causal kernel
needs no mask. Of a forward only the hidden states at the asked positions are kept; logits are never made. A Qwen3.5 model runs a long
sequence in parts that hand their state on, and a prefix that several passes of a row share once. A model that does not fit one device is
sharded by FSDP2 over the ranks of a process group: each rank scores sequences of its own, whole and one by one, and all ranks make the
same number of forwards.

Suffixes: N loss positions of a row, T tokens of a sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError
from verl_opsd.models import attention, kernels, multimodal, rotary, scoring
from verl_opsd.models.adapter import put_on
from verl_opsd.models.gated_delta import CarriedState
from verl_opsd.models.memory import out_of_the_file
from verl_opsd.planning.memory import PART, part_tokens
from verl_opsd.teachers.base import Pass, Voice, slots_of

#: Largest relative difference between two ways to the same numbers on one kind of device, by dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class DeviceTeacher:
    """A :class:`~verl_opsd.teachers.base.Scorer`.

    Attributes:
        name: ``Signal.head_id``.
        carries: whether state is handed on from part to part and from a shared prefix to its branches.
        part: most tokens of one part of a long sequence (``planning.memory.part_tokens``).
        tokens: that it has run so far.
        head_error: largest difference between the model's own logits and hidden state @ vocabulary weight, relative to the largest
            logit; measured once at the start.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: torch.device | str,
        name: str,
        adapter: str | None = None,
        mesh: DeviceMesh | None = None,
        fp8: bool = False,
    ):
        """
        Args:
            path: folder in Hugging Face layout or a hub name, of a causal language model.
            dtype: of weights and compute.
            adapter: folder of a LoRA adapter in PEFT's layout, merged into the weights.
            fp8: run its matrix products in e4m3 (``teachers.fp8``).
            mesh: 1-D, the ranks that hold one copy of the model together; every one of them builds the teacher. None: this device holds it.

        Raises:
            OpsdError: a weight is missing, or the model's logits are not its hidden states times its vocabulary weight.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        config = multimodal.text_config(AutoConfig.from_pretrained(path))
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
        multimodal.require_complete("teacher", path, info)
        if adapter is not None:
            model = put_on(model, adapter).merge_and_unload()
        if torch.device(device).type == "cpu":
            out_of_the_file(model)
        self._take(model, dtype, device, name, mesh, fp8)

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, device: torch.device | str, name: str) -> DeviceTeacher:
        """A teacher of a model that is already in memory; it is changed (:func:`verl_opsd.models.kernels.install`) and kept."""
        self = cls.__new__(cls)
        self._take(model, dtype, device, name)
        return self

    def _take(
        self,
        model: Any,
        dtype: torch.dtype,
        device: torch.device | str,
        name: str,
        mesh: DeviceMesh | None = None,
        fp8: bool = False,
    ) -> None:
        self.name, self.device, self.dtype = name, torch.device(device), dtype
        rotary.restore(model)
        hybrid = kernels.is_hybrid(model)
        self.carries = hybrid and mesh is None  # parts and branches are forwards whose number depends on the row
        if hybrid:
            kernels.install(model, kernels.choose(kernels.Facts.of_this_process(self.device)))
            scoring.install(model)
            model.set_attn_implementation(attention.ATTENTION)
        model = model.eval().requires_grad_(False)
        self._head: nn.Linear = model.get_output_embeddings()
        self._model = model.to(self.device) if mesh is None else _sharded(model, self._head, mesh, self.device)
        if fp8:
            self.to_fp8()
        self._limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.part = PART
        self.tokens = 0
        self.head_error = self._head_error()
        if not self.head_error <= TOLERANCE[dtype]:
            raise OpsdError(
                f"teacher {name}: its logits differ from hidden state @ vocabulary weight by {self.head_error:.2g} of the largest",
                "a device teacher's distribution is its hidden states under its vocabulary weight alone: no scale, cap or bias",
                "use a model whose logits are the plain output of its head",
            )

    def to_fp8(self) -> int:
        """Puts its matrix products into FP8 (``teachers.fp8.convert``), for good; how many."""
        from verl_opsd.teachers.fp8 import convert

        return convert(self._model)

    @property
    def weight_VH(self) -> Tensor:
        """[V, H] its vocabulary weight, on the teacher's device."""
        return self._head.weight.detach()

    @torch.no_grad()
    def _head_error(self) -> float:
        ids_T = self.probe_ids()
        ours_TV = F.linear(self._hidden(ids_T, torch.arange(len(ids_T))), self.weight_VH).float()
        with self._current():
            theirs_TV = self._model(input_ids=ids_T[None].to(self.device), use_cache=False).logits[0].float()
        return float((ours_TV - theirs_TV).abs().max() / theirs_TV.abs().max())

    @property
    def voice(self) -> Voice:
        """Its signal's form."""
        return Voice(self.name, "exact", self._head.in_features, self.dtype)

    def probe_ids(self) -> Tensor:
        """int64[29] a fixed sequence, for comparisons between workers."""
        return torch.arange(29) * 7919 % self._head.out_features

    def probe(self) -> Tensor:
        """[29, H] hidden states of :meth:`probe_ids`, on the host."""
        every = torch.arange(29)
        return self._hidden(self.probe_ids(), every).cpu()

    @torch.no_grad()
    def continue_greedily(self, ids_T: Tensor, count: int, end: int) -> Tensor:
        """int64[<= count] the most probable continuation of one sequence, up to and with the token ``end``."""
        if self.carries:  # transformers' loop gives a mask, which attention over carried keys does not read
            return self._continue_carrying(ids_T, count, end)
        asked = ids_T[None].to(self.device)
        out = self._model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
        )
        return out[0, len(ids_T) :].cpu()

    def _continue_carrying(self, ids_T: Tensor, count: int, end: int) -> Tensor:
        state, start = CarriedState(), 0
        said: list[int] = []
        while len(said) < count and (not said or said[-1] != end):
            hidden_1H = self._hidden(ids_T, torch.tensor([len(ids_T) - 1]), state, start)
            start += len(ids_T)
            said.append(int(F.linear(hidden_1H, self.weight_VH).argmax()))
            ids_T = torch.tensor(said[-1:])
        return torch.tensor(said, dtype=torch.int64)

    def _current(self) -> AbstractContextManager[Any]:
        """Makes its device the current one: a fused kernel is launched there, wherever its tensors are."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _hidden(self, ids_T: Tensor, index_N: Tensor, state: CarriedState | None = None, start: int = 0) -> Tensor:
        """[N, H] what the vocabulary head reads at ``index_N``, on the device; see :meth:`_write`."""
        out_NH = self._room(len(index_N))
        self._write(out_NH, torch.arange(len(index_N)), ids_T, index_N, state, start)
        return out_NH

    def _room(self, rows: int) -> Tensor:
        return torch.empty(rows, self._head.in_features, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def _write(
        self, out_NH: Tensor, rows_M: Tensor, ids_T: Tensor, index_M: Tensor, state: CarriedState | None = None, start: int = 0
    ) -> None:
        """Puts what the vocabulary head reads at ``index_M`` into the rows ``rows_M`` of ``out_NH``; nothing waits for the device.

        Args:
            out_NH: on the device. The other tensors are on the host, and go over before the first part runs.
            ids_T: the tokens that run; the first is token ``start`` of its sequence.
            index_M: positions in ``ids_T``.
            state: what the tokens before left; it is moved on to the end of ``ids_T``.
        """
        tokens = len(ids_T)
        self.tokens += tokens
        size = part_tokens(tokens, self.part) if self.carries else tokens
        starts = range(0, tokens, size)
        here = [((index_M >= a) & (index_M < a + size)).nonzero()[:, 0] for a in starts]
        moved = [(rows_M[m].to(self.device), (index_M[m] - a).to(self.device)) for a, m in zip(starts, here, strict=True)]
        asked = ids_T[None].to(self.device)
        if state is None and len(starts) > 1:
            state = CarriedState()
        with self._current():
            for a, (to_M, from_M) in zip(starts, moved, strict=True):
                out_NH[to_M] = self._states(asked[:, a : a + size], state, start + a)[from_M]

    def _states(self, asked: Tensor, state: CarriedState | None, start: int) -> Tensor:
        """[T, H] of one forward."""
        given: dict[str, Any] = {"use_cache": False}
        if self.carries:
            places = torch.arange(start, start + asked.shape[1], device=self.device)[None]
            given = {"use_cache": state is not None, "past_key_values": state, "position_ids": places}
        return self._model.base_model(input_ids=asked, **given).last_hidden_state[0]  # type: ignore[no-any-return]

    def _in_branches(self, passes: Sequence[Pass], out_NH: Tensor) -> None:
        """Puts each pass' states into its slots; tokens that a pass shares with the next one run once."""
        trunk, at, state = torch.zeros(0, dtype=torch.int64), 0, CarriedState()
        for p, following in zip(passes, [*passes[1:], None], strict=True):
            ids_T, first = p.ids_T, int(p.index_N.min())
            if at > first or shared(trunk[:at], ids_T) < at:
                at, state = 0, CarriedState()
            until = at
            if following is not None:
                until = max(at, min(shared(ids_T, following.ids_T), int(following.index_N.min()), len(ids_T) - 1))
            for a, b in ((at, until), (until, len(ids_T))):
                if b > a:  # the shared part moves the trunk on, the rest starts from it
                    here_N = (p.index_N >= a) & (p.index_N < b)
                    branch = state.fork() if b == len(ids_T) else state
                    self._write(out_NH, p.slots_N[here_N], ids_T[a:b], p.index_N[here_N] - a, branch, a)
            trunk, at = ids_T, until

    def check(self, passes: Sequence[Pass]) -> None:
        """
        Raises:
            OpsdError: a sequence is longer than the model's context, or has an id outside its vocabulary.
        """
        check_passes(passes, self.name, self._limit, self._head.out_features)

    def score(self, passes: Sequence[Pass], forwards: int | None = None) -> Signal:
        """See :meth:`verl_opsd.teachers.base.Scorer.score`.

        Args:
            forwards: how many to make, by all ranks of a mesh alike; those that this row does not need run on a sequence of two tokens.
                None: one a pass.

        Returns:
            The exact signal, hidden states [N, H] in the teacher's dtype, on the host.

        Raises:
            OpsdError: see :meth:`check`.
        """
        self.check(passes)
        out_NH = self._room(len(slots_of(passes)))
        if self.carries and len(passes) > 1:
            self._in_branches(passes, out_NH)
        else:
            for p in passes:
                self._write(out_NH, p.slots_N, p.ids_T, p.index_N)
        for _ in range((forwards or len(passes)) - len(passes)):
            self._hidden(torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        return Signal(hidden_NH=on_the_host(out_NH), head_id=self.name)

    @property
    def limits(self) -> tuple[int | None, int]:
        """Tokens of its context (None: not known) and entries of its vocabulary."""
        return self._limit, self._head.out_features


def on_the_host(x: Tensor) -> Tensor:
    """A copy in host memory, page-locked where ``x`` is on a CUDA device: such a copy runs at the bus' rate, one to other memory is staged."""
    if not x.is_cuda:
        return x
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    out.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return out


def check_passes(passes: Sequence[Pass], name: str, limit: int | None, vocabulary: int) -> None:
    """
    Raises:
        OpsdError: a sequence is longer than the model's context, or has an id outside its vocabulary.
    """
    for p in passes:
        if limit is not None and len(p.ids_T) > limit:
            raise OpsdError(
                f"a teacher view of {len(p.ids_T)} tokens for teacher {name} with a context of {limit}",
                "a view is never truncated",
                "lower opsd.contract.context_length or opsd.brief.max_view_tokens, or take a teacher with a longer context",
            )
        if int(p.ids_T.min()) < 0 or int(p.ids_T.max()) >= vocabulary:
            raise OpsdError(
                f"token ids {int(p.ids_T.min())}..{int(p.ids_T.max())} for teacher {name} of {vocabulary} entries",
                "student and teacher read the same ids",
                "choose a teacher of the student's family",
            )


def _sharded(model: Any, head: nn.Linear, mesh: DeviceMesh, device: torch.device) -> Any:
    """The decoder's layers sharded one by one as they go to the device; the vocabulary head stays whole on each rank."""
    decoder: Any = model.base_model
    if head.weight is decoder.get_input_embeddings().weight:  # tied: the head keeps a whole copy
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True)
    head.to(device)
    return model


def shared(a_T: Tensor, b_T: Tensor) -> int:
    """Number of tokens that two sequences share from their beginning."""
    n = min(len(a_T), len(b_T))
    different = (a_T[:n] != b_T[:n]).nonzero()
    return int(different[0]) if len(different) else n
