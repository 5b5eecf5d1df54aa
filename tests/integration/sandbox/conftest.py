"""Sandboxes for the tests: made through ``make_sandbox``, closed at the end of each test."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_opsd.cooperbench.sandbox import Limits, Sandbox, SandboxSpec, make_sandbox
from verl_opsd.cooperbench.sandbox.host import require_host
from verl_opsd.errors import OpsdError

Make = Callable[..., Sandbox]
_numbers = itertools.count()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """``make(backend="bubblewrap", **fields of SandboxSpec)``: a sandbox whose workspace holds an empty ``repo``."""
    made: list[Sandbox] = []

    def build(backend: str = "bubblewrap", **fields) -> Sandbox:
        if backend == "bubblewrap":
            try:
                require_host()
            except OpsdError as error:
                pytest.skip(f"no bubblewrap sandbox on this host: {error}")
        number = next(_numbers)
        workspace = fields.pop("workspace", tmp_path / f"workspace{number}")
        (workspace / "repo").mkdir(parents=True, exist_ok=True)
        limits = dataclasses.replace(Limits(memory_bytes=512 << 20), **fields.pop("limits", {}))
        spec = SandboxSpec(f"test-{number}", workspace, limits=limits, **fields)
        made.append(make_sandbox(backend, spec, allow_unsafe=backend == "process"))
        return made[-1]

    yield build
    for sandbox in made:
        sandbox.close()


@pytest.fixture(params=["bubblewrap", "process"])
def sandbox(request: pytest.FixtureRequest, make: Make) -> Sandbox:
    """One sandbox of each backend."""
    return make(request.param)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the host's data set that anyone may read, with a text found nowhere else."""
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    path = tmp_path / "dataset" / "task1" / "feature1" / "gold.patch"
    path.parent.mkdir(parents=True)
    path.write_text(secrets.token_hex(16))
    return path


@pytest.fixture
def canary() -> Iterator[subprocess.Popen]:
    """A host process with a secret in its environment, which no attempt may read, trace or end."""
    process = subprocess.Popen(["sleep", "600"], env={"CANARY_SECRET": "canary-secret-4f1e"})
    yield process
    assert process.poll() is None, "the canary was killed"
    process.kill()
    process.wait()
