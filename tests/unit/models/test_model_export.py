"""Exports of checkpoints as verl's engine writes them: joined, merged, wrapped, and guarded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from verl_opsd.errors import OpsdError
from verl_opsd.models.export import coherence, divergence, export, log_probs, merged, whole_weights
from verl_opsd.models.tiny import make_tiny, make_tiny_hybrid


def checkpoint(folder: Path, model: nn.Module, source: Path, lora: tuple[int, int] | None = None) -> Path:
    """The files that the export reads, for one rank."""
    (folder / "huggingface").mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder / "huggingface")
    model.config.save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    if lora:
        (folder / "lora_train_meta.json").write_text(
            json.dumps({"r": lora[0], "lora_alpha": lora[1], "task_type": "CAUSAL_LM"})
        )
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=3)


def trained(path: Path) -> Any:
    """Weights that are no longer those of the folder."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=g) * 0.02
    return model


def adapted(path: Path, scale: float = 0.1) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], bias="none")).eval()
    g = torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=g) * (scale if "lora_B" in name else 0.1)
    return model


IDS = [[5, 90, 300, 7, 1200, 44], [9, 8, 700]]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-10), ("bfloat16", 1e-2), ("float16", 1e-4)])
def test_full_parameters(dtype, bound, tiny, tmp_path):
    model = trained(tiny)
    guards = export(checkpoint(tmp_path / "c", model, tiny), tmp_path / "out", dtype)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert 0 <= divergence(log_probs(model, IDS), log_probs(again, IDS)) < bound
    assert [g.name for g in guards] == ["parity"] and json.loads((tmp_path / "out" / "export.json").read_text())[
        "dtype"
    ] == dtype
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == AutoTokenizer.from_pretrained(tiny).chat_template
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert next(stored.parameters()).dtype == getattr(torch, dtype)


def test_an_adapter_is_merged_in_float32(tiny, tmp_path):
    model = adapted(tiny)
    guards = {g.name: g for g in export(checkpoint(tmp_path / "c", model, tiny, (4, 12)), tmp_path / "out", "float32")}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    assert divergence(log_probs(model, IDS), log_probs(again, IDS)) < 1e-9
    assert divergence(log_probs(plain, IDS), log_probs(again, IDS)) > 1e-3
    assert guards["adapter_non_zero"].value == pytest.approx(
        max(float(p.abs().max()) for n, p in model.named_parameters() if "lora_B" in n)
    )
    name = "model.layers.1.mlp.down_proj.weight"
    a, b = (
        model.state_dict()[
            f"base_model.{name.removesuffix('.weight').replace('model.', 'model.model.', 1)}.lora_{s}.default.weight"
        ]
        for s in "AB"
    )
    want = plain.state_dict()[name] + 12 / 4 * b @ a
    assert torch.allclose(again.state_dict()[name], want, atol=1e-7)


def test_an_adapter_that_was_never_trained_is_refused(tiny, tmp_path):
    with pytest.raises(OpsdError, match="guard adapter_non_zero"):
        export(checkpoint(tmp_path / "c", adapted(tiny, 0.0), tiny, (4, 12)), tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists() and [p.name for p in tmp_path.iterdir()] == ["c"]


def test_half_an_adapter_is_refused(tiny):
    weights = adapted(tiny).state_dict()
    gone = next(k for k in weights if "lora_A" in k)
    with pytest.raises(OpsdError, match="without both sides"):
        merged({k: v for k, v in weights.items() if k != gone}, 4, 12)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing keys"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected keys"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "size mismatch for model.norm.weight"),
        (lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}), "tied to other weights"),
    ],
)
def test_missing_and_unexpected_keys_are_refused(change: Callable, what, tiny, tmp_path):
    folder = checkpoint(tmp_path / "c", trained(tiny), tiny)
    file = folder / "model_world_size_1_rank_0.pt"
    weights = dict(torch.load(file))
    change(weights)
    torch.save(weights, file)
    with pytest.raises(OpsdError, match=f"(?s){what}.*guard keys") as error:
        export(folder, tmp_path / "out", "float32")
    assert any(name in str(error.value) for name in ("norm", "extra", "lm_head"))


