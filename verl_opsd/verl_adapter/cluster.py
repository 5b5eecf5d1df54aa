"""The Ray cluster of a run: its own, or one that is there, that answers, and of which nothing is asked that only a new one takes."""

from __future__ import annotations

import os
import socket
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.errors import OpsdError

#: Arguments of ``ray.init`` that start a cluster; Ray refuses them beside an address.
OF_A_NEW_ONE = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
#: Seconds in which a cluster's head answers.
TIMEOUT_S = 5.0


def check_ray(config: DictConfig) -> None:
    """A run starts a Ray cluster of its own, or joins the one that is named; which one, the configuration says.

    Raises:
        OpsdError: the environment names a cluster that the configuration does not join, several nodes without a cluster, none to join,
            several, one that does not answer, or arguments that don't go with one.
    """
    given: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init)  # type: ignore[assignment]
    named, address = os.environ.get("RAY_ADDRESS", ""), given.get("address")
    if address in (None, "local"):
        _require_own(named, config.trainer.nnodes)
        return
    address = _answering(named, str(address))
    sizes = [k for k in OF_A_NEW_ONE if given.get(k) is not None]
    run = ((config.ray_kwargs.ray_init.get("runtime_env") or {}).get("env_vars") or {}).get("OPSD_RUN_DIR")
    if sizes or run != os.environ["OPSD_RUN_DIR"]:
        what = f"ray_kwargs.ray_init.{{{', '.join(sizes)}}}" if sizes else f"runtime_env.env_vars.OPSD_RUN_DIR={run}"
        raise OpsdError(
            f"ray_kwargs.ray_init.address={address} with {what}",
            "a cluster that runs says itself what it has, and its processes know of this run what goes with it",
            "leave these keys out, and give RAY_ADDRESS=HOST:PORT and +ray=attached, which sets them",
        )


def _require_own(named: str, nodes: int) -> None:
    if named:
        raise OpsdError(
            f"RAY_ADDRESS={named} and a run that starts its own Ray cluster",
            "Ray joins the named cluster, and then refuses the sizes that this scale sets for its own",
            "add +ray=attached to join it, or unset RAY_ADDRESS",
        )
    if nodes > 1:
        raise OpsdError(
            f"trainer.nnodes={nodes} without a Ray cluster",
            "a run that starts its own starts it on this host alone",
            "run `ray start` on every node and give RAY_ADDRESS=HOST:PORT and +ray=attached, or set trainer.nnodes=1",
        )


def _answering(named: str, address: str) -> str:
    """HOST:PORT of the cluster that is joined."""
    from ray._private.services import find_gcs_addresses
    from ray.exceptions import AuthenticationError

    found = {address} if address != "auto" else {named} if named else set(find_gcs_addresses())
    host, _, port = next(iter(found), "").rpartition(":")
    try:
        if len(found) != 1 or not host or not port.isdigit() or int(port) > 65535:
            raise ConnectionError(f"clusters of this host: {', '.join(sorted(found)) or 'none'}")
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
        _greet(f"{host}:{port}")
    except AuthenticationError as error:
        raise OpsdError(
            f"+ray=attached: the Ray cluster {host}:{port} wants a token, and this process sends none or another one",
            "Ray sends its token to a cluster that is named only when it is told to",
            "set RAY_AUTH_MODE=token; the token is that of ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        ) from error
    except OSError as error:
        key = f"+ray=attached with RAY_ADDRESS={named}" if address == "auto" else f"ray_kwargs.ray_init.address={address}"
        raise OpsdError(
            f"{key}: {error}",
            "a run joins the one cluster that RAY_ADDRESS=HOST:PORT names, or the only one of this host",
            "start it (`ray start --head`) and name it, or leave out +ray=attached",
        ) from error
    return f"{host}:{port}"


def _greet(address: str) -> None:
    """Asks a Ray cluster for its identity."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    GcsClient(address=address)
