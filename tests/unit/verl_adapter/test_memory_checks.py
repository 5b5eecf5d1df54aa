"""A run that does not fit its devices is refused before one is touched, and the refusal agrees with ``opsd plan``."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl_opsd.cli.plan import KNOWN, shape_of
from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.paths import conf_dir
from verl_opsd.planning import memory, planner
from verl_opsd.plugin import register_resolvers
from verl_opsd.verl_adapter.memory_checks import BRIEF, Need, activation_plan, check_memory, forward_tokens, needs

STUDENT, TEACHER = shape_of("qwen3.5-9b"), shape_of("qwen3.5-27b")
H100 = planner.DEVICES["H100"].bytes_
EIGHT = ("scale=gpu8", "teacher=device", "opsd.teacher.path=somewhere")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    register_resolvers()
    monkeypatch.setenv("OPSD_RUN_DIR", "run")
    monkeypatch.setenv("OPSD_RAY_TMP", "tmp")


def composed(*overrides: str) -> tuple[DictConfig, OpsdConfig]:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{conf_dir()}]", "+recipe=opd", *overrides])
    return config, OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]


@pytest.fixture
def planned() -> Any:
    def of(*overrides: str, device: float = H100) -> dict[str, Need]:
        config, opsd = composed(*overrides)
        found = needs(config, opsd, STUDENT, {f"device:{opsd.teacher.path}": TEACHER}, device)
        names = ("student", "awake", "server", "teacher")[: len(found)]
        return dict(zip(names, found, strict=True))

    return of


def fits(found: dict[str, Need]) -> list[str]:
    return [side for side, need in found.items() if need.total > need.room]


def test_the_production_recipe_fits_its_devices(planned: Any) -> None:
    found = planned(*EIGHT)
    assert list(found) == ["student", "awake", "server", "teacher"] and fits(found) == []
    assert found["teacher"].parts["weights"] == pytest.approx(2 * TEACHER.parameters)  # a copy on each device
    trained = 16 * STUDENT.lora_parameters(32)
    assert found["student"].parts["weights"] == pytest.approx((2 * STUDENT.parameters + trained) / 4)
    assert found["server"].room == pytest.approx(0.4 * H100)
    assert (
        found["server"].parts["recurrent states"] == 32 * 24 * 32 * 128 * 128 * 4
    )  # sequences, layers, heads, key, value, bytes


@pytest.mark.parametrize("gb", [40, 60, 70, 85, 150])
@pytest.mark.parametrize("context", [16384, 65536, 131072, 262144])
def test_the_planner_and_the_launch_agree(planned: Any, gb: int, context: int) -> None:
    """What the planner's layout holds, a student's rank and a teacher's worker hold, and nothing else."""
    device = planner.Device("some", gb * 1e9)
    found = planned(*EIGHT, f"opsd.contract.context_length={context}", device=device.bytes_)
    # The launch also counts another copy of the keys and values of passes that share a prefix.
    teacher = found["teacher"].total - (context + BRIEF) * TEACHER.carried_bytes()
    held = "student" not in fits(found) and teacher <= found["teacher"].room
    layout = planner.Layout(4, 4)
    if held:
        planner.estimate(STUDENT, TEACHER, layout, device, context, 32, BRIEF, memory.PART)
    else:
        with pytest.raises(OpsdError):
            planner.estimate(STUDENT, TEACHER, layout, device, context, 32, BRIEF, memory.PART)


@pytest.mark.parametrize(("gb", "context"), [(24, 16384), (40, 65536), (85, 65536), (85, 258048)])
def test_they_agree_about_a_student_that_is_its_own_teacher(planned: Any, gb: int, context: int) -> None:
    device = planner.Device("some", gb * 1e9)
    found = planned("scale=gpu8", f"opsd.contract.context_length={context}", device=device.bytes_)
    if "student" not in fits(found):
        planner.estimate(STUDENT, None, planner.Layout(8, 0), device, context, 32, BRIEF, memory.PART)
    else:
        with pytest.raises(OpsdError):
            planner.estimate(STUDENT, None, planner.Layout(8, 0), device, context, 32, BRIEF, memory.PART)


