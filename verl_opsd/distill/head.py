"""`LossPositionHead`: the model's own lm_head, which applies the vocabulary only where there is loss.

It gathers the hidden states at the loss positions, and computes the divergence and its gradient chunk by chunk in
one pass: no tensor of positions x vocabulary outlives a chunk. Installed by a class swap, so the name, tying,
sharding and checkpoints of the parameter, and adapters elsewhere, stay as they are; without a task it is ``nn.Linear``.

Shape suffixes: B batch, T sequence, M = B*T, N loss positions, C loss positions of one chunk, H hidden size (the
teacher's may differ), V vocabulary. Log-probabilities and divergences are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_opsd.distill import support
from verl_opsd.distill.chunk import ROWS, ChunkInput, ChunkOutput, chunk_loss, default_rows, logits, matmul, through_softmax
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class HeadResult:
    """Detached per-token values, float32[N] each (float64 under a float64 weight). NaN marks what the task or the form of its signal does not tell.

    Attributes:
        divergence_N: the divergence from the teacher, before weights and coefficients; nats.
        anchor_N: the same from the anchor (drift); nats.
        student_logprob_N, teacher_logprob_N: of the sampled token (``labels_N``).
        entropy_N: of the student's distribution; nats.
        agree_N: 1 where student and teacher have the same most probable token, else 0.
        weight_N: the data-dependent weight that multiplied the position's coefficient.
        coverage_student_N, coverage_teacher_N: probability mass of the support on either side (1: full vocabulary).
    """

    divergence_N: Tensor
    anchor_N: Tensor
    student_logprob_N: Tensor
    teacher_logprob_N: Tensor
    entropy_N: Tensor
    agree_N: Tensor
    weight_N: Tensor
    coverage_student_N: Tensor
    coverage_teacher_N: Tensor


@dataclass
class HeadTask:
    """What one forward of the head has to do. Set as ``head.task`` before the forward, and removed after it.

    Attributes:
        kind: ``score`` returns hidden states at ``index_N``; ``loss`` returns the weighted sum of divergences.
        index_N: int64 indices into the flattened (B*T) hidden states: the predicting positions.
        labels_N: int64 sampled tokens, the token at position + 1.
        teacher: the teacher's signal at the same positions.
        teacher_weight_VH: the teacher's vocabulary weight; None: this head's own (``Signal.head_id == "student"``).
        coef_N: float32 final coefficient of each position's divergence.
        anchor: the anchor's exact signal, of the student's own base.
        anchor_weight_VH: its vocabulary weight where that is not this head's own any more (full-parameter training); None: this head's own
            (``Signal.head_id == "student"``).
        anchor_coef_N: float32 final coefficient of each position's divergence from the anchor.
        loss: which divergence, support and weights.
        chunk: loss positions per chunk; None: ``chunk.default_rows``.
        behaviour_logprob_N: float32 log-probabilities of the sampled tokens under the policy that sampled them; for the
            policy-gradient form only.
        policy: also fill ``log_probs_N`` and ``entropy_N``, so that a term of them (PPO, GRPO) can be added to the loss. Their
            backward makes the logits once more, chunk by chunk.
        result: filled by the forward of a ``loss`` task.
        log_probs_N, entropy_N: filled when ``policy``: of the sampled tokens and of the student's distribution, with gradient; nats.
    """

    kind: Literal["score", "loss"]
    index_N: Tensor
    labels_N: Tensor | None = None
    teacher: Signal | None = None
    teacher_weight_VH: Tensor | None = None
    coef_N: Tensor | None = None
    anchor: Signal | None = None
    anchor_weight_VH: Tensor | None = None
    anchor_coef_N: Tensor | None = None
    loss: LossSpec = field(default_factory=LossSpec)
    chunk: int | None = None
    behaviour_logprob_N: Tensor | None = None
    policy: bool = False
    result: HeadResult | None = None
    log_probs_N: Tensor | None = None
    entropy_N: Tensor | None = None

    def check(self, weight_VH: Tensor) -> None:
        """Refuses a task that contradicts itself or the head.

        Raises:
            OpsdError: a part is missing, superfluous or of another length, dtype or vocabulary.
        """
        n = self.index_N.numel()
        if self.index_N.dtype != torch.int64 or self.index_N.dim() != 1:
            _refuse(f"index_N {self.index_N.dtype} of {self.index_N.dim()} dimensions", "index_N is int64[N]")
        if self.chunk is not None and self.chunk < 1:
            _refuse(f"chunk={self.chunk}", "a chunk holds at least one loss position")
        if self.kind == "score":
            return
        if self.kind != "loss":
            _refuse(f"kind={self.kind!r}", "kind is score or loss")
        for name in ("labels_N", "coef_N", "anchor_coef_N", "behaviour_logprob_N"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (n,):
                _refuse(f"{name} of shape {tuple(value.shape)} for {n} loss positions", f"{name} has one entry each")
        for name, signal in (("teacher", self.teacher), ("anchor", self.anchor)):
            if signal is not None and len(signal) != n:
                _refuse(f"{name} signal at {len(signal)} of {n} loss positions", "a signal has one entry a position")
        self._check_loss()
        if self.teacher is not None and self.teacher.form == "exact":
            own = self.teacher.head_id == "student"
            if own != (self.teacher_weight_VH is None):
                _refuse(
                    f"teacher under head {self.teacher.head_id!r} {'with' if own else 'without'} a weight of its own",
                    "head_id 'student' uses this head's weight; any other teacher brings teacher_weight_VH",
                )
        elif self.teacher_weight_VH is not None:
            _refuse("teacher_weight_VH without an exact teacher", "only hidden states need a vocabulary weight")
        if self.anchor is not None and (self.anchor.head_id == "student") != (self.anchor_weight_VH is None):
            _refuse(
                f"anchor under head {self.anchor.head_id!r} {'with' if self.anchor_weight_VH is not None else 'without'} a weight",
                "the anchor is the student's own base: head_id 'student', or another one with the base's anchor_weight_VH",
            )
        if self.anchor is None and self.anchor_weight_VH is not None:
            _refuse("anchor_weight_VH without an anchor", "only hidden states need a vocabulary weight")
        vocab = weight_VH.shape[0]
        if weight_VH.dtype == torch.float16:
            _refuse(
                "a vocabulary weight in float16",
                "the gradient is made in its dtype in the forward pass, where no loss scaler reaches: it would underflow to 0",
            )
        for name, other_VH in (("teacher", self.teacher_weight_VH), ("anchor", self.anchor_weight_VH)):
            if other_VH is not None and other_VH.shape[0] != vocab:
                _refuse(
                    f"{name} vocabulary of {other_VH.shape[0]} entries, student of {vocab}",
                    "student and teacher share one vocabulary, entry by entry",
                )
        given = self.teacher is not None and self.teacher.ids_NK is not None
        if n and (self.loss.support == "signal" or (self.loss.sampled and given)):
            assert self.teacher is not None and self.teacher.ids_NK is not None and self.labels_N is not None
            assert self.teacher.logprobs_NK is not None and self.teacher.tail_N is not None and self.coef_N is not None
            device = self.teacher.ids_NK.device
            support.check_ids(self.teacher.ids_NK, self.labels_N.to(device), vocab)
            support.check_mass(self.teacher.logprobs_NK, self.teacher.tail_N, (self.coef_N != 0).to(device))

    def _check_loss(self) -> None:
        """The parts that the divergence needs are there, and no other."""
        name, form = self.loss.divergence, self.teacher.form if self.teacher is not None else None
        if (self.anchor is None) != (self.anchor_coef_N is None):
            _refuse("an anchor with a signal or coefficients only", "a signal and its coefficients come together")
        if name == "nll":
            if self.teacher is not None or self.anchor is not None or self.coef_N is None:
                _refuse("nll with a teacher or an anchor, or without coefficients", "nll takes labels and coefficients")
        elif (self.teacher is None) != (self.coef_N is None):
            _refuse("a teacher with a signal or coefficients only", "a signal and its coefficients come together")
        elif self.teacher is None and self.anchor is None:
            _refuse("a loss task with neither teacher nor anchor", "there is nothing to measure a divergence from")
        if (self.loss.needs_labels or self.policy) and self.labels_N is None:
            _refuse(
                f"{name} with support {self.loss.support}, policy={self.policy}, without labels_N",
                "it needs the sampled tokens",
            )
        if (self.behaviour_logprob_N is not None) != (name == "policy_gradient"):
            _refuse(f"behaviour_logprob_N and divergence {name}", "policy_gradient needs it, and nothing else uses it")
        if (self.loss.support == "signal") != (form == "support" and not self.loss.sampled):
            _refuse(f"support={self.loss.support} with a teacher signal of form {form}", "'signal' goes with that form")
        if form == "sampled" and not self.loss.sampled:
            _refuse(f"{name} from a sampled signal", "an analytic divergence needs an exact or a support signal")


def _refuse(what: str, rule: str) -> None:
    raise OpsdError(what, rule, "build the HeadTask as its docstring says")


class LossPositionHead(nn.Linear):
    """``nn.Linear`` without a task; with one, see :class:`HeadTask`."""

    task: HeadTask | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., V] without a task; [1, N, H] for ``score``; [1, 1, 1] float for ``loss``.

        Raises:
            OpsdError: the task contradicts itself or this head.
        """
        task = self.task
        if task is None:
            return super().forward(x)
        if torch.compiler.is_compiling():
            # One stated graph break. The compiler sees nothing of the task, or it would compile anew for every step's. A decorator
            # would import the compiler for everybody.
            return torch.compiler.disable(self._with_task)(x, task)
        return self._with_task(x, task)

    def _with_task(self, x: Tensor, task: HeadTask) -> Tensor:
        task.check(self.weight)
        if task.kind == "score":
            return x.reshape(-1, x.shape[-1]).index_select(0, task.index_N)[None]
        with torch.autocast(x.device.type, enabled=False):
            flat_MH = x.reshape(-1, x.shape[-1])
            loss, *values = _ChunkedLoss.apply(flat_MH, self.weight, task, torch.is_grad_enabled())
        named = dict(zip(_VALUES, values, strict=True))
        task.result = HeadResult(**{k: v.detach() for k, v in named.items()})
        if task.policy:
            task.log_probs_N, task.entropy_N = named["student_logprob_N"], named["entropy_N"]
        return loss.reshape(1, 1, 1)


