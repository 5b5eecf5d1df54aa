"""Which kernels a model runs on: chosen from what is installed, printed, and checked against the definition before any training.

Suffixes: B batch, T tokens, A heads, D head dimension, H hidden size.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from packaging.version import Version
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from verl_opsd.errors import OpsdError
from verl_opsd.models import attention, remade
from verl_opsd.models.gated_delta import FlaKernels, GatedDeltaNet, Kernels, ReferenceKernels, TorchKernels
from verl_opsd.models.lora import FusedLoraLinear

#: Largest relative error of a layer's output and gradients against the float32 definition, by dtype.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
#: Lengths of the two packed sequences of the check: more than a chunk of 64, not a multiple of it, so that a boundary lies inside one.
CHECK_LENGTHS = (97, 75)


@dataclass(frozen=True)
class Facts:
    """What the choice depends on. Versions are None where a package is missing."""

    cuda: bool
    hopper: bool
    triton: str | None
    fla: str | None
    liger: str | None
    tilelang: bool

    @classmethod
    def of_this_process(cls, device: torch.device | str = "cuda") -> Facts:
        """Reads them off the installed packages and the current device; a model on the host has no kernels of an accelerator."""
        cuda = torch.cuda.is_available() and torch.device(device).type == "cuda"
        return cls(
            cuda=cuda,
            hopper=cuda and torch.cuda.get_device_capability() == (9, 0),
            triton=_version("triton"),
            fla=_version("fla-core"),
            liger=_version("liger-kernel"),
            tilelang=importlib.util.find_spec("tilelang") is not None,
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Choice:
    """Kernels of a model, and why.

    Attributes:
        delta: of the delta rule, its convolution and its gated norm.
        norm, mlp: of RMS norms and of SiLU(gate) * up.
        trains: whether gradients through ``delta`` can be right; False refuses training, not scoring.
        why: one reason for each part that is not the fastest known.
    """

    delta: Literal["fla", "torch"]
    norm: Literal["liger", "torch"]
    mlp: Literal["triton", "torch"]
    trains: bool
    why: tuple[str, ...]

    def fuses(self, config: Any) -> bool:
        """Whether the layers of a model with this configuration run on these kernels and none of transformers'."""
        hybrid = "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
        return hybrid and (self.delta, self.norm, self.mlp) == ("fla", "liger", "triton")

    def __str__(self) -> str:
        text = f"delta rule, convolution and gated norm: {self.delta}; norms: {self.norm}; gated MLP: {self.mlp}; LoRA: fused"
        return "; ".join([text, *self.why])


#: Of an accelerator with everything installed.
FASTEST = Choice("fla", "liger", "triton", True, ())


def choose(facts: Facts) -> Choice:
    """The kernels for a machine. No part is ever a wrong one; a slow one says so in ``why``."""
    if not facts.cuda:
        return Choice("torch", "torch", "torch", True, ("no accelerator: every part in torch",))
    why, trains = [], True
    liger = facts.liger is not None and facts.triton is not None
    if not liger:
        why.append("liger-kernel is not installed: norms and gates in torch")
    ready = liger and facts.fla is not None
    if not ready:
        why.append(
            "flash-linear-attention and liger-kernel are not both installed: the delta rule in torch is more than ten times slower"
        )
    elif facts.hopper and not facts.tilelang and Version("3.4.0") <= Version(str(facts.triton)) < Version("3.7.1"):
        trains = False
        why.append(f"Triton {facts.triton} computes wrong gradients of the gated delta rule on Hopper: scoring only")
    return Choice(
        "fla" if ready else "torch", "liger" if liger else "torch", "triton" if liger else "torch", trains, tuple(why)
    )


class LigerNorm(qwen3_5.Qwen3_5RMSNorm):
    """RMS norm with weight 1 + w, in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """As transformers'."""
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return LigerRMSNormFunction.apply(x, weight, self.eps, 1.0, "gemma", False)  # type: ignore[no-any-return]

        return remade.note(normed(x, self.weight), normed, x, self.weight)


