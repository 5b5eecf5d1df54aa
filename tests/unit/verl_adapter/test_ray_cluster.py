"""Which Ray cluster a run uses: its own, or the one that the environment names and the configuration joins."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from ray._private import services
from ray.exceptions import AuthenticationError

from verl_opsd.errors import OpsdError
from verl_opsd.paths import conf_dir
from verl_opsd.plugin import register_resolvers
from verl_opsd.verl_adapter import cluster
from verl_opsd.verl_adapter.cluster import check_ray
from verl_opsd.verl_adapter.keys import check_keys


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Any:
    register_resolvers()
    monkeypatch.setenv("OPSD_RUN_DIR", "run")
    monkeypatch.setenv("OPSD_RAY_TMP", "tmp")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set())

    def of(*overrides: str) -> DictConfig:
        with initialize_config_module("verl.trainer.config", version_base=None):
            given = [f"hydra.searchpath=[file://{conf_dir()}]", "+recipe=opd", "scale=local", *overrides]
            return compose("ppo_trainer", overrides=given)

    return of


def test_a_run_that_joins_brings_no_sizes_and_hands_its_environment_on(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNRELATED", "1")
    config = composed("+ray=attached")
    check_keys(config)
    init = config.ray_kwargs.ray_init
    sizes = ("num_cpus", "num_gpus", "object_store_memory", "_temp_dir")
    assert init.address == "auto" and [init[k] for k in sizes] == [None] * 4
    # verl merges what it reads this way into its own
    variables = OmegaConf.merge(
        {"env_vars": {"NCCL_DEBUG": "WARN"}}, config.ray_kwargs.get("ray_init", {}).get("runtime_env", {})
    ).env_vars
    plain = OmegaConf.to_container(variables)
    assert plain["OPSD_RUN_DIR"] == "run" and plain["NCCL_DEBUG"] == "WARN" and "UNRELATED" not in plain
    whole = OmegaConf.masked_copy(config, "ray_kwargs")
    OmegaConf.resolve(whole)  # as verl's own validation and its TaskRunner do
    assert whole.ray_kwargs.ray_init.runtime_env.env_vars.OPSD_RUN_DIR == "run"
    own = composed().ray_kwargs.ray_init
    assert own.num_gpus == 1 and own.get("address") is None


def refuses(address: str) -> None:
    raise AuthenticationError("the token is missing")


def test_a_named_cluster_is_joined_or_refused_and_never_in_silence(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    greeted: list[str] = []
    monkeypatch.setattr(cluster, "_greet", greeted.append)
    check_ray(composed())
    with pytest.raises(OpsdError, match="clusters of this host: none"):
        check_ray(composed("+ray=attached"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        address = f"127.0.0.1:{s.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_ray(composed("+ray=attached"))
        assert greeted == [address]
        with monkeypatch.context() as patch, pytest.raises(OpsdError, match="set RAY_AUTH_MODE=token"):
            patch.setattr(cluster, "_greet", refuses)
            check_ray(composed("+ray=attached"))
        with pytest.raises(OpsdError, match=r"add \+ray=attached"):
            check_ray(composed())
    with pytest.raises(OpsdError, match=f"RAY_ADDRESS={address}"):  # nobody listens any more
        check_ray(composed("+ray=attached"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://host:10001")
    with pytest.raises(OpsdError, match="RAY_ADDRESS=ray://host:10001"):
        check_ray(composed("+ray=attached"))
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.1:1", "10.0.0.2:1"})
    with pytest.raises(OpsdError, match=r"10\.0\.0\.1:1, 10\.0\.0\.2:1"):
        check_ray(composed("+ray=attached"))
