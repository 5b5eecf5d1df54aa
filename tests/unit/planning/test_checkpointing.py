"""Which layers keep their activations, what that costs, and that the gradient does not depend on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from verl_opsd.errors import OpsdError
from verl_opsd.models import checkpointing, kernels, lora
from verl_opsd.models.checkpointing import Plan
from verl_opsd.planning import memory
from verl_opsd.planning.shape import ModelShape

TINY: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY)).train()


@pytest.mark.parametrize("keep", [(False,) * 4, (True, False, True, False), (True,) * 4])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_do_not_depend_on_the_plan(model: Any, keep: tuple[bool, ...], offload: bool) -> None:
    ids = torch.arange(20)[None] % 31

    def grads(plan: Plan) -> tuple[list[torch.Tensor], int]:
        checkpointing.apply(model, plan)
        calls = []
        hooks = [layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in model.model.layers]
        model.zero_grad()
        model(ids, use_cache=False).logits.square().sum().backward()
        for h in hooks:
            h.remove()
        return [p.grad.clone() for p in model.parameters()], len(calls)

    want, once = grads(Plan((True,) * 4))
    got, calls = grads(Plan(keep, offload))
    assert once == 4 and calls == 4 + keep.count(False)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)


def test_only_inputs_go_to_the_host(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []
    before = checkpointing.HostInputs._to_host
    monkeypatch.setattr(
        checkpointing.HostInputs, "_to_host", lambda self, t: (moved.append(tuple(t.shape)), before(self, t))[1]
    )
    checkpointing.apply(model, Plan((False, True, False, False), offload=True))
    model(torch.arange(20)[None], use_cache=False).logits.sum().backward()
    assert [s for s in moved if len(s) == 3] == [(1, 20, 16)] * 3 and all(s in ((1, 20, 16), (0,)) for s in moved)


def test_a_plan_of_another_model_is_refused(model: Any) -> None:
    with pytest.raises(OpsdError, match="3 layers for a model of 4"):
        checkpointing.apply(model, Plan((False,) * 3))


SHAPE = ModelShape.of(Qwen3_5TextConfig())


def test_which_layers_are_kept() -> None:
    def kept(tokens: int, count: int) -> list[int]:
        return [i for i, k in enumerate(checkpointing.plan(SHAPE, tokens, count).keep) if k]

    assert kept(32768, 0) == [] and kept(32768, 32) == list(range(32))
    # At 32k an attention layer's second forward costs more for a byte, so these are kept first, from the last on.
    assert kept(32768, 2) == [27, 31] and kept(32768, 9) == [3, 7, 11, 15, 19, 23, 27, 30, 31]


def test_a_step_is_the_worst_moment_of_its_backward() -> None:
    """Two layers of one kind, by hand: k bytes kept of r that its backward reads, b the input, w at work, a token."""
    shape = dataclasses.replace(SHAPE, kinds=("full_attention",) * 2)
    tokens, head = 1000, memory.head_bytes(shape)
    k, r, b = shape.kept_bytes("full_attention"), shape.saved_bytes("full_attention"), shape.boundary_bytes()
    w = memory.backward_bytes(shape, "full_attention")
    for keep, offload, want in (
        ((True, True), False, k + r + w),
        ((False, True), False, b + r + w),
        ((True, False), False, k + b + r + w),
        ((False, False), False, 2 * b + r + w),
        ((False, False), True, r + w),
    ):
        assert memory.step_bytes(shape, tokens, Plan(keep, offload)) == pytest.approx(tokens * want + head)


def test_as_many_layers_are_kept_as_fit() -> None:
    none, one = (memory.step_bytes(SHAPE, 32768, checkpointing.plan(SHAPE, 32768, n)) for n in (0, 1))
    assert memory.choose_plan(SHAPE, 32768, 1e15) == Plan((True,) * 32)
    assert memory.choose_plan(SHAPE, 32768, one) == checkpointing.plan(SHAPE, 32768, 1)
    assert sum(memory.choose_plan(SHAPE, 32768, none).keep) < sum(memory.choose_plan(SHAPE, 32768, 1.5 * none).keep)
    assert memory.choose_plan(
        SHAPE, 32768, min(none, one) - 1
    ).offload  # a last layer that keeps all needs no copy of its input
    with pytest.raises(OpsdError, match="on the host"):
        memory.choose_plan(SHAPE, 32768, memory.step_bytes(SHAPE, 32768, Plan((False,) * 32, offload=True)) - 1)


def test_a_device_that_what_stays_overfills() -> None:
    with pytest.raises(OpsdError, match=r"takes 2\.5 GB more than there is"):
        memory.choose_plan(SHAPE, 32768, -2.5e9)


def test_transformers_layers_keep_what_was_measured() -> None:
    """benchmarks/results/pair.txt: 32,768 tokens of one layer of the 9B, transformers' and fused, GB between forward and backward."""
    plain = dataclasses.replace(SHAPE, fused=False)
    for kind, theirs, ours in (("linear_attention", 8.76, 4.99), ("full_attention", 7.81, 5.05)):
        assert 32768 * plain.kept_bytes(kind) / 1e9 == pytest.approx(theirs, rel=0.1)
        # measured when every tensor that backward reads was kept
        assert 32768 * SHAPE.saved_bytes(kind) / 1e9 == pytest.approx(ours, rel=0.1)


def test_a_second_forward_leaves_out_the_product_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    base = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY))
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"])).train()
    for k, p in adapted.named_parameters():
        if "lora_B" in k:
            p.data.normal_()
    kernels.fuse_adapters(adapted)
    left_out: list[int] = []

    def unused(like: torch.Tensor, *shape: int) -> torch.Tensor:
        left_out.append(1)
        return like.new_full(shape, torch.nan)

    monkeypatch.setattr(lora, "_unused", unused)

    def grads(keep: bool) -> list[torch.Tensor]:
        checkpointing.apply(adapted, Plan((keep,) * 4))
        adapted.zero_grad()
        adapted(input_ids=torch.arange(20)[None], use_cache=False).logits.square().sum().backward()
        return [p.grad.clone() for p in adapted.parameters() if p.grad is not None]

    want = grads(True)
    assert not left_out
    got = grads(False)
    assert len(left_out) == 4 and len(want) == len(got) == 26
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