_VALUES = tuple(f.name for f in fields(HeadResult))


class _ChunkedLoss(torch.autograd.Function):
    """Sum over chunks of the weighted divergences; gradients are made in forward, and scaled in backward. Those of log-probabilities
    and entropy, which depend on what follows, are made in backward."""

    @staticmethod
    def forward(ctx: Any, flat_MH: Tensor, weight_VH: Tensor, task: HeadTask, grad_enabled: bool) -> Any:
        need_hidden = grad_enabled and ctx.needs_input_grad[0]
        need_weight = grad_enabled and ctx.needs_input_grad[1]
        n = task.index_N.numel()
        device = weight_VH.device
        dtype = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        given_VH, weight_VH = weight_VH, weight_VH.detach()
        losses: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {k: [] for k in _VALUES}
        grad_hidden_NH = weight_VH.new_zeros(n, weight_VH.shape[1]) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if need_weight else None
        index_N = task.index_N.to(device)
        size = default_rows(task, weight_VH) if task.chunk is None else task.chunk
        for start in range(0, n, size):
            rows = slice(start, min(start + size, n))
            hidden_CH = flat_MH.index_select(0, index_N[rows]).to(weight_VH.dtype)
            chunk = ChunkInput.cut(task, rows, hidden_CH, weight_VH, dtype, need_hidden or need_weight)
            out: ChunkOutput = chunk_loss(chunk, task.loss)
            losses.append(out.loss)
            for name, part in parts.items():
                value = getattr(out, name.removesuffix("_N") + "_C")
                if value is not None:
                    part.append(value)
            if out.grad_CV is None:
                continue
            if grad_hidden_NH is not None:
                torch.mm(out.grad_CV, weight_VH, out=grad_hidden_NH[rows])
            if grad_weight_VH is not None:
                # 0 * NaN is NaN: a masked position's hidden state must not reach the weight's gradient.
                used_C1 = (out.grad_CV != 0).any(-1, keepdim=True)
                _add_product(grad_weight_VH, out.grad_CV, torch.where(used_C1, hidden_CH, 0.0))
            del out  # its gradient would lie beside the next chunk's logits
        total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=dtype, device=device)
        unknown_N = torch.full((n,), torch.nan, dtype=dtype, device=device)
        values = {k: torch.cat(part).to(dtype) if part else unknown_N.clone() for k, part in parts.items()}
        ctx.policy = task.policy and (need_hidden or need_weight)
        again: tuple[Tensor | None, ...] = (None, None, None)
        if ctx.policy:
            assert task.labels_N is not None
            again = (flat_MH.index_select(0, index_N).to(weight_VH.dtype), given_VH, task.labels_N.to(device))
        ctx.save_for_backward(index_N, grad_hidden_NH, grad_weight_VH, *again)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.chunk = dtype, min(size, ROWS)
        ctx.weight_dtype, ctx.flat_shape, ctx.flat_dtype = weight_VH.dtype, flat_MH.shape, flat_MH.dtype
        differentiable = ("student_logprob_N", "entropy_N") if ctx.policy else ()
        ctx.mark_non_differentiable(*(v for k, v in values.items() if k not in differentiable))
        return total, *values.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *grad_values: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        index_N, grad_hidden_NH, grad_weight_VH, hidden_NH, weight_VH, labels_N = ctx.saved_tensors
        scale = 0.0 if grad_loss is None else grad_loss
        grad_hidden_NH = None if grad_hidden_NH is None else grad_hidden_NH * scale
        grad_weight_VH = None if grad_weight_VH is None else grad_weight_VH * scale
        by_value = dict(zip(_VALUES, grad_values, strict=True))
        if ctx.policy and (by_value["student_logprob_N"] is not None or by_value["entropy_N"] is not None):
            zero_N = torch.zeros(len(index_N), dtype=ctx.dtype, device=index_N.device)
            by_logprob_N, by_entropy_N = (
                zero_N if by_value[k] is None else by_value[k] for k in ("student_logprob_N", "entropy_N")
            )
            by = (by_logprob_N, by_entropy_N)
            _add_policy_gradient(hidden_NH, weight_VH, labels_N, *by, ctx.chunk, ctx.dtype, grad_hidden_NH, grad_weight_VH)
        grad_flat_MH = None
        if grad_hidden_NH is not None:
            grad_flat_MH = torch.zeros(ctx.flat_shape, dtype=ctx.flat_dtype, device=grad_hidden_NH.device)
            grad_flat_MH.index_add_(0, index_N, grad_hidden_NH.to(ctx.flat_dtype))
        return grad_flat_MH, None if grad_weight_VH is None else grad_weight_VH.to(ctx.weight_dtype), None, None