class GatedMLP(qwen3_5.Qwen3_5MLP):
    """SiLU(gate) * up in one kernel; the product is made again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """As transformers'."""
        from verl_opsd.models.gates_triton import SiluProduct

        gate, up = self.gate_proj(x), self.up_proj(x)
        # down_proj's backward makes its input again before that of the product writes its gradients over gate and up.
        product = remade.note(SiluProduct.apply(gate, up), SiluProduct.apply, gate, up)
        del gate, up
        return self.down_proj(product)  # type: ignore[no-any-return]


class GatedAttention(qwen3_5.Qwen3_5Attention):
    """transformers' attention, whose output is multiplied by its gate where the attention left it and not in a copy; the product is made
    again in backward."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers'."""
        batch, tokens, _ = hidden_states.shape
        heads = (batch, tokens, -1, self.head_dim)
        query, gate = self.q_proj(hidden_states).view(batch, tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
        query = self.q_norm(query).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = qwen3_5.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = qwen3_5.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, qwen3_5.eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        out_BTAD, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)

        def gated(open_BTAD: Tensor, out_BTAD: Tensor) -> Tensor:
            return (open_BTAD * out_BTAD).reshape(batch, tokens, -1)

        open_BTAD = gate.sigmoid()
        return self.o_proj(remade.note(gated(open_BTAD, out_BTAD), gated, open_BTAD, out_BTAD)), weights


def is_hybrid(model: nn.Module) -> bool:
    """Whether a model has Qwen3.5's gated linear attention."""
    return any(isinstance(m, qwen3_5.Qwen3_5GatedDeltaNet) for m in model.modules())


def install(model: nn.Module, choice: Choice, kernels: Kernels | None = None) -> None:
    """Swaps the classes of a Qwen3.5 model's layers; before adapters and sharding. Parameters and their names stay; other models stay.

    Args:
        kernels: of the delta rule; None: those of ``choice``.

    Raises:
        OpsdError: a hybrid of another activation than SiLU.
    """
    attention.register()
    if not is_hybrid(model):
        return
    others = {m.activation for m in model.modules() if isinstance(m, qwen3_5.Qwen3_5GatedDeltaNet)} - {"silu", "swish"}
    if others:
        raise OpsdError(
            f"a Qwen3.5 model with hidden_act={', '.join(sorted(map(str, others)))}",
            "gates and convolutions of a hybrid model are SiLU here",
            "use a model with hidden_act=silu, as every published Qwen3.5 is",
        )
    kernels = kernels or (FlaKernels() if choice.delta == "fla" else TorchKernels())
    swaps: dict[type, type] = {qwen3_5.Qwen3_5GatedDeltaNet: GatedDeltaNet}
    if choice.norm == "liger":
        swaps[qwen3_5.Qwen3_5RMSNorm] = LigerNorm
    if choice.mlp == "triton":
        swaps[qwen3_5.Qwen3_5MLP] = GatedMLP
        swaps[qwen3_5.Qwen3_5Attention] = GatedAttention
    for m in model.modules():
        m.__class__ = swaps.get(type(m), type(m))
        if isinstance(m, GatedDeltaNet):
            m.kernels = kernels


