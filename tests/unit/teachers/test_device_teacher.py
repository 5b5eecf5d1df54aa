"""The device teacher alone: its numbers against a plain forward with logits, its order, its refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny, make_tiny_hybrid
from verl_opsd.teachers.base import Pass, slots_of
from verl_opsd.teachers.device import DeviceTeacher


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "teacher", seed=5, hidden_size=96)


@pytest.fixture(scope="module")
def teacher(path: Path) -> DeviceTeacher:
    return DeviceTeacher(str(path), torch.float32, "cpu", "bigger")


def ids_of(length: int, seed: int) -> Tensor:
    return torch.randint(2048, (length,), generator=torch.Generator().manual_seed(seed))


def a_pass(slots: list[int], ids: Tensor, index: list[int], row: int = 0) -> Pass:
    return Pass(row, torch.tensor(slots, dtype=torch.int64), ids, torch.tensor(index, dtype=torch.int64))


def test_distribution_is_that_of_a_plain_forward(path: Path, teacher: DeviceTeacher) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = ids_of(50, 1)
    with torch.no_grad():
        out = model(input_ids=ids[None], output_hidden_states=True)
    where = [0, 7, 31, 48]
    signal = teacher.score([a_pass([0, 1, 2, 3], ids, where)])
    assert signal.form == "exact" and signal.head_id == "bigger" and signal.hidden_NH is not None
    want = out.hidden_states[-1][0, where]
    assert float((signal.hidden_NH - want).abs().max()) < 1e-5 and float((signal.hidden_NH - want).norm() / want.norm()) < 1e-6
    got = (signal.hidden_NH @ teacher.weight_VH.T).log_softmax(-1)
    assert float((got - out.logits[0, where].log_softmax(-1)).abs().max()) < 1e-4
    assert tuple(teacher.weight_VH.shape) == (2048, 96)


def test_a_teacher_in_bf16_turns_positions_by_float32_angles(path: Path) -> None:
    """transformers casts weights alone; angles of rounded frequencies are off by whole turns late in a sequence."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids, where = ids_of(1500, 1), [3, 700, 1499]
    with torch.no_grad():
        want = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, where]
    hidden = DeviceTeacher(str(path), torch.bfloat16, "cpu", "bf16").score([a_pass([0, 1, 2], ids, where)]).hidden_NH
    assert hidden is not None and torch.equal(hidden, want)


@pytest.mark.parametrize("says", ["whole", "text", "both"])
def test_a_head_that_a_multimodal_checkpoint_ties_is_its_embedding(tmp_path: Path, says: str) -> None:
    tied = {"tie_word_embeddings": True}
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16}
    text |= {"num_key_value_heads": 1, "num_hidden_layers": 4, **linear, **(tied if says != "whole" else {})}
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision, **(tied if says != "text" else {}))
    )
    if says == "text":
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    teacher = DeviceTeacher(str(tmp_path), torch.bfloat16, "cpu", "tied")  # stored in float32
    assert torch.equal(teacher.weight_VH, model.model.language_model.embed_tokens.weight.bfloat16())
    assert {p.dtype for p in teacher._model.parameters()} == {torch.bfloat16}