def _add_policy_gradient(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    by_logprob_N: Tensor,
    by_entropy_N: Tensor,
    chunk: int,
    dtype: torch.dtype,
    grad_hidden_NH: Tensor | None,
    grad_weight_VH: Tensor | None,
) -> None:
    """Adds the gradient of ``sum by_logprob log p(label) + sum by_entropy H(p)``; a position where both are 0 adds exactly 0.

    By the logits s, with p = softmax(s): d log p_y / ds_v = [v = y] - p_v, and dH / ds_v = -p_v (log p_v + H).
    """
    weight_VH = weight_VH.detach()
    for start in range(0, len(labels_N), chunk):
        rows = slice(start, start + chunk)
        logp_CV = torch.log_softmax(logits(hidden_NH[rows], weight_VH, dtype), dim=-1)
        p_CV = logp_CV.exp()
        entropy_C1 = -(p_CV * logp_CV).sum(-1, keepdim=True)
        by_logprob_C1, by_entropy_C1 = by_logprob_N[rows, None].to(dtype), by_entropy_N[rows, None].to(dtype)
        used_C1 = (by_logprob_C1 != 0) | (by_entropy_C1 != 0)
        by_logp_CV = torch.where(by_entropy_C1 == 0, 0.0, -by_entropy_C1 * p_CV * (logp_CV + entropy_C1))
        by_logp_CV.scatter_add_(1, labels_N[rows, None], by_logprob_C1)
        grad_CV = through_softmax(by_logp_CV, logp_CV).to(weight_VH.dtype)
        if grad_hidden_NH is not None:
            grad_hidden_NH[rows] += grad_CV @ weight_VH
        if grad_weight_VH is not None:
            _add_product(grad_weight_VH, grad_CV, torch.where(used_C1, hidden_NH[rows], 0.0))


