"""An FP8 teacher: matrix products in e4m3 with one scale a token and one an output channel; and when it may be trusted.

Halves the weights and nearly doubles the rate of the products. Its error is a divergence of its own, in the same nats as the signal, so
it is measured on the same positions and refused where the signal does not stand far above it.

Suffixes: M tokens, I in features, O out features, N positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from verl_opsd.distill.divergence import reverse_kl
from verl_opsd.errors import OpsdError
from verl_opsd.models.attention import uses_triton
from verl_opsd.models.kernels import is_hybrid

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
#: Compute capability from which a CUDA device multiplies e4m3.
CAPABILITY = (8, 9)
#: Products with a smaller side gain nothing.
SMALLEST = 256
#: Products of one input.
SHARED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
#: How far the conditioning signal stands above the error of the precision, at every statistic of :data:`STATISTICS`.
FACTOR = 10.0
#: Positions below which the 99th percentile is no more than the largest of a few.
POSITIONS = 100
#: Statistics of per-position divergences that are compared; the names are the telemetry's.
STATISTICS = ("mean", "median", "p90", "p99")


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values, float32 scale [M, 1]) of rows; value * scale is the row to within one part in 16 of each entry."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x.float() / scale).to(E4M3), scale


def rounded(x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`quantize` of the rows [M, I] of [..., I]; with ``up`` of SiLU(x) * up."""
    x, up = x.reshape(-1, x.shape[-1]), None if up is None else up.reshape(-1, x.shape[-1])
    if uses_triton(x):
        from verl_opsd.teachers import fp8_triton

        return fp8_triton.quantize(x, up)
    return quantize(x if up is None else F.silu(x) * up)