@pytest.mark.parametrize(
    ("overrides", "side"),
    [
        (("opsd.contract.context_length=1000000",), "student"),
        (("opsd.activations.keep=verl", "actor_rollout_ref.model.enable_gradient_checkpointing=false"), "student"),
        (("opsd.activations.keep=linear_attention",), "student"),
        (("actor_rollout_ref.model.lora_rank=0", "opsd.teacher.devices=6"), "student"),
        (("actor_rollout_ref.rollout.gpu_memory_utilization=0.95",), "awake"),
        (("actor_rollout_ref.rollout.gpu_memory_utilization=0.2",), "server"),
        (("actor_rollout_ref.rollout.max_num_seqs=1024",), "server"),
        (("opsd.teacher.dtype=float32",), "teacher"),
    ],
)
def test_each_side_is_looked_at(planned: Any, overrides: tuple[str, ...], side: str) -> None:
    assert side in fits(planned(*EIGHT, *overrides))


def test_what_makes_a_rank_smaller(planned: Any) -> None:
    """Ranks that share a sequence, inputs of layers on the host, ranks of one teacher's copy."""
    none = "opsd.activations.keep=none"
    whole = planned(*EIGHT, none)
    halves = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    assert planned(*EIGHT, none, halves)["student"].total < whole["student"].total
    assert planned(*EIGHT, none, "opsd.activations.offload=true")["student"].total < whole["student"].total
    verls = ("opsd.activations.keep=verl", "actor_rollout_ref.model.enable_activation_offload=true")
    assert planned(*EIGHT, *verls)["student"].total < whole["student"].total
    split = planned(*EIGHT, "opsd.teacher.ranks=2", "opsd.teacher.dtype=float32")
    assert fits(split) == []
    awake = planned(*EIGHT, none, "actor_rollout_ref.rollout.free_cache_engine=false")
    assert awake["student"].total == pytest.approx(whole["student"].total - memory.ASLEEP + 0.4 * H100)


def test_the_launch_check_names_side_parts_and_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config, opsd = composed(*EIGHT)
    assert check_memory(config, opsd) == []  # no accelerator here
    shapes = {"somewhere": KNOWN["qwen3.5-27b"]}
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda path: Qwen3_5TextConfig(**shapes.get(path, KNOWN["qwen3.5-9b"]))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    sizes = [int(H100), int(H100)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    assert len(check_memory(config, opsd)) == 4
    sizes[1] = int(48e9)  # the smallest device counts
    with pytest.raises(OpsdError) as caught:
        check_memory(config, opsd)
    text = str(caught.value)
    assert "scale=gpu8 on devices of 48 GB" in text and "GB (weights" in text and "way out:" in text


def test_a_student_that_is_not_counted_is_played_and_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    config, opsd = composed("scale=gpu8")
    mixture = transformers.Qwen3MoeConfig(num_hidden_layers=2)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda path: mixture)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=int(H100)))
    assert check_memory(config, dataclasses.replace(opsd, mode="evaluate")) == []
    with pytest.raises(OpsdError, match="qwen3_moe model with num_experts"):
        check_memory(config, opsd)


