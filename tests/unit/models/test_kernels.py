"""Kernels of a hybrid model: packed = alone, parts with carried state = one pass, the choice, and the check that refuses a wrong one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from verl_opsd.errors import OpsdError
from verl_opsd.models import attention, kernels
from verl_opsd.models.attention import ATTENTION
from verl_opsd.models.gated_delta import CarriedState, ReferenceKernels, TorchKernels

CPU = kernels.choose(kernels.Facts(False, False, None, None, None, False))


def config(layers: int = 4) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The same weights in transformers' code, and in ours."""
    kernels.attention.register()
    torch.manual_seed(0)
    theirs = modeling_qwen3_5.Qwen3_5ForCausalLM._from_config(config(), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0.0, 0.3 if p.dim() == 1 else p[0].numel() ** -0.5)
    ours = modeling_qwen3_5.Qwen3_5ForCausalLM._from_config(config(), attn_implementation=ATTENTION, dtype=torch.float32).eval()
    ours.load_state_dict(theirs.state_dict())
    kernels.install(ours, CPU)
    return theirs, ours


IDS = torch.randint(97, (1, 150), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("late", [1, 40, 149])
def test_attention_over_carried_keys_in_two_parts_is_the_definition(late: int) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (3 * torch.randn(2, heads, n, 16, generator=g) for heads, n in ((4, late), (2, 150), (2, 150)))

    def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> attention.Attended:
        scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v.double().repeat_interleave(2, 1), scores.logsumexp(-1)

    whole = torch.zeros(2, 4, 150, 16)
    whole[:, :, -late:] = query
    want = by_definition(whole, key, value, True)[0][:, :, -late:]
    torch.testing.assert_close(attention.in_two(query, key, value, by_definition), want.float())


@pytest.mark.parametrize("late", [1, 40, 149])
def test_two_parts_in_bf16_are_rounded_when_they_are_made_and_when_they_are_joined(late: int) -> None:
    """bf16 rounds numbers of all sizes by 1.7e-3 of their norm; twice is 2.4e-3. A share in bf16 would add more than as much again."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 8, n, 256, generator=g).bfloat16() for n in (late, 150, 150))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> attention.Attended:
        scores = q.double() @ k.double().mT / 16
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) @ v.double()).bfloat16(), scores.logsumexp(-1).float()

    scores = query.double() @ key.double().mT / 16
    later = torch.ones(late, 150, dtype=torch.bool).triu(151 - late)
    want = scores.masked_fill(later, -torch.inf).softmax(-1) @ value.double()
    assert (attention.in_two(query, key, value, attend).double() - want).norm() < 3e-3 * want.norm()


@torch.no_grad()
def test_one_sequence_is_transformers_and_packed_is_alone(models: tuple[Any, Any]) -> None:
    theirs, ours = models
    lengths = [70, 3, 77]
    want = torch.cat([theirs(x, use_cache=False).logits for x in IDS.split(lengths, dim=1)], dim=1)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = ours(IDS, position_ids=places, cu_seq_lens_q=kernels.cumulative(lengths, "cpu"), use_cache=False).logits
    torch.testing.assert_close(packed, want, rtol=1e-3, atol=3e-4)
    whole = ours(IDS, use_cache=False).logits
    torch.testing.assert_close(whole, theirs(IDS, use_cache=False).logits, rtol=1e-3, atol=3e-4)
    assert (whole - packed)[:, 71:].abs().max() > 1e-2  # boundaries matter


@pytest.mark.parametrize("lengths", [(1, 63, 64, 65), (64, 64), (1, 1, 1, 2), (130, 1, 2, 3)])
def test_the_gradient_of_packed_sequences_is_that_of_each_alone(models: tuple[Any, Any], lengths: tuple[int, ...]) -> None:
    """Lengths around a chunk of 64 and below the convolution's width; every parameter."""
    theirs, ours = models
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(97, (1, sum(lengths)), generator=generator)
    weight = torch.randn(1, sum(lengths), 97, generator=generator)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([theirs(x, use_cache=False).logits for x in ids.split(lengths, dim=1)], dim=1)
    packed = ours(ids, position_ids=places, cu_seq_lens_q=kernels.cumulative(lengths, "cpu"), use_cache=False).logits
    grads = [torch.autograd.grad((x * weight).sum(), m.parameters()) for x, m in ((packed, ours), (alone, theirs))]
    for got, want in zip(*grads, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm() + 1e-6


@pytest.mark.parametrize("sizes", [(150,), (75, 75), (1, 2, 64, 83), (149, 1)])
@torch.no_grad()
def test_parts_with_carried_state_are_one_pass(models: tuple[Any, Any], sizes: tuple[int, ...]) -> None:
    theirs, ours = models
    state, out, at = CarriedState(), [], 0
    for n in sizes:
        places = torch.arange(at, at + n)[None]
        out.append(ours(IDS[:, at : at + n], position_ids=places, past_key_values=state, use_cache=True).logits)
        at += n
    torch.testing.assert_close(torch.cat(out, dim=1), theirs(IDS, use_cache=False).logits, rtol=1e-3, atol=3e-4)


@torch.no_grad()
def test_a_fork_leaves_its_trunk_as_it_was(models: tuple[Any, Any]) -> None:
    theirs, ours = models
    trunk = CarriedState()
    ours(IDS[:, :80], position_ids=torch.arange(80)[None], past_key_values=trunk, use_cache=True)
    for seed in (2, 3):
        rest = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(seed))
        got = ours(rest, position_ids=torch.arange(80, 100)[None], past_key_values=trunk.fork(), use_cache=True).logits
        want = theirs(torch.cat([IDS[:, :80], rest], dim=1), use_cache=False).logits[:, 80:]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=3e-4)


