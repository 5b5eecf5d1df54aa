"""A run that does not fit its devices is refused before one is touched, and the refusal agrees with ``opsd plan``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_opsd.cli.plan import KNOWN, shape_of
from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.paths import conf_dir
from verl_opsd.planning import planner
from verl_opsd.plugin import register_resolvers
from verl_opsd.verl_adapter.memory_checks import BRIEF, Need, check_memory, needs

STUDENT, TEACHER = shape_of("qwen3.5-9b"), shape_of("qwen3.5-27b")
H100 = planner.DEVICES["H100"].bytes_
EIGHT = ("scale=gpu8", "teacher=device", "opsd.teacher.path=somewhere")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    register_resolvers()
    monkeypatch.setenv("OPSD_RUN_DIR", "run")
    monkeypatch.setenv("OPSD_RAY_TMP", "tmp")

    def of(*overrides: str, device: float = H100) -> dict[str, Need]:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{conf_dir()}]", "+recipe=opd", *overrides])
        opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
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
def test_what_the_planner_refuses_is_refused(planned: Any, gb: int, context: int) -> None:
    """The planner may keep fewer activations than the engine does, so it refuses less."""
    device = planner.Device("some", gb * 1e9)
    try:
        planner.estimate(STUDENT, TEACHER, planner.Layout(4, 4), device, context, 32, BRIEF, planner.PART)
    except OpsdError:
        found = planned(*EIGHT, f"opsd.contract.context_length={context}", device=device.bytes_)
        assert set(fits(found)) & {"student", "teacher"}


@pytest.mark.parametrize(
    ("overrides", "side"),
    [
        (("opsd.contract.context_length=1000000",), "student"),
        (("actor_rollout_ref.model.enable_gradient_checkpointing=false",), "student"),
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
    whole = planned(*EIGHT)
    halves = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    assert planned(*EIGHT, halves)["student"].total < whole["student"].total
    offload = "actor_rollout_ref.model.enable_activation_offload=true"
    assert planned(*EIGHT, offload)["student"].total < whole["student"].total
    split = planned(*EIGHT, "opsd.teacher.ranks=2", "opsd.teacher.dtype=float32")
    assert fits(split) == []
    awake = planned(*EIGHT, "actor_rollout_ref.rollout.free_cache_engine=false")
    assert awake["student"].total == pytest.approx(whole["student"].total + 0.4 * H100)


def test_the_launch_check_names_side_parts_and_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    register_resolvers()
    monkeypatch.setenv("OPSD_RUN_DIR", "run")
    monkeypatch.setenv("OPSD_RAY_TMP", "tmp")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{conf_dir()}]", "+recipe=opd", *EIGHT])
    opsd = OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]
    assert check_memory(config, opsd) == []  # no accelerator here
    shapes = {"somewhere": KNOWN["qwen3.5-27b"]}
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda path: Qwen3_5TextConfig(**shapes.get(path, KNOWN["qwen3.5-9b"]))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = [int(H100), int(H100)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    assert len(check_memory(config, opsd)) == 4
    sizes[1] = int(48e9)  # the smallest device counts
    with pytest.raises(OpsdError) as caught:
        check_memory(config, opsd)
    text = str(caught.value)
    assert "scale=gpu8 on devices of 48 GB" in text and "GB (weights" in text and "way out:" in text