def on_host(model: nn.Module) -> None:
    """Puts a model, and a hybrid's layers with their own code in torch, on the host: beside an accelerator transformers gives them
    kernels of flash-linear-attention, which read no memory of the host. For models that run as transformers has them."""
    model.to("cpu")
    for m in model.modules():
        if isinstance(m, qwen3_5.Qwen3_5GatedDeltaNet):
            m.causal_conv1d_fn = None
            for name in ("causal_conv1d_update", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
                setattr(m, name, inspect.unwrap(getattr(qwen3_5, f"torch_{name}")))
            norm, m.norm = m.norm, qwen3_5.Qwen3_5RMSNormGated(m.head_v_dim, eps=m.layer_norm_epsilon)
            m.norm.weight = norm.weight


def fuse_adapters(model: nn.Module) -> None:
    """Swaps PEFT's linear layers for :class:`FusedLoraLinear`; after PEFT, before sharding."""
    for m in model.modules():
        if type(m) is Linear and type(m.base_layer) is nn.Linear:
            m.__class__ = FusedLoraLinear
    for m in model.modules():
        if isinstance(m, qwen3_5.Qwen3_5DecoderLayer) and isinstance(m.mlp.down_proj, FusedLoraLinear):
            m.mlp.down_proj.ends_layer = True


def check(config: Any, device: torch.device | str, dtype: torch.dtype, kernels: Kernels) -> dict[str, float]:
    """Relative errors of one layer of the model's own shapes, with random weights, against the definition in float32.

    Returns:
        ``output``, ``gradient`` of the input, and ``packed``: the output of two packed sequences against each alone.
    """
    layer = config.layer_types.index("linear_attention")
    generator = torch.Generator(device).manual_seed(0)
    exact: Any = qwen3_5.Qwen3_5GatedDeltaNet(config, layer).to(device, torch.float32).requires_grad_(False)
    for name, p in exact.named_parameters():
        scale = p[0].numel() ** -0.5 if p.dim() > 1 else 0.5
        p.normal_(0.0, scale, generator=generator)
        if name == "norm.weight":
            p.add_(1.0)
    rounded = [p.to(dtype).float() for p in exact.parameters()]
    ours: Any = qwen3_5.Qwen3_5GatedDeltaNet(config, layer).to(device, dtype).requires_grad_(False)
    for p, mine, value in zip(exact.parameters(), ours.parameters(), rounded, strict=True):
        p.copy_(value)
        mine.copy_(value)
    for module, its in ((exact, ReferenceKernels()), (ours, kernels)):
        module.__class__, module.kernels = GatedDeltaNet, its
    total = sum(CHECK_LENGTHS)
    x_TH = torch.randn(1, total, config.hidden_size, device=device, generator=generator).to(dtype)
    weight_TH = torch.randn(1, total, config.hidden_size, device=device, generator=generator).to(dtype)
    cu = torch.tensor([0, CHECK_LENGTHS[0], total], device=device)
    results = []
    for module, leaf in ((exact, x_TH.float()), (ours, x_TH.clone())):
        leaf.requires_grad_()
        out = module(leaf, cu_seq_lens_q=cu)
        (grad,) = torch.autograd.grad((out * weight_TH.to(out.dtype)).sum(), leaf)
        results.append((out.detach().float(), grad.float()))
    with torch.no_grad():
        alone = torch.cat([ours(part) for part in x_TH.split(CHECK_LENGTHS, dim=1)], dim=1).float()
    (want, want_grad), (out, grad) = results
    return {"output": relative(out, want), "gradient": relative(grad, want_grad), "packed": relative(out, alone)}


def relative(a: Tensor, b: Tensor) -> float:
    """norm(a - b) / norm(b)."""
    return float((a - b).norm() / b.norm())


def require(config: Any, device: torch.device | str, dtype: torch.dtype, choice: Choice) -> dict[str, float]:
    """:func:`check` of the chosen kernels; before any training.

    Raises:
        OpsdError: the kernels are known or measured to be wrong here.
    """
    way_out = "install triton>=3.7.1, or tilelang beside flash-linear-attention"
    if not choice.trains:
        raise OpsdError("; ".join(choice.why), "a wrong gradient is never trained on", way_out)
    errors = check(config, device, dtype, FlaKernels() if choice.delta == "fla" else TorchKernels())
    wrong = [f"{k} {v:.2g}" for k, v in errors.items() if not v <= TOLERANCE[dtype]]
    if wrong:
        raise OpsdError(
            f"{choice.delta} kernels of the gated delta rule differ from their definition: {', '.join(wrong)}",
            f"a layer agrees with float32 within {TOLERANCE[dtype]:g} ({dtype})",
            way_out,
        )
    return errors


def cumulative(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """int64[n + 1] where packed sequences begin, and their sum: the ``cu_seq_lens_q`` of a forward."""
    return torch.tensor([0, *lengths], device=device).cumsum(0)