class Input:
    """What several products share: their input, rounded by the first of them and forgotten by the last."""

    def __init__(self, products: int):
        self._products, self._left = products, 0
        self._x: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`rounded`, made anew where it is another tensor than that of the product before."""
        if self._x is not x or self._found is None:
            self._x, self._found, self._left = x, rounded(x), self._products
        found = self._found
        self._left -= 1
        if self._left == 0:
            self._x = self._found = None
        return found


class Fp8Linear(nn.Module):
    """A frozen linear layer without bias whose weight is kept in e4m3.

    Attributes:
        shared: its input, with the other products that read the same.
    """

    weight_OI: Tensor
    scale_1O: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight_OI", weight)
        self.register_buffer("scale_1O", scale.T.contiguous())
        self.shared = Input(1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O] in the dtype of ``x``."""
        return self.product(self.shared.rounded(x), x)

    def product(self, given: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
        """[..., O] of rounded rows, in the dtype and the leading shape of ``like``."""
        x_MI, scale_M1 = given
        if x_MI.is_cuda:
            out = torch._scaled_mm(
                x_MI, self.weight_OI.T, scale_a=scale_M1, scale_b=self.scale_1O, out_dtype=like.dtype, use_fast_accum=True
            )
        else:  # the product of the rounded values, where there is no FP8 unit
            out = ((x_MI.float() * scale_M1) @ (self.weight_OI.float() * self.scale_1O.T).T).to(like.dtype)
        return out.reshape(*like.shape[:-1], -1)


class Fp8MLP(qwen3_5.Qwen3_5MLP):
    """SiLU(gate) * up is rounded as it is made; by a class swap where all three products are :class:`Fp8Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """As transformers'."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj.product(rounded(gate, up), x)


def convert(model: nn.Module) -> int:
    """Puts the large products of a frozen Qwen3.5 model's layers into FP8, in place; embeddings, head, gates and norms stay.

    Returns:
        How many.

    Raises:
        OpsdError: another kind of model, one with adapters or gradients, or a CUDA device that can't multiply e4m3.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        require_device(torch.cuda.get_device_capability(device))
    if not is_hybrid(model) or any(p.requires_grad for p in model.parameters()):
        raise OpsdError(
            f"FP8 for {type(model).__name__}",
            "products of a frozen Qwen3.5 model run in FP8",
            "freeze the model, or keep bf16",
        )
    found = [
        (m, name, child)
        for m in model.modules()
        for name, child in m.named_children()
        if type(child) is nn.Linear and child is not model.get_output_embeddings() and min(child.weight.shape) >= SMALLEST  # type: ignore[operator]
    ]
    for parent, name, child in found:
        setattr(parent, name, Fp8Linear(child))
        child.weight = None  # type: ignore[assignment]
    for parent in {id(parent): parent for parent, *_ in found}.values():
        products = {name: child for name, child in parent.named_children() if isinstance(child, Fp8Linear)}
        for names in SHARED:
            together = [products[name] for name in names if name in products]
            shared = Input(len(together))
            for product in together:
                product.shared = shared
        if isinstance(parent, qwen3_5.Qwen3_5MLP) and len(products) == 3:
            parent.__class__ = Fp8MLP
    return len(found)


def error(exact_NH: Tensor, rounded_NH: Tensor, weight_VH: Tensor, chunk: int = 256) -> dict[str, float]:
    """Reverse KL of the rounded model's distributions from the exact one's, nats: :data:`STATISTICS` and ``max`` over positions."""
    values = []
    for a, b in zip(exact_NH.split(chunk), rounded_NH.split(chunk), strict=True):
        logq, logp = (F.linear(x.to(weight_VH), weight_VH).float().log_softmax(-1) for x in (a, b))
        values.append(reverse_kl(logp, logq).cpu())
    return statistics(torch.cat(values))


def statistics(divergence_N: Tensor) -> dict[str, float]:
    """:data:`STATISTICS` and ``max`` of divergences."""
    value = divergence_N.double()
    at = torch.quantile(value, torch.tensor([0.5, 0.9, 0.99], dtype=value.dtype))
    return {
        "mean": float(value.mean()),
        "median": float(at[0]),
        "p90": float(at[1]),
        "p99": float(at[2]),
        "max": float(value.max()),
    }


def require(measured: Mapping[str, float], signal: Mapping[str, float]) -> None:
    """Whether an FP8 teacher may be used for a signal.

    Args:
        measured: :func:`error` on the states of the run.
        signal: the same statistics of the conditioning signal, KL between the briefed and the unbriefed teacher.

    Raises:
        OpsdError: the signal does not stand :data:`FACTOR` times above the error, or there is none.
    """
    if not max(measured[k] for k in STATISTICS) > 0:
        raise OpsdError(
            "an FP8 teacher without any error",
            "rounding to e4m3 changes something; an error of 0 is that of a model of which nothing was rounded",
            "look at the model: products with a side below 256 stay as they are; keep the teacher in bf16",
        )
    short = [f"{k}: {signal[k]:.2g} against {measured[k]:.2g}" for k in STATISTICS if not signal[k] >= FACTOR * measured[k]]
    if short:
        raise OpsdError(
            f"FP8 teacher, conditioning signal against error in nats: {'; '.join(short)}",
            f"the signal stands {FACTOR:g} times above the error of the precision",
            "keep the teacher in bf16",
        )


def require_device(capability: tuple[int, int] | None) -> None:
    """
    Args:
        capability: of a CUDA device; None: there is none.

    Raises:
        OpsdError: it has no FP8 products.
    """
    if capability is None or capability < CAPABILITY:
        found = "no CUDA device" if capability is None else f"a CUDA device of capability {capability[0]}.{capability[1]}"
        raise OpsdError(
            f"an FP8 teacher on {found}",
            f"products in e4m3 need capability {CAPABILITY[0]}.{CAPABILITY[1]} (Ada, Hopper) or later",
            "leave opsd.teacher.fp8 out",
        )


@dataclass(frozen=True)
class Measured:
    """What a measurement is of.

    Attributes:
        teacher: SHA-256 of the model's files (``cache.model_digest``). dtype: of the exact teacher.
        brief: its name. views: how it is read: placement, user turn, and the limits of windows.
        tasks: dataset and training subset. corpus: SHA-256 of the contract and the scored training episodes of the run that was
            measured (``store.corpus_digest``); None: of a run that has yet to play its own.
    """

    teacher: str
    dtype: str
    brief: str
    views: str
    tasks: str
    corpus: str | None


@dataclass(frozen=True)
class Measurement(Measured):
    """What ``opsd probe --fp8`` found on one run's states.

    Attributes:
        path: the teacher's, for readers. positions: how many.
        error: :func:`error`. signal: :func:`statistics` of KL(teacher without the brief || teacher with it), the exact teacher's, nats.
    """

    path: str
    positions: int
    error: dict[str, float]
    signal: dict[str, float]

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Measurement:
    """A file that :meth:`Measurement.write` wrote.

    Raises:
        OpsdError: there is none, or it is something else.
    """
    try:
        found = Measurement(**json.loads(path.read_text()))
        numbers = [*(found.error[k] for k in STATISTICS), *(found.signal[k] for k in STATISTICS), found.positions]
        if not all(type(v) in (int, float) and 0 <= v < math.inf for v in numbers) or type(found.positions) is not int:
            raise ValueError("a number below 0 or infinite, or none")
        if not all(
            isinstance(getattr(found, f.name), str) for f in fields(found) if f.name not in ("positions", "error", "signal")
        ):
            raise ValueError("a field that says what was measured is no text")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OpsdError(
            f"opsd.teacher.fp8={path}: {error}",
            "FP8 is used where its error was measured on a run's states, beside the signal",
            "measure it: opsd probe RUN --teacher MODEL --fp8",
        ) from error
    return found


def views_of(placement: str, user_turn: str, max_view_tokens: int | None, window_context: int | None) -> str:
    """``Measured.views``: what decides which ids a teacher reads, beside the brief."""
    turn = f", user turn {user_turn}" if placement == "last_user" else ""
    windows = "" if window_context is None else f", windows of {max_view_tokens} tokens after at least {window_context}"
    return f"{placement}{turn}{windows}"


def require_measured(found: Measurement, run: Measured, path: str) -> None:
    """:func:`require`, for what a run uses.

    Args:
        run: without ``corpus`` where it plays its own episodes. path: of its teacher, for the error.

    Raises:
        OpsdError: the measurement is of something else, which is named, of fewer than :data:`POSITIONS`, or the signal does not stand far enough above
            the error.
    """
    names = [f.name for f in fields(Measured) if f.name != "corpus" or run.corpus is not None]
    pairs = {n: (getattr(found, n), getattr(run, n)) for n in names}
    shown = {n: (f"{a} ({found.path})", f"{b} ({path})") if n == "teacher" else (a, b) for n, (a, b) in pairs.items()}
    different = [f"{n} {shown[n][0]}, the run has {shown[n][1]}" for n, (a, b) in pairs.items() if a != b]
    if found.positions < POSITIONS:
        different.append(f"{found.positions} positions, at least {POSITIONS} are needed for its 99th percentile")
    if different:
        raise OpsdError(
            f"an FP8 measurement of {'; '.join(different)}",
            "the error and the signal are those of the run's own teacher in bfloat16, its brief and its tasks or corpus",
            "measure it: opsd probe RUN --teacher MODEL --fp8 --dtype bfloat16",
        )
    require(found.error, found.signal)
