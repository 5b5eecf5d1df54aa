"""benchmarks/sandbox.py makes every start that its rows count."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_opsd.errors import InfraFault

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_starts_are_counted_and_failures_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("sandbox")
    made, closed = itertools.count(), []

    def make(backend: str, spec: Any) -> Any:
        number = next(made)
        if number == 10:  # one of those that are made at once
            raise InfraFault("sandbox_died", "what", "rule", "way out")
        return SimpleNamespace(run=lambda *a, **k: SimpleNamespace(returncode=0), close=lambda: closed.append(number))

    monkeypatch.setattr(module, "make_sandbox", make)
    plain, alone, together = module.starts(4)
    assert plain.split()[-3] == alone.split()[-3] == "4"
    assert "(1 failed)" in together and together.split()[-3] == "15"
    assert next(made) == 1 + 4 + 16 and len(closed) == 20
    assert module.row("x", [0.001, 0.002, 0.009]).split()[1:] == ["3", "2", "9"]


def test_a_first_command_that_fails_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("sandbox")
    dead = SimpleNamespace(run=lambda *a, **k: SimpleNamespace(returncode=1), close=lambda: None)
    monkeypatch.setattr(module, "make_sandbox", lambda *a: dead)
    with pytest.raises(SystemExit, match="first command failed"):
        module.start(tmp_path, 1)
