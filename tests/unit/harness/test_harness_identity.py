"""Which harness runs: a hash over its files, and refusals that name what is found and what is needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import cooperbench
import pytest
import yaml

from verl_opsd.cooperbench import identity
from verl_opsd.errors import OpsdError

PACKAGE = Path(cooperbench.__file__).parent


def test_identity_names_version_and_files():
    found = identity.harness_identity()
    assert (found["name"], found["version"], found["file"]) == ("cooperbench", "0.0.29", cooperbench.__file__)
    files = subprocess.run(
        "find . -type f \\( -name '*.py' -o -name '*.yaml' -o -name '*.sh' \\) -printf '%P\\n'",
        shell=True,
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")[:-1]
    lines = [f"{name}\0{hashlib.sha256((PACKAGE / name).read_bytes()).hexdigest()}\n" for name in files]
    by_path = sorted(lines, key=lambda line: Path(line.split("\0")[0]).parts)
    assert found["tree_hash"] == hashlib.sha256("".join(by_path).encode()).hexdigest()
    assert identity.identity_string() == f"cooperbench==0.0.29@sha256:{found['tree_hash']}"


def test_configuration_is_the_packages_own_whatever_the_current_directory_holds(tmp_path, monkeypatch):
    (tmp_path / "coop.yaml").write_text("agent: {system_template: hijacked}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSWEA_CONFIG_DIR", str(tmp_path))
    original = yaml.safe_load((PACKAGE / "agents/mini_swe_agent_v2/config/coop.yaml").read_text())
    assert identity.coop_config() == original and "hijacked" not in str(original)


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OpsdError) as caught:
        identity.package_dir()
    assert "pip install --no-deps cooperbench==0.0.29" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "value", "named"),
    [
        ("cooperbench.__version__", "0.0.25", "version 0.0.29"),
        ("cooperbench.agents.mini_swe_agent_v2.agents.default.GIT_REMOTE", "team", "default.GIT_REMOTE == 'origin'"),
        (
            "cooperbench.agents.mini_swe_agent_v2.connectors.git.GitConnector.REMOTE_NAME",
            "team",
            "GitConnector.REMOTE_NAME",
        ),
        (
            "cooperbench.agents.mini_swe_agent_v2.agents.default.DefaultAgent.execute_actions",
            lambda self, message: None,
            "parse guard",
        ),
    ],
)
def test_a_harness_without_a_capability_is_refused(monkeypatch, target, value, named):
    monkeypatch.setattr(target, value)
    with pytest.raises(OpsdError) as caught:
        identity.load_harness.__wrapped__()
    assert named in str(caught.value) and "0.0.29" in str(caught.value) and cooperbench.__version__ in str(caught.value)


def test_removed_capability_is_refused(monkeypatch):
    monkeypatch.delattr("cooperbench.eval.sandbox._is_test_path")
    with pytest.raises(OpsdError) as caught:
        identity.load_harness.__wrapped__()
    assert "eval.sandbox._is_test_path" in str(caught.value)


def test_import_reads_no_settings_of_the_user_and_fetches_nothing(tmp_path):
    """In a fresh process with a home that holds a settings file of the harness."""
    settings = tmp_path / ".config" / "mini-swe-agent"
    settings.mkdir(parents=True)
    (settings / ".env").write_text("MSWEA_PLANTED=1\n")
    code = (
        "import os; from verl_opsd.cooperbench.identity import load_harness; load_harness();"
        "print(os.environ.get('MSWEA_PLANTED'), os.environ.get('MSWEA_GLOBAL_CONFIG_DIR'))"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LITELLM", "XDG", "MSWEA"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "None None"
    assert "model cost map" not in done.stderr
