"""What a kept layer's backward makes again instead of keeping: the gradient is the same bit for bit, and so many bytes less wait for it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from verl_opsd.models import checkpointing, kernels, remade, scoring
from verl_opsd.models.attention import ATTENTION
from verl_opsd.models.gated_delta import FlaKernels, TorchKernels
from verl_opsd.planning.shape import TARGETS, ModelShape

TOKENS = 37


class Norm(torch.autograd.Function):
    """Liger's norm in torch: it saves its input, and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Tensor:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return (x.float() * rstd * (offset + weight.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        m, n = grad.float() * (ctx.offset + weight.float()), x.float() * rstd
        return (rstd * (m - n * (m * n).mean(-1, keepdim=True))).to(x.dtype), None, None, None, None, None


class Gate(torch.autograd.Function):
    """SiLU(a) * b in torch; as on a GPU its backward writes the gradients over a and b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (torch.nn.functional.silu(a.float()) * b.float()).to(b.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        s, g = torch.sigmoid(a.float()), grad.float()
        to_a, to_b = g * b.float() * (s + a.float() * s * (1 - s)), g * a.float() * s
        a.data.copy_(to_a)
        b.data.copy_(to_b)
        return a, b


class Fla(FlaKernels):
    """Everything in torch."""

    conv = staticmethod(TorchKernels.conv)  # type: ignore[assignment]
    gated_norm = staticmethod(TorchKernels.gated_norm)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.delta = TorchKernels().delta  # type: ignore[method-assign]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hybrid of four layers, adapted, on the kernels of a GPU as far as they matter here; bf16, adapters in float32."""
    for name, held in (
        ("liger_kernel", {}),
        ("liger_kernel.ops", {}),
        ("liger_kernel.ops.rms_norm", {"LigerRMSNormFunction": Norm}),
        ("verl_opsd.models.gates_triton", {"SiluProduct": Gate}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, name, module)
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=31,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=24,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=28,
        tie_word_embeddings=False,
    )
    base = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").requires_grad_(False)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=list(TARGETS))).train()
    for k, p in adapted.named_parameters():
        if p.requires_grad:
            p.data = p.data.float()
        if "lora_B" in k:
            p.data.normal_(0.0, 0.05)
    kernels.install(adapted, kernels.Choice("fla", "liger", "triton", True, ()), Fla())
    kernels.fuse_adapters(adapted)
    base.set_attn_implementation(ATTENTION)
    base.enable_input_require_grads()  # so that the first layer keeps what the others do
    return adapted


def step(model: Any, keep: tuple[bool, ...]) -> tuple[list[Tensor], int]:
    """Gradients, and bytes of activations that wait for backward, each storage once."""
    checkpointing.apply(model, checkpointing.Plan(keep))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model.zero_grad()
    ids = torch.arange(TOKENS)[None] % 31
    with torch.autocast("cpu", dtype=torch.bfloat16), saved_tensors_hooks(pack, lambda t: t):
        out = model(input_ids=ids, use_cache=False).logits
    waiting = sum(t.untyped_storage().nbytes() for t in storages.values())
    out.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], waiting


@pytest.mark.parametrize("keep", [(True,) * 4, (True, False, False, True), (False,) * 4])
def test_gradients_are_the_same_bit_for_bit_and_fewer_bytes_wait(
    model: Any, keep: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of two bytes each: the MLP's input (40) and product (72) of a kept layer, and an attention's input (40) and gated output (48)."""
    grads, waiting = step(model, keep)
    with monkeypatch.context() as patch:
        patch.setattr(remade, "waits", lambda: False)
        want, saved = step(model, keep)
    assert len(grads) == len(want) == 2 * (4 * 3 + 4) and all(float(g.abs().max()) > 0 for g in want)
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))
    kinds = model.get_base_model().config.layer_types
    less = {"linear_attention": 2 * (40 + 72), "full_attention": 2 * (40 + 72 + 40 + 48)}
    assert saved - waiting == TOKENS * sum(less[kind] for kind, kept in zip(kinds, keep, strict=True) if kept)
    shape = ModelShape.of(model.get_base_model().config)
    assert {kind: shape.saved_bytes(kind) - shape.kept_bytes(kind) for kind in less} == less  # type: ignore[arg-type]


def test_the_gradient_is_that_of_the_definition(model: Any) -> None:
    """Against transformers' layers and PEFT's adapters in float64, on the same weights; bf16's rounding is what is left."""
    grads, _ = step(model, (True,) * 4)
    config = model.get_base_model().config
    base = Qwen3_5ForCausalLM._from_config(config, dtype=torch.float64, attn_implementation="eager").requires_grad_(False)
    exact = get_peft_model(base, LoraConfig(r=2, target_modules=list(TARGETS))).train().double()
    exact.load_state_dict(model.state_dict())
    out = exact(input_ids=torch.arange(TOKENS)[None] % 31, use_cache=False).logits
    out.square().sum().backward()
    want = [p.grad for p in exact.parameters() if p.grad is not None]
    flat, exactly = (torch.cat([g.flatten().double() for g in gs]) for gs in (grads, want))
    assert float(torch.cosine_similarity(flat, exactly, dim=0)) > 0.999


@torch.no_grad()
def test_nothing_is_noted_where_there_is_no_gradient(model: Any) -> None:
    noted: list[Tensor] = []
    model.get_base_model().model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: noted.append(args[0]))
    model(input_ids=torch.arange(TOKENS)[None] % 31, use_cache=False)
    assert remade.recipe(noted[0]) == (None, (noted[0],))


def test_attention_that_scores_takes_the_place_of_attention_that_trains(model: Any) -> None:
    base = model.get_base_model()
    assert type(base.model.layers[3].self_attn) is kernels.GatedAttention
    scoring.install(base)
    assert type(base.model.layers[3].self_attn) is scoring.ScoringAttention
