"""How devices are shared between student and device teacher, and what the launch checks refuse about a teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl_opsd.cli.plan import shape_of
from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.paths import conf_dir
from verl_opsd.planning import memory, planner
from verl_opsd.plugin import register_resolvers
from verl_opsd.teachers.server import Capabilities, ServerTeacher
from verl_opsd.verl_adapter.requirements import check_hardware
from verl_opsd.verl_adapter.teacher_checks import check_teachers, teacher_positions


@pytest.fixture(scope="module", autouse=True)
def resolvers() -> None:
    register_resolvers()


def composed(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[DictConfig, OpsdConfig]:
    monkeypatch.setenv("OPSD_RUN_DIR", "run")
    monkeypatch.setenv("OPSD_RAY_TMP", "tmp")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{conf_dir()}]", "+recipe=opd", *overrides])
    return config, OpsdConfig.parse(OmegaConf.to_container(config.opsd, resolve=True))  # type: ignore[arg-type]


TEACHER = ("teacher=device", "opsd.teacher.path=somewhere")


@pytest.mark.parametrize(
    ("overrides", "student", "teacher", "batch"),
    [
        (("scale=gpu1",), 1, 0, 8),
        (("scale=gpu2",), 2, 0, 8),
        (("scale=gpu8",), 8, 0, 8),
        (("scale=gpu2", *TEACHER), 1, 1, 8),
        (("scale=gpu8", *TEACHER), 4, 4, 8),
        (("scale=gpu8", *TEACHER, "opsd.teacher.devices=2"), 6, 2, 12),
    ],
)
def test_devices_of_a_scale(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], student: int, teacher: int, batch: int
) -> None:
    config, opsd = composed(monkeypatch, *overrides)
    assert (config.trainer.n_gpus_per_node, config.data.train_batch_size) == (student, batch)
    assert batch % student == 0
    assert (opsd.teacher.devices if opsd.teacher.kind == "device" else 0) == teacher
    assert opsd.teacher.dtype == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for have in range(student + teacher + 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda have=have: have)
        if have >= student + teacher:
            check_hardware(config, opsd)
        else:
            with pytest.raises(OpsdError, match=f"this scale needs {student + teacher}: {student} for the student"):
                check_hardware(config, opsd)


def test_eight_devices_are_laid_out_as_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the context of the scale's own contract, on the device that the recipe is for; the rehearsal has the same layout."""
    config, opsd = composed(monkeypatch, "scale=gpu8", *TEACHER)
    student, teacher = shape_of("qwen3.5-9b"), shape_of("qwen3.5-27b")
    rank, context = config.actor_rollout_ref.model.lora_rank, opsd.contract.context_length
    found = [
        planner.estimate(student, teacher, layout, planner.DEVICES["H100"], context, rank, 4096, memory.PART)
        for layout in planner.layouts(8)
    ]
    chosen = planner.best(found).layout
    assert (config.trainer.n_gpus_per_node, opsd.teacher.devices) == (chosen.student, chosen.teacher)
    rehearsal, its = composed(monkeypatch, "scale=cpu8", *TEACHER)
    for key in ("trainer.n_gpus_per_node", "data.train_batch_size", "trainer.save_freq", "actor_rollout_ref.actor.strategy"):
        assert OmegaConf.select(rehearsal, key) == OmegaConf.select(config, key)
    assert its.teacher.devices == opsd.teacher.devices and rehearsal.ray_kwargs.ray_init.num_gpus == 8


@pytest.mark.parametrize("overrides", [("scale=gpu1", *TEACHER), ("scale=gpu2", *TEACHER, "opsd.teacher.devices=2")])
def test_no_device_left_for_the_student(monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]) -> None:
    config, opsd = composed(monkeypatch, *overrides)
    with pytest.raises(OpsdError, match="leaves 0 for the student"):
        check_hardware(config, opsd)


def test_more_devices_than_the_scale_has_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config, opsd = composed(monkeypatch, "scale=gpu8", *TEACHER, "trainer.n_gpus_per_node=8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(OpsdError, match="this scale needs 12"):
        check_hardware(config, opsd)


@pytest.mark.parametrize(("more", "slots"), [((), 1), (TEACHER, 2), ((*TEACHER, "opsd.teacher.devices=3"), 4)])
def test_slots_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], slots: int) -> None:
    config, opsd = composed(monkeypatch, "scale=local", *more)
    assert config.ray_kwargs.ray_init.num_gpus == slots and config.trainer.n_gpus_per_node == 1
    assert opsd.teacher.dtype == "float32"
    check_hardware(config, opsd)


@pytest.mark.parametrize("bad", ["opsd.teacher.devices=0", "opsd.teacher.dtype=int8"])
def test_teacher_values_are_checked(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    with pytest.raises(OpsdError, match=bad.split("=")[0]):
        composed(monkeypatch, "scale=local", *TEACHER, bad)


def test_teacher_must_read_the_students_ids_and_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    student, wide = (make_tiny(tmp_path / n, seed=1, hidden_size=h) for n, h in (("student", 64), ("wide", 96)))
    _, opsd = composed(monkeypatch, "scale=local", *TEACHER)

    def check(path: Path, **contract: Any) -> None:
        changed = dataclasses.replace(
            opsd,
            teacher=dataclasses.replace(opsd.teacher, path=str(path)),
            contract=dataclasses.replace(opsd.contract, **contract),
        )
        check_teachers(changed, str(student))

    check(wide)
    with pytest.raises(OpsdError, match="16384 tokens"):
        check(wide, context_length=16385)
    with pytest.raises(OpsdError, match="holds no config"):
        check(tmp_path / "nowhere")
    config = wide / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 2048', '"vocab_size": 2049'))
    with pytest.raises(OpsdError, match="2049 vocabulary rows"):
        check(wide)


@pytest.mark.parametrize(("served", "fits"), [(9000, 8999), (20000, 16384), (None, 16384)])
def test_a_servers_length_bounds_the_views(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: int | None, fits: int
) -> None:
    """Of what it serves one token is the reply's; the model's own positions bound it as well."""
    path = make_tiny(tmp_path / "student", seed=1)

    async def probe(self: ServerTeacher) -> Capabilities:
        return Capabilities("m", served, 0.0, torch.zeros(1))

    monkeypatch.setattr(ServerTeacher, "probe", probe)
    server = ("teacher=server", f"opsd.teacher.path={path}", "opsd.teacher.url=http://x", "opsd.loss.support=teacher_topk")
    _, opsd = composed(monkeypatch, "scale=local", *server, "opsd.loss.top_k=5", "opsd.contract.context_length=8999")
    assert teacher_positions(opsd, str(path)) == fits
    check_teachers(opsd, str(path))
    if served == 9000:
        longer = dataclasses.replace(opsd, contract=dataclasses.replace(opsd.contract, context_length=9000))
        with pytest.raises(OpsdError, match="a context of 8999 tokens"):
            check_teachers(longer, str(path))