def rewritten(file: Path, change: Callable) -> None:
    weights = dict(torch.load(file))
    change(weights)
    torch.save(weights, file)


SHARD = "model_world_size_1_rank_0.pt"


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda c: (c / SHARD).write_bytes(b"x" * 99), "every rank's shard can be read"),
        (lambda c: (c / SHARD).write_bytes((c / SHARD).read_bytes()[:-500]), "every rank's shard can be read"),
        (lambda c: rewritten(c / SHARD, lambda w: w.update({"n": torch.ones(2, dtype=torch.int8)})), r"n \(torch.int8\)"),
        (lambda c: torch.save([1], c / SHARD), "are no tensors by name"),
        (lambda c: torch.save({"w": 1.0}, c / SHARD), "are no tensors by name"),
        (lambda c: (c / SHARD).write_bytes(b"cno_such_module\nThing\n."), "every rank's shard can be read"),
        (lambda c: (c / "fsdp_config.json").write_text('{"world_size": 0}'), "world_size 0"),
        (lambda c: (c / "huggingface" / "config.json").write_text("{"), "huggingface: "),
        (lambda c: (c / "huggingface" / "config.json").write_text('{"model_type": "no_such"}'), "huggingface: ValueError"),
        (lambda c: (c / "huggingface" / "tokenizer.json").write_text("{"), "huggingface: "),
        (lambda c: (c / "fsdp_config.json").write_text("{"), "fsdp_config.json: JSONDecodeError"),
        (lambda c: (c / "fsdp_config.json").write_text("{}"), "fsdp_config.json: KeyError"),
        (lambda c: (c / "huggingface" / "config.json").unlink(), "huggingface lacks config.json"),
        (lambda c: (c / "huggingface" / "tokenizer_config.json").unlink(), "lacks tokenizer_config.json"),
        (lambda c: (c / "lora_train_meta.json").unlink(), "lora_train_meta.json: FileNotFoundError"),
        (lambda c: (c / "lora_train_meta.json").write_text('{"r": 8, "lora_alpha": 12}'), "states rank 8"),
        (
            lambda c: rewritten(
                c / SHARD, lambda w: w.update({k: torch.zeros(4, 2) for k in w if "layers.0.self_attn.q_proj.lora_A" in k})
            ),
            r"q_proj: A \(4, 2\)",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(damage, what, tiny, tmp_path):
    folder = checkpoint(tmp_path / "c", adapted(tiny), tiny, (4, 12))
    damage(folder)
    with pytest.raises(OpsdError, match=what):
        export(folder, tmp_path / "out", "float32")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_ranks_of_other_keys_are_refused(tiny, tmp_path):
    folder = checkpoint(tmp_path / "c", trained(tiny), tiny)
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 2}))
    weights = torch.load(folder / SHARD)
    for rank, gone in ((0, None), (1, "model.norm.weight")):
        torch.save({k: v for k, v in weights.items() if k != gone}, folder / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(OpsdError, match=r"rank_1\.pt.* of other keys than rank 0"):
        whole_weights(folder)


def test_groups_of_ranks_that_hold_the_same_shards_are_joined_once(tmp_path):
    """Four ranks, two and two: each pair holds the whole, as under engine.fsdp_size=2."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = torch.arange(12.0).reshape(4, 3)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        for rank in range(4):
            half = whole[2 * (rank % 2) :][:2].clone()
            shard = DTensor.from_local(half, mesh, [Replicate(), Shard(0)], run_check=False)
            torch.save({"w": shard}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
        (tmp_path / "fsdp_config.json").write_text(json.dumps({"world_size": 4}))
        assert torch.equal(whole_weights(tmp_path)["w"], whole)
    finally:
        dist.destroy_process_group()


def test_what_is_no_checkpoint_is_refused(tiny, tmp_path):
    with pytest.raises(OpsdError, match="fsdp_config"):
        whole_weights(tiny)
    folder = checkpoint(tmp_path / "c", trained(tiny), tiny)
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 2}))
    with pytest.raises(OpsdError, match="model_world_size_2_rank_0"):
        whole_weights(folder)
    with pytest.raises(OpsdError, match="exists"):
        export(folder, tiny)


def test_parity_is_measured_on_what_was_written(tiny, tmp_path, monkeypatch):
    """A file that is not the trained model: the guard sees it, and nothing is left."""
    import verl_opsd.models.export as module

    original = module.log_probs
    calls: list[int] = []

    def later(model: Any, sequences: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the model that was read back
            next(model.parameters()).data.mul_(1.5)
        return original(model, sequences)

    monkeypatch.setattr(module, "log_probs", later)
    with pytest.raises(OpsdError, match="guard parity"):
        export(checkpoint(tmp_path / "c", trained(tiny), tiny), tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


def test_divergence_by_hand():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    want = 0.5 * torch.log(torch.tensor(0.5 / 0.9)) + 0.5 * torch.log(torch.tensor(0.5 / 0.1))
    assert divergence([p], [q]) == pytest.approx(float(want), rel=1e-6) and divergence([p], [p]) == 0


def test_coherence_counts_replies_with_a_call(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    lengths: list[int] = []

    def calls(ids: list[int]) -> int:
        lengths.append(len(ids))
        return len(lengths) % 2

    found = coherence(model, [[5, 6, 7], [8, 9], [10]], calls, 3, 0)
    assert (found.value, found.passed) == (2 / 3, True) and all(1 <= n <= 3 for n in lengths)
    assert not coherence(model, [[5, 6]], lambda ids: 0, 2, 0).passed


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text-only hybrid, and a multimodal checkpoint around a text model of the same shape."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    root = tmp_path_factory.mktemp("wrapper")
    text = make_tiny_hybrid(root / "text")
    config = AutoModelForCausalLM.from_pretrained(text).config
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": config.hidden_size,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=config.to_dict(), vision_config=vision, tie_word_embeddings=True)
    )
    whole.save_pretrained(root / "wrapper")
    AutoTokenizer.from_pretrained(text).save_pretrained(root / "wrapper")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (root / "wrapper" / name).write_text(json.dumps({"of": name}))
    (root / "wrapper" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "top_k": 20}))
    return text, root / "wrapper"


def test_a_text_model_keeps_the_multimodal_wrapper_that_servers_know(multimodal, tmp_path):
    text, wrapper = multimodal
    model = trained(text)
    checkpoint(tmp_path / "c" / "actor", model, text)  # where main_ppo keeps the student
    export(tmp_path / "c", tmp_path / "out", "float32", wrapper=str(wrapper))
    for file in wrapper.glob("*processor_config.json"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [2, 0], "top_k": 20}
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["architectures"] == ["Qwen3_5ForConditionalGeneration"] and stored["model_type"] == "qwen3_5"
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert divergence(log_probs(model, IDS), log_probs(again.eval(), IDS)) < 1e-9
    before = AutoModelForImageTextToText.from_pretrained(wrapper, dtype=torch.float32).state_dict()
    seen = [k for k in before if ".visual." in k]
    assert seen and all(torch.equal(before[k], again.state_dict()[k]) for k in seen)
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as f:
        names = set(f.keys())
    assert {n.split(".")[1] for n in names if n.startswith("model.")} == {"language_model", "visual"}


def test_replies_end_where_those_of_the_trained_model_did(tiny, tmp_path):
    folder = checkpoint(tmp_path / "c", trained(tiny), tiny)
    stated = {"eos_token_id": [2, 0], "temperature": 0.6, "do_sample": True}
    (folder / "huggingface" / "generation_config.json").write_text(json.dumps(stated))
    export(folder, tmp_path / "out", "float32")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == stated


def test_a_wrapper_around_another_text_model_is_refused(multimodal, tiny, tmp_path):
    wrapper = multimodal[1]
    with pytest.raises(OpsdError, match="around another text model"):
        export(checkpoint(tmp_path / "c", trained(tiny), tiny), tmp_path / "out", wrapper=str(wrapper))
    with pytest.raises(OpsdError, match="a multimodal checkpoint"):
        export(checkpoint(tmp_path / "d", trained(tiny), tiny), tmp_path / "out", wrapper=str(tiny))