def test_what_a_worker_of_a_teacher_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid that one device holds scores in parts, and its passes may share a prefix; another model, or one over several devices, scores
    a sequence whole. By hand, bytes of a token in its largest layer."""
    none = dict.fromkeys(("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim"), 0)
    plain = dataclasses.replace(TEACHER, kinds=("full_attention",) * 64, **none)
    view, keys = 65536 + BRIEF, 2 * 2 * 1024  # keys and values of one layer, 4 heads of 256
    hybrid_token = 2 * (4 * 5120 + 2 * 10240 + 5 * 6144 + 48 * 128 * 128 // 64)
    plain_token = 2 * (4 * 5120 + 3 * 17408)
    for shape, ranks, want in (
        (TEACHER, 1, memory.PART * hybrid_token + view * keys * (16 + 1 + 16)),
        (TEACHER, 2, view * hybrid_token),
        (plain, 1, view * plain_token),
        (plain, 2, view * plain_token),
    ):
        config, opsd = composed(*EIGHT, "opsd.contract.context_length=65536", f"opsd.teacher.ranks={ranks}")
        worker = needs(config, opsd, STUDENT, {"device:somewhere": shape}, 150e9)[-1]
        assert worker.parts["at work"] == pytest.approx(want)


def kept_by(*overrides: str, device: float | None = H100) -> tuple[int, bool]:
    config, opsd = composed(*EIGHT, *overrides)
    found = activation_plan(config, opsd, STUDENT, {"teacher": TEACHER}, device)
    return sum(found.keep), found.offload


def test_the_accelerator_scales_keep_what_their_devices_hold(planned: Any) -> None:
    for scale in ("gpu1", "gpu2", "gpu8"):
        assert composed(f"scale={scale}")[1].activations.keep == "auto"
    assert composed("scale=local")[1].activations.keep == "verl"
    # A shorter context and a larger device leave room for more layers, and what is planned fits; 32 layers keep all that there is.
    short, long = "opsd.contract.context_length=16384", "opsd.contract.context_length=131072"
    assert 0 < kept_by(long, device=1e11)[0] < kept_by(short, device=7e10)[0] < kept_by(short, device=1e11)[0] <= 32
    assert kept_by(short, device=1e12) == (32, False)
    for tokens, context, device in ((16384, short, 7e10), (131072, long, 1e11)):
        found = planned(*EIGHT, context, device=device)
        assert fits(found) == []
        assert (
            found["student"].total + tokens * STUDENT.kept_bytes("full_attention") > found["student"].room
        )  # no room for one more


def test_the_device_may_be_named() -> None:
    assert kept_by("opsd.activations.device_gb=85", device=15e10) == kept_by(device=85e9)
    assert kept_by("opsd.activations.device_gb=85", device=None) == kept_by(device=85e9)
    with pytest.raises(OpsdError, match="device_gb"):
        kept_by(device=None)


def test_inputs_wait_on_the_host_where_nothing_else_fits() -> None:
    wide = "opsd.contract.context_length=131072"
    assert kept_by(wide, device=60e9)[1] and not kept_by(wide, device=1e11)[1]
    assert kept_by(wide, "opsd.activations.offload=true", device=1e11)[1]
    with pytest.raises(OpsdError, match="let inputs wait on the host"):
        kept_by(wide, "opsd.activations.offload=false", device=60e9)


def test_a_kind_of_layers_is_kept_whatever_the_device() -> None:
    assert kept_by("opsd.activations.keep=none", device=None) == (0, False)
    assert kept_by("opsd.activations.keep=full_attention", "opsd.activations.offload=true", device=None) == (8, True)
    assert kept_by("opsd.activations.keep=linear_attention", device=None) == (24, False)
    config, opsd = composed(*EIGHT, "opsd.activations.keep=linear_attention")
    dense = dataclasses.replace(STUDENT, kinds=("full_attention",) * 4)
    with pytest.raises(OpsdError, match="a kind of layers that the model has"):
        activation_plan(config, opsd, dense, {}, None)


def test_rows_that_share_a_forward_are_counted() -> None:
    def tokens(*overrides: str) -> int:
        return forward_tokens(*composed("scale=gpu8", "opsd.contract.context_length=10000", *overrides))

    actor = "actor_rollout_ref.actor"
    assert tokens() == 10000
    assert tokens(f"{actor}.ppo_micro_batch_size_per_gpu=3") == 30000
    assert tokens(f"{actor}.ulysses_sequence_parallel_size=2") == 5000
    assert tokens(f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu=24576") == 24576


def test_a_host_without_accelerators_names_the_device() -> None:
    config, opsd = composed("scale=local", "opsd.activations.keep=auto")
    with pytest.raises(OpsdError, match="no accelerator"):
        check_memory(config, opsd)
    config, opsd = composed("scale=local", "opsd.activations.keep=auto", "opsd.activations.device_gb=4")
    assert check_memory(config, opsd) == []
    config, opsd = composed("scale=local", "opsd.activations.keep=linear_attention")
    with pytest.raises(OpsdError, match="full_attention layers"):
        check_memory(config, opsd)