def test_a_teacher_whose_files_lack_a_weight_is_refused(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "cut")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "cut/model.safetensors", {"format": "pt"})
    with pytest.raises(OpsdError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        DeviceTeacher(str(tmp_path / "cut"), torch.float32, "cpu", "cut")


def test_entry_n_is_slot_n_whatever_the_passes(teacher: DeviceTeacher) -> None:
    one, two = ids_of(20, 2), ids_of(33, 3)
    first = a_pass([4, 0, 2], one, [3, 9, 18])
    second = a_pass([1, 3], two, [30, 0])
    apart = {
        **dict(zip([4, 0, 2], teacher.score([a_pass([0, 1, 2], one, [3, 9, 18])]).hidden_NH, strict=True)),  # type: ignore[arg-type]
        **dict(zip([1, 3], teacher.score([a_pass([0, 1], two, [30, 0])]).hidden_NH, strict=True)),  # type: ignore[arg-type]
    }
    for passes in ([first, second], [second, first]):
        hidden = teacher.score(passes).hidden_NH
        assert hidden is not None and len(hidden) == 5
        for slot, want in apart.items():
            assert torch.equal(hidden[slot], want)


def test_no_loss_position_is_an_empty_signal(teacher: DeviceTeacher) -> None:
    hidden = teacher.score([]).hidden_NH
    assert hidden is not None and tuple(hidden.shape) == (0, 96) and hidden.dtype == torch.float32


def test_what_a_teacher_keeps(teacher: DeviceTeacher) -> None:
    hidden = teacher.score([a_pass([0], ids_of(9, 4), [5])]).hidden_NH
    assert hidden is not None and not hidden.requires_grad and not hidden.is_inference()
    assert not teacher._model.training and not any(p.requires_grad for p in teacher._model.parameters())
    again = teacher.score([a_pass([0], ids_of(9, 4), [5])]).hidden_NH
    assert again is not None and torch.equal(hidden, again)


def test_later_tokens_change_nothing(teacher: DeviceTeacher) -> None:
    long = ids_of(40, 6)
    a = teacher.score([a_pass([0], long, [10])]).hidden_NH
    b = teacher.score([a_pass([0], long[:11], [10])]).hidden_NH
    assert a is not None and b is not None and float((a - b).norm() / b.norm()) < 1e-6


def test_dtype_of_the_signal_is_the_teachers(path: Path, teacher: DeviceTeacher) -> None:
    ids = ids_of(30, 7)
    low = DeviceTeacher(str(path), torch.bfloat16, "cpu", "low").score([a_pass([0], ids, [20])]).hidden_NH
    full = teacher.score([a_pass([0], ids, [20])]).hidden_NH
    assert low is not None and full is not None and low.dtype == torch.bfloat16
    assert 0 < float((low.float() - full).norm() / full.norm()) < 0.1


@pytest.mark.parametrize(
    ("passes", "named"),
    [
        ([([0, 0], 9, [1, 2], 0)], "exactly once"),
        ([([0, 2], 9, [1, 2], 0)], "exactly once"),
        ([([1], 9, [1], 0)], "exactly once"),
        ([([0], 9, [1], 0), ([1], 9, [1], 1)], "exactly once"),
    ],
)
def test_passes_that_are_not_one_row_are_refused(teacher: DeviceTeacher, passes: list, named: str) -> None:
    built = [a_pass(s, ids_of(n, 1), i, row) for s, n, i, row in passes]
    with pytest.raises(OpsdError, match=named):
        slots_of(built)
    with pytest.raises(OpsdError, match=named):
        teacher.score(built)


def test_view_beyond_the_context_is_refused(teacher: DeviceTeacher) -> None:
    with pytest.raises(OpsdError, match="never truncated"):
        teacher.score([a_pass([0], torch.zeros(16385, dtype=torch.int64), [3])])


@pytest.mark.parametrize("token", [2048, -1])
def test_ids_outside_the_vocabulary_are_refused(teacher: DeviceTeacher, token: int) -> None:
    with pytest.raises(OpsdError, match="same ids"):
        teacher.score([a_pass([0], torch.tensor([1, token, 2]), [0])])


_SIZES = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**_SIZES, logits_scaling=3.0),  # scaled
        GraniteConfig(**_SIZES, logits_scaling=0.9),
        Gemma2Config(**_SIZES, head_dim=16, num_key_value_heads=2, final_logit_softcapping=0.5),  # capped
        PhiConfig(**_SIZES),  # a bias
    ],
    ids=["scaled", "slightly", "capped", "bias"],
)
def test_logits_that_are_not_hidden_times_weight_are_refused(tmp_path: Path, config: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data = torch.randn_like(p) / 4
    model.save_pretrained(tmp_path / "odd")
    with pytest.raises(OpsdError, match="no scale, cap or bias"):
        DeviceTeacher(str(tmp_path / "odd"), dtype, "cpu", "odd")


@pytest.mark.gpu
def test_accelerator_against_the_host(path: Path, teacher: DeviceTeacher) -> None:
    """fp32 as on the host; bf16 within its rounding, and the memory of a long view does not hold positions x vocabulary."""
    ids = ids_of(3000, 8)
    one = [a_pass(list(range(5)), ids, [0, 99, 1000, 2000, 2998])]
    want = teacher.score(one).hidden_NH
    assert want is not None
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        on_device = DeviceTeacher(str(path), dtype, "cuda", "t")
        assert on_device.weight_VH.is_cuda
        got = on_device.score(one).hidden_NH
        assert got is not None and got.device.type == "cpu" and got.dtype == dtype and got.is_pinned()
        error = float((got.float() - want).norm() / want.norm())
        print(f"{dtype}: relative error {error:.2e}, head error {on_device.head_error:.2e}")
        assert error < limit
    long = a_pass([0], ids_of(16384, 9), [16000])
    on_device.score([long])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    on_device.score([long])
    peak = torch.cuda.max_memory_allocated() - before
    print(f"16,384 tokens: {peak / 2**20:.0f} MiB above the weights")
    assert torch.cuda.memory_allocated() == before
    assert peak < 16384 * 2048 * 2  # bytes of bf16 logits at this vocabulary: more than all that is live at once


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceTeacher, AutoModelForCausalLM]:
    """A Qwen3.5 teacher, and the same model in transformers' code."""
    path = make_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "teacher", seed=6)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return DeviceTeacher(str(path), torch.float32, "cpu", "hybrid"), plain