def test_fused_lora_is_pefts_in_value_and_gradient() -> None:
    torch.manual_seed(0)
    base = torch.nn.Sequential(
        torch.nn.Linear(12, 20, bias=False), torch.nn.Tanh(), torch.nn.Linear(20, 7, bias=False)
    ).double()
    theirs = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["0", "2"])).double()
    for k, p in theirs.named_parameters():
        if "lora_B" in k:
            p.data.normal_()
    ours = copy.deepcopy(theirs)
    kernels.fuse_adapters(ours)
    assert sum(type(m) is kernels.FusedLoraLinear for m in ours.modules()) == 2
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    results = []
    for model in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        out.square().sum().backward()
        results.append([out, leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) == 6
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(x), theirs(x))


def test_the_check_passes_right_kernels_and_refuses_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = kernels.require(config(), "cpu", torch.float32, CPU)
    assert set(errors) == {"output", "gradient", "packed"} and max(errors.values()) < 1e-5

    class WrongGradient(TorchKernels):
        def delta(self, *args: Any) -> Any:
            out, memory = super().delta(*args)
            return out.detach() * 0.1 + out * 0.9, memory  # the value is right, the gradient is not

    class Leaks(TorchKernels):
        def delta(self, *args: Any) -> Any:
            return super().delta(*args[:6], None, args[7])  # ignores where sequences begin

    for broken, part in ((WrongGradient, "gradient"), (Leaks, "packed")):
        monkeypatch.setattr(kernels, "TorchKernels", broken)
        with pytest.raises(OpsdError, match=part):
            kernels.require(config(), "cpu", torch.float32, CPU)


def test_reference_kernels_are_independent_of_transformers() -> None:
    errors = kernels.check(config(), "cpu", torch.float32, ReferenceKernels())
    assert max(errors.values()) < 1e-6


HOPPER = {"cuda": True, "hopper": True, "triton": "3.7.1", "fla": "0.6.0", "liger": "0.8.5", "tilelang": False}


@pytest.mark.parametrize(
    "change, delta, norm, trains",
    [
        ({}, "fla", "liger", True),
        ({"triton": "3.7.0"}, "fla", "liger", False),
        ({"triton": "3.6.0"}, "fla", "liger", False),
        ({"triton": "3.3.1"}, "fla", "liger", True),
        ({"triton": "3.6.0", "hopper": False}, "fla", "liger", True),
        ({"triton": "3.6.0", "tilelang": True}, "fla", "liger", True),
        ({"fla": None}, "torch", "liger", True),
        ({"liger": None}, "torch", "torch", True),
        ({"triton": None}, "torch", "torch", True),
        ({"cuda": False}, "torch", "torch", True),
    ],
)
def test_choice(change: dict[str, Any], delta: str, norm: str, trains: bool) -> None:
    choice = kernels.choose(kernels.Facts(**(HOPPER | change)))
    assert (choice.delta, choice.norm, choice.mlp, choice.trains) == (delta, norm, norm.replace("liger", "triton"), trains)
    assert bool(choice.why) == (choice != kernels.choose(kernels.Facts(**HOPPER)))
    assert delta in str(choice)
    if not trains:
        with pytest.raises(OpsdError, match="wrong gradients"):
            kernels.require(config(), "cpu", torch.float32, choice)


def test_a_hybrid_of_another_activation_is_refused() -> None:
    other = config()
    other.hidden_act = "gelu"
    with torch.device("meta"):
        model = modeling_qwen3_5.Qwen3_5ForCausalLM(other)
    with pytest.raises(OpsdError, match="hidden_act=gelu"):
        kernels.install(model, CPU)


def test_a_model_on_the_host_of_an_accelerator_has_the_hosts_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert kernels.Facts.of_this_process().cuda and kernels.Facts.of_this_process("cuda:1").hopper
    on_host = kernels.Facts.of_this_process("cpu")
    assert not on_host.cuda and not on_host.hopper and kernels.choose(on_host).delta == "torch"


def test_fused_lora_in_bf16_rounds_each_result_once_and_keeps_the_gradients_of_masters() -> None:
    """A number is within half a unit in its last place of bf16's 8 bits (2^-9 of itself at most, 1.7e-3 of a norm) if it is rounded once; a
    sum that is rounded before the adapter's part is added is 1.4 times as far off. Gradients of masters are not numbers of bf16."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(256, 384, bias=False)).bfloat16()
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, target_modules=["0"]))
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float().normal_(0.0, 0.02)
    kernels.fuse_adapters(model)
    layer: Any = model.get_base_model()[0]
    weight, a, b = (t.weight.detach().double() for t in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]))
    x, grad = torch.randn(300, 256).bfloat16(), torch.randn(300, 384).bfloat16()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(leaf)
    out.backward(grad)
    x, grad = x.double(), grad.double()
    error = {
        "out": kernels.relative(out.detach().double(), x @ weight.T + 1.5 * x @ a.T @ b.T),
        "x": kernels.relative(leaf.grad.double(), grad @ weight + 1.5 * grad @ b @ a),
    }
    assert all(e < 1.75e-3 for e in error.values()), error
    for master, want in ((layer.lora_A, 1.5 * (grad @ b).T @ x), (layer.lora_B, 1.5 * grad.T @ (x @ a.T))):
        found = master["default"].weight.grad
        assert found.dtype == torch.float32 and kernels.relative(found.double(), want) < 3e-3
        assert (found != found.bfloat16()).double().mean() > 0.9
