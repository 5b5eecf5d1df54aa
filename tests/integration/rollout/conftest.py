"""The tiny student, and verl's own configuration for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from verl_opsd.models.tiny import make_tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def compose_config() -> Callable[..., DictConfig]:
    """``compose_config(model_path, backend, *overrides)``: the config as main_ppo composes it."""
    from hydra import compose, initialize_config_module

    def build(model_path: Path, backend: str, *overrides: str) -> DictConfig:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose(
                "ppo_trainer",
                [
                    f"actor_rollout_ref.model.path={model_path}",
                    f"actor_rollout_ref.rollout.name={backend}",
                    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                    "actor_rollout_ref.rollout.dtype=float32",
                    "actor_rollout_ref.rollout.max_model_len=2048",
                    "+actor_rollout_ref.rollout.engine_kwargs.opsd.threads=1",
                    *overrides,
                ],
            )

    return build
