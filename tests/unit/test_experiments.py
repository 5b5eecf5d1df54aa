"""The presets compose and say what the runs on record were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_opsd.config import OpsdConfig
from verl_opsd.paths import conf_dir

PRESETS = {  # name: (brief, teacher, epochs, anchor, threshold)
    "r0": ("peer_spec", "device", 3, 0.0, None),
    "r2_masked": ("peer_spec", "device", 1, 0.0, 0.05),
    "r3": ("workflow+gold_patch", "device", 1, 0.0, None),
    "self": ("workflow+gold_patch", "self", 1, 0.0, None),
    "proto": ("workflow", "device", 3, 0.0, None),
    "negotiate": ("menu_measured", "device", 3, 0.0, None),
    "anchored": ("workflow", "device", 2, 0.5, None),
    "roles": ("role_context_only", "device", 1, 0.0, None),
    "control_unbriefed": ("none", "device", 1, 0.0, None),
    "control_identity": ("none", "self", 1, 0.0, None),
    "control_wrong_task": ("wrong_task", "device", 1, 0.0, None),
}


@pytest.fixture(scope="module")
def compose() -> Iterator:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=opd"])
        patch.setenv("OPSD_RUN_DIR", "/run")
        patch.setenv("OPSD_RAY_TMP", "/ray")
        import verl  # noqa: F401

        with initialize_config_module("verl.trainer.config", version_base=None):
            yield lambda *overrides: hydra_compose("ppo_trainer", list(overrides), return_hydra_config=True)


def test_every_preset_is_tested() -> None:
    assert {p.stem for p in (conf_dir() / "experiment").glob("seeds_*.yaml")} == {f"seeds_{n}" for n in PRESETS}


@pytest.mark.parametrize("recipe", [["+recipe=opd"], ["+recipe=opd_offline", "corpus=C", "scale=gpu2"]])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_compose(name: str, recipe: list[str], compose, tmp_path: Path) -> None:
    from verl_opsd.verl_adapter.launch import parse

    brief, teacher, epochs, _anchor, _threshold = PRESETS[name]
    files = [f"opsd.brief.files={tmp_path}"] if "workflow" in brief else []
    config = compose(*recipe, f"+experiment=seeds_{name}", *files)
    opsd: OpsdConfig = parse(config)
    above = opsd.loss.threshold.above if opsd.loss.threshold else None
    assert (opsd.brief.name, opsd.teacher.kind, opsd.loss.epochs, opsd.loss.anchor, above) == PRESETS[name]
    assert opsd.brief.placement == "last_user" and opsd.brief.allow_answer == ("workflow" in brief)
    assert opsd.teacher.path == ("Qwen/Qwen3.5-27B" if teacher == "device" else None)
    assert (opsd.loss.divergence, opsd.loss.support, opsd.loss.top_k, opsd.loss.max_prefix) == (
        "reverse_kl",
        "student_topk",
        20,
        16384,
    )
    model = config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, config.actor_rollout_ref.actor.optim.lr) == (32, 64, 5e-5)
    assert sorted(model.target_modules) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config.actor_rollout_ref.actor.ppo_epochs == epochs


ARMS = {  # name: (brief, teacher beside teacher=frozen, divergence)
    "role_context_only": ("role_context_only", "frozen", "reverse_kl"),
    "role_announce": ("role_announce", "frozen", "reverse_kl"),
    "role_owner": ("role_owner", "frozen", "reverse_kl"),
    "role_negotiate": ("role_negotiate", "frozen", "reverse_kl"),
    "wrong_task": ("wrong_task", "frozen", "reverse_kl"),
    "unbriefed": ("none", "frozen", "reverse_kl"),
    "identity": ("none", "self", "reverse_kl"),
    "sft": ("none", "self", "nll"),
}


def test_every_arm_is_tested() -> None:
    assert {p.stem for p in (conf_dir() / "arm").glob("[a-z]*.yaml")} == set(ARMS)


@pytest.mark.parametrize("name", ARMS)
def test_arms_change_the_teacher_and_nothing_else(name: str, compose) -> None:
    import dataclasses

    from verl_opsd.verl_adapter.launch import parse
    from verl_opsd.verl_adapter.objective import is_identity

    base = ["+recipe=opd_offline", "corpus=C", "scale=gpu2", "teacher=frozen", "actor_rollout_ref.model.path=/m"]
    plain, arm = (parse(compose(*base, *more)) for more in ([], [f"+arm={name}"]))
    assert (arm.brief.name, arm.teacher.kind, arm.loss.divergence) == ARMS[name]
    back = dataclasses.replace(
        arm,
        brief=dataclasses.replace(arm.brief, name=plain.brief.name),
        teacher=plain.teacher,
        loss=dataclasses.replace(arm.loss, divergence=plain.loss.divergence),
    )
    assert back == plain
    assert is_identity(arm) == (name == "identity")


def test_an_arm_of_a_preset(compose) -> None:
    from verl_opsd.verl_adapter.launch import parse

    sft = parse(compose("+recipe=opd_offline", "corpus=C", "scale=gpu2", "+experiment=seeds_r0", "+arm=sft"))
    assert (sft.loss.divergence, sft.loss.support, sft.loss.epochs, sft.loss.max_prefix) == ("nll", "full", 3, 16384)


def test_the_role_ablation_is_a_sweep_over_four_arms(compose) -> None:
    from verl_opsd.privilege.library import ROLES

    config = compose("+recipe=opd", "+experiment=seeds_roles")
    assert config.hydra.sweeper.params["opsd.brief.name"].split(",") == list(ROLES)


def test_a_preset_without_its_workflows_is_refused(compose) -> None:
    from verl_opsd.errors import OpsdError
    from verl_opsd.verl_adapter.launch import parse

    with pytest.raises(OpsdError, match=r"files"):
        parse(compose("+recipe=opd_offline", "corpus=C", "+experiment=seeds_r3"))


def test_scales_without_accelerator_use_huge_pages_unless_the_user_says_otherwise(compose, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("PYTHONMALLOC", "pymalloc")
    found = compose("+recipe=opd", "scale=local").hydra.job.env_set
    assert "glibc.malloc.hugetlb=1" in found.GLIBC_TUNABLES.split(":") and found.PYTHONMALLOC == "pymalloc"
    gpu = compose("+recipe=opd", "scale=gpu2", "actor_rollout_ref.model.path=/m", "teacher=self").hydra.job.env_set
    assert "GLIBC_TUNABLES" not in gpu


def test_an_experiment_of_ones_own(compose, tmp_path: Path) -> None:
    """A folder beside the project's own, as --config-dir names one; groups and keys of the recipe are overridden."""
    from verl_opsd.verl_adapter.launch import parse

    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /loss: anchored\nopsd:\n  loss:\n    clip: 2.0\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    opsd: OpsdConfig = parse(compose("+recipe=opd", "+experiment=mine", f"hydra.searchpath=[file://{tmp_path}]"))
    plain: OpsdConfig = parse(compose("+recipe=opd"))
    assert (plain.loss.clip, opsd.loss.clip) == (None, 2.0) and opsd.loss.anchor > plain.loss.anchor == 0.0