@torch.no_grad()
def plain_hidden(model: AutoModelForCausalLM, p: Pass) -> Tensor:
    return model.base_model(input_ids=p.ids_T[None], use_cache=False).last_hidden_state[0, p.index_N]  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", [1000, 64, 37])
def test_parts_of_a_long_view_are_one_pass(hybrid: tuple[DeviceTeacher, AutoModelForCausalLM], part: int) -> None:
    teacher, plain = hybrid
    teacher.part = part
    p = a_pass([0, 1, 2, 3], ids_of(150, 7), [149, 0, 63, 64])
    hidden = teacher.score([p]).hidden_NH
    torch.testing.assert_close(hidden, plain_hidden(plain, p), rtol=1e-3, atol=3e-4)


def test_branches_of_one_trunk_run_it_once(hybrid: tuple[DeviceTeacher, AutoModelForCausalLM]) -> None:
    """Passes as ``last_user`` places a brief: each is the history to some point, the brief, and the reply."""
    teacher, plain = hybrid
    teacher.part = 64
    history, brief = ids_of(160, 8), ids_of(12, 9)
    ends = [40, 90, 91, 150]  # of the history, each followed by the brief and ten tokens of reply
    passes = [
        a_pass([2 * i, 2 * i + 1], torch.cat([history[:e], brief, history[e : e + 10]]), [e + 11, e + 20])
        for i, e in enumerate(ends)
    ]
    before = teacher.tokens
    hidden = teacher.score(passes).hidden_NH
    assert hidden is not None
    for i, p in enumerate(passes):
        torch.testing.assert_close(hidden[2 * i : 2 * i + 2], plain_hidden(plain, p), rtol=1e-3, atol=3e-4)
    # 40 tokens are a prefix of all; the first pass's brief replaces what comes after, and so on: the trunk runs once.
    assert teacher.tokens - before == 150 + len(ends) * 22
    reordered = [passes[2], passes[0], passes[3], passes[1]]
    again = teacher.score(reordered).hidden_NH
    torch.testing.assert_close(again, hidden, rtol=1e-3, atol=3e-4)


def test_a_loss_position_inside_the_trunk_is_scored(hybrid: tuple[DeviceTeacher, AutoModelForCausalLM]) -> None:
    teacher, plain = hybrid
    ids = ids_of(100, 10)
    one, two = a_pass([0, 1, 2], ids, [5, 50, 99]), a_pass([3, 4], torch.cat([ids[:60], ids_of(20, 11)]), [20, 79])
    hidden = teacher.score([one, two]).hidden_NH
    assert hidden is not None
    torch.testing.assert_close(hidden[:3], plain_hidden(plain, one), rtol=1e-3, atol=3e-4)
    torch.testing.assert_close(hidden[3:], plain_hidden(plain, two), rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("part", [16384, 16])
@pytest.mark.parametrize("make", [make_tiny, make_tiny_hybrid])
def test_greedy_continuation_is_the_argmax_of_whole_forwards(make, part: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path / "model", seed=5)
    teacher = DeviceTeacher(str(path), torch.float32, "cpu", "t")
    teacher.part = part
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids, want = ids_of(40, 9), []
    for _ in range(6):
        with torch.no_grad():
            want.append(
                int(model(input_ids=torch.cat([ids, torch.tensor(want, dtype=torch.int64)])[None]).logits[0, -1].argmax())
            )
    assert teacher.continue_greedily(ids, 6, -1 if make is make_tiny_hybrid else 2047).tolist() == want
    stop = want[2]
    assert teacher.continue_greedily(ids, 6, stop).tolist() == want[: want.index(stop) + 1]