#: Vocabulary rows of one product into the weight's gradient.
_BLOCK = 32768


def _add_product(grad_weight_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """Adds ``grad.T @ hidden``, accumulated in the dtype of the sum; some vocabulary rows at a time, since a product has its size."""
    for part_VH, part_CV in zip(grad_weight_VH.split(_BLOCK), grad_CV.split(_BLOCK, dim=1), strict=True):
        part_VH += matmul(part_CV.T, hidden_CH, grad_weight_VH.dtype)


def install_head(module: nn.Module) -> LossPositionHead:
    """Swaps the class of the model's output embeddings to :class:`LossPositionHead`; before PEFT and FSDP.

    Args:
        module: a causal LM with ``get_output_embeddings()``.

    Raises:
        OpsdError: the output embeddings are not exactly ``nn.Linear`` (an adapter's wrapper, a quantised layer) or
            carry a bias.
    """
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, LossPositionHead):
        return head
    if type(head) is not nn.Linear:
        raise OpsdError(
            f"output embeddings of type {type(head).__module__}.{type(head).__qualname__}",
            "the head is installed on a plain nn.Linear; under an adapter its forward would miss the adapter's delta",
            "install the head before PEFT and FSDP, and leave lm_head out of target_modules",
        )
    if head.bias is not None:
        raise OpsdError(
            "output embeddings with a bias",
            "the loss is computed from hidden states and the weight alone",
            "use a head without bias",
        )
    head.__class__ = LossPositionHead
    return head
