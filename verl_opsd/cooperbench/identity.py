"""Which harness runs: its version, its files, and the capabilities that this project relies on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError

NEEDED_VERSION = "0.0.29"
#: ``tree_hash`` of that version as it is published.
PUBLISHED_TREE = "045b16b6fd10af82e176d3373d99cc54f8eec8f19594cc3f8e8cf20674e4a864"
INSTALL = f"pip install --no-deps cooperbench=={NEEDED_VERSION}   (then: pip install 'verl-opsd[cooperbench]')"


@contextlib.contextmanager
def _quiet_import(package: Path) -> Iterator[None]:
    """On import the harness fetches a price list and reads a settings file of the user's; neither may decide a run."""
    wanted = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_GLOBAL_CONFIG_DIR": str(package / "agents" / "mini_swe_agent_v2" / "config"),
    }
    before = {k: os.environ.get(k) for k in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def package_dir() -> Path:
    """Directory of the installed harness, found without importing it.

    Raises:
        OpsdError: the package is not installed.
    """
    spec = importlib.util.find_spec("cooperbench")
    if spec is None or spec.origin is None:
        raise OpsdError(
            "the package cooperbench is not installed",
            f"agents run in the harness of cooperbench {NEEDED_VERSION}; on Python below 3.12 one of its dependencies, "
            "which is not used here, can't be installed",
            INSTALL,
        )
    return Path(spec.origin).parent


_import_lock = threading.Lock()


@functools.cache
def load_harness() -> Path:
    """Imports the harness (seconds, once a process) and checks it; returns its directory.

    Raises:
        OpsdError: it is missing, or lacks a capability.
    """
    package = package_dir()
    with _import_lock, _quiet_import(package):
        import cooperbench
        import cooperbench.agents.mini_swe_agent_v2.agents.default
        import cooperbench.agents.mini_swe_agent_v2.models.litellm_model
    failed = [name for name, check in _capabilities().items() if not check()]
    if failed:
        raise OpsdError(
            f"cooperbench {cooperbench.__version__} at {package} lacks: {', '.join(failed)}",
            f"the harness must be cooperbench {NEEDED_VERSION}: other versions submit, message or grade in another way",
            INSTALL,
        )
    return package


def _capabilities() -> dict[str, Callable[[], bool]]:
    """Named checks of what this project relies on in the harness."""
    import cooperbench
    from cooperbench.agents._coop import runtime
    from cooperbench.agents.mini_swe_agent_v2.agents import default
    from cooperbench.agents.mini_swe_agent_v2.connectors import git
    from cooperbench.agents.mini_swe_agent_v2.environments.docker import DockerEnvironment
    from cooperbench.agents.mini_swe_agent_v2.models.litellm_model import LitellmModel
    from cooperbench.eval import sandbox

    agent = default.DefaultAgent
    return {
        f"version {NEEDED_VERSION}": lambda: cooperbench.__version__ == NEEDED_VERSION,
        "GitConnector.REMOTE_NAME == 'origin'": lambda: git.GitConnector.REMOTE_NAME == "origin",
        "default.GIT_REMOTE == 'origin'": lambda: default.GIT_REMOTE == "origin",
        "GitConnector.submitted_patch": lambda: hasattr(git.GitConnector, "submitted_patch"),
        "connectors/gh_shim.sh": lambda: (Path(git.__file__).parent / "gh_shim.sh").is_file(),
        "eval.sandbox._is_test_path": lambda: hasattr(sandbox, "_is_test_path"),
        "parse guard of send_message": lambda: "could not parse that call" in inspect.getsource(agent.execute_actions),
        "send_message parser": lambda: callable(default._parse_send_messages) and callable(default._strip_send_message),
        "departure announced on every exit": lambda: "mark_exited" in inspect.getsource(agent.run),
        "hooks overridden by this project": lambda: all(
            hasattr(agent, n) for n in ("_nudge_unsubmitted", "_opened_pr", "_handle_send_message", "query")
        ),
        "end mark check": lambda: hasattr(DockerEnvironment, "_check_finished"),
        "summary transcript": lambda: hasattr(LitellmModel, "_serialize_transcript_for_summary"),
        "normalize_patch": lambda: hasattr(runtime, "normalize_patch"),
    }


def coop_config() -> dict[str, Any]:
    """The harness' own configuration of a pair: blocks ``agent``, ``environment`` and ``model``. Read from the package
    itself: the harness' loader would prefer a file of that name in the current directory."""
    import yaml

    return yaml.safe_load((package_dir() / "agents" / "mini_swe_agent_v2" / "config" / "coop.yaml").read_text())


@functools.cache
def harness_identity() -> dict[str, str]:
    """What runs: ``name``, ``version``, ``file``, ``tree_hash`` (SHA-256 of the package's .py, .yaml and .sh files) and
    ``templates_hash`` (SHA-256 of the prompt templates). The published files are known to have what is needed; others are
    imported and checked.

    Raises:
        OpsdError: as :func:`load_harness`.
    """
    package = package_dir()
    tree = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".yaml", ".sh") and p.is_file()):
        tree.update(f"{path.relative_to(package).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    if tree.hexdigest() != PUBLISHED_TREE:
        load_harness()
    config = coop_config()
    templates = {block: {k: v for k, v in config[block].items() if k.endswith("_template")} for block in ("agent", "model")}
    return {
        "name": "cooperbench",
        "version": NEEDED_VERSION,
        "file": str(package / "__init__.py"),
        "tree_hash": tree.hexdigest(),
        "templates_hash": hashlib.sha256(json.dumps(templates, sort_keys=True).encode()).hexdigest(),
    }


def identity_string() -> str:
    """Value of ``EvalContract.harness``: name, version and tree hash; the same wherever this package is installed."""
    identity = harness_identity()
    return f"{identity['name']}=={identity['version']}@sha256:{identity['tree_hash']}"
