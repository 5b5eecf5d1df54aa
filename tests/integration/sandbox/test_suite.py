"""The contract suite over every backend: bubblewrap, process, Docker's adapter over namespaces, and Docker and Modal where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_opsd.cli.main import main
from verl_opsd.cooperbench.sandbox import BACKENDS, SandboxSpec, make_sandbox, unavailable
from verl_opsd.cooperbench.sandbox.suite import ISOLATED, SUITE, Broken, opened, run_suite
from verl_opsd.errors import InfraFault, OpsdError

STAND_IN = Path(__file__).parent / "namespace_docker.py"
HERE = (*BACKENDS, "docker over namespaces")
LONG = ("sixteen sandboxes at once", "commands run at once", "closing ends a running command, and is not undone")
CASES = [
    pytest.param(backend, name, marks=[pytest.mark.slow] * (backend == HERE[-1] and name in LONG))
    for backend in HERE
    for name in SUITE
]


@pytest.fixture
def namespaces(tmp_path, monkeypatch):
    """Puts the stand-in on PATH as `docker`; its state directory."""
    if os.geteuid() or unavailable("bubblewrap"):
        pytest.skip("a docker of namespaces needs root and a host that permits them")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {STAND_IN} "$@"\n')
    program.chmod(0o755)
    state = tmp_path / "containers"
    state.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("NAMESPACE_DOCKER", str(state))
    yield state
    assert list(state.iterdir()) == [], "a container is still there"


@pytest.fixture
def backend(request) -> str:
    """A backend that this machine has; the reason is printed where it has not."""
    if request.param == "docker over namespaces":
        request.getfixturevalue("namespaces")
        return "docker"
    if reason := unavailable(request.param):
        pytest.skip(f"{request.param} is unverified here: {reason}")
    return request.param


@pytest.mark.parametrize(("backend", "name"), CASES, indirect=["backend"])
def test_contract(backend, name):
    if backend == "process" and name in ISOLATED:
        pytest.skip("plain processes isolate nothing, as their name says")
    with opened(backend, allow_unsafe=backend == "process") as open_:
        SUITE[name](open_)


def test_a_broken_backend_is_found_out(monkeypatch):
    """Each check can fail: a sandbox that ignores limits, input, environment and directory passes almost none."""

    class Careless:
        def __init__(self, spec):
            self.spec = spec

        def run(self, argv, *, timeout_s, cwd="/", env=None, stdin=None):
            from verl_opsd.cooperbench.sandbox import CommandResult

            done = subprocess.run(["echo", "ran"], capture_output=True)
            return CommandResult(0, done.stdout, False, False, 0.0)

        def close(self):
            pass

    monkeypatch.setattr("verl_opsd.cooperbench.sandbox.make_sandbox", lambda backend, spec, **_: Careless(spec))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    kept = [name for name, ok, _ in run_suite("bubblewrap") if ok]
    assert set(kept) <= set(ISOLATED) and len(SUITE) >= 14


def docker(tmp_path: Path, name: str = "one"):
    (tmp_path / name / "repo").mkdir(parents=True)
    return make_sandbox("docker", SandboxSpec(name, tmp_path / name))


def test_a_container_that_dies_is_a_fault_and_is_not_replaced(namespaces, tmp_path):
    sandbox = docker(tmp_path)
    sandbox.run(["bash", "-c", "echo work > ~/work"], timeout_s=20)
    state = json.loads((namespaces / sandbox.name / "state.json").read_text())
    os.kill(state["init"], 9)
    for _ in range(2):
        with pytest.raises(InfraFault) as fault:
            sandbox.run(["bash", "-c", "ls"], timeout_s=20)
        assert fault.value.kind == "sandbox_died" and "files with it" in str(fault.value)
    sandbox.close()


def test_a_daemon_that_goes_away_is_unreachable(namespaces, tmp_path, monkeypatch):
    sandbox = docker(tmp_path)
    program = Path(os.environ["PATH"].split(":")[0]) / "docker"
    real = program.read_text()
    program.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    with pytest.raises(InfraFault) as fault:
        sandbox.run(["true"], timeout_s=20)
    assert fault.value.kind == "sandbox_unreachable" and "Cannot connect" in str(fault.value)
    with pytest.raises(InfraFault) as fault:
        docker(tmp_path, "two")
    assert fault.value.kind == "sandbox_unreachable" and "Cannot connect" in str(fault.value)
    with pytest.raises(InfraFault) as fault:
        sandbox.close()  # an exit code of `docker rm` would not have told
    assert fault.value.kind == "cleanup"
    program.write_text(real)
    sandbox.close()


def test_containers_of_dead_owners_are_removed(namespaces, tmp_path):
    code = "import os, sys; from pathlib import Path; from verl_opsd.cooperbench.sandbox import *\n"
    code += "s = make_sandbox('docker', SandboxSpec('x', Path(sys.argv[1]))); print(s.name, flush=True); os._exit(0)"
    (tmp_path / "owned").mkdir()
    left = subprocess.run([sys.executable, "-c", code, tmp_path / "owned"], capture_output=True, text=True, check=True)
    assert (namespaces / left.stdout.strip()).is_dir()
    docker(tmp_path).close()
    assert not (namespaces / left.stdout.strip()).exists()


def test_what_a_container_cannot_hide_is_refused(namespaces, tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "data" / "gold").mkdir(parents=True)
    spec = SandboxSpec("x", tmp_path / "w", ro_binds=((tmp_path / "data", "/data"),), hidden=(tmp_path / "data" / "gold",))
    with pytest.raises(OpsdError, match="can't cover"):
        make_sandbox("docker", spec)


def test_modal_without_a_token_and_with_a_shared_directory(tmp_path, monkeypatch):
    (tmp_path / "w").mkdir()
    if reason := unavailable("modal"):
        with pytest.raises(OpsdError, match="token"):
            make_sandbox("modal", SandboxSpec("x", tmp_path / "w"))
        assert "token" in reason
    monkeypatch.setattr("verl_opsd.cooperbench.sandbox.modal.missing", lambda: "")
    with pytest.raises(OpsdError, match="share no directory"):
        make_sandbox("modal", SandboxSpec("x", tmp_path / "w", rw_binds=((tmp_path / "w", "/git"),)))


def test_the_doctor_runs_the_suite_and_its_exit_code_says_how_it_went(monkeypatch, capsys):
    """Of docker and Modal where they are not there, and over namespaces with one check that fails."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", "--sandbox", "docker"]) == 1
    assert "NO  docker is here: no `docker` on PATH" in capsys.readouterr().out
    monkeypatch.setattr("modal.config.config", {})
    assert main(["doctor", "--sandbox", "modal"]) == 1
    assert "NO  modal is here: no Modal token" in capsys.readouterr().out

    def broken(open_):
        raise Broken("as expected")

    monkeypatch.setattr("verl_opsd.cooperbench.sandbox.unavailable", lambda backend: "")
    monkeypatch.setattr("verl_opsd.cooperbench.sandbox.suite.SUITE", {"one": lambda open_: None, "two": broken})
    assert main(["doctor", "--sandbox", "docker"]) == 1
    out, err = capsys.readouterr()
    assert "ok  one" in out and "NO  two: Broken: as expected" in out and "1 checks failed" in err
    monkeypatch.setattr("verl_opsd.cooperbench.sandbox.suite.SUITE", {"one": lambda open_: None})
    assert main(["doctor", "--sandbox", "docker"]) == 0


def test_the_page_says_what_the_backends_do():
    page = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text()
    for name, t in BACKENDS.items():
        word = "passes" if t.verified else "unverified"
        assert f"| `{name}` | {t.processes} | {t.network} | {t.files} | {t.limits} | {word} |" in page
