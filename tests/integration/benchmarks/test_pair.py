"""benchmarks/pair.py and benchmarks/layers.py run, with tiny shapes, and write every row that they promise."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_every_part_runs(devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    out = tmp_path / "table.txt"
    importlib.import_module("pair").main(["--tiny", "--devices", devices, "--out", str(out)])
    table = out.read_text()
    pair = "pair, one after the other" if devices == "1" else "pair, side by side"
    for what in (
        "per turn, top 20",
        "plain student",
        "plain teacher",
        " student ",
        " teacher ",
        pair,
        "times the layout per turn",
    ):
        assert what in table
    assert "not run" not in table and "out of memory" not in table


def test_kernels_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    out = tmp_path / "table.txt"
    importlib.import_module("layers").main(["--tiny", "--out", str(out)])
    table = out.read_text()
    for what in (
        "gradient check",
        "linear_attention layer, fused",
        "full_attention layer, transformers",
        "delta rule",
    ):
        assert what in table
    assert "failed" not in table and "out of memory" not in table
    cosines = [float(line.rsplit(" ", 1)[1]) for line in table.splitlines() if "gradient cosine" in line]
    assert len(cosines) == 2 and min(cosines) > 0.99


def test_an_operations_backward_adds_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is added to an earlier one costs more time than it takes to make some of them. Those of weights are made too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    layers, table = importlib.import_module("layers"), importlib.import_module("workload").Table(None)
    weight, seen, made = torch.ones(3, requires_grad=True), [], []
    weight.register_hook(made.append)

    def work(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x[places] * weight

    layers.Operations(table, torch.device("cpu")).row("product", work, [torch.randn(4, 3), torch.arange(4)], [weight])
    assert "failed" not in table.lines[0] and all(x.requires_grad and x.grad is None for x in seen)
    assert weight.grad is None and len(made) == 2  # the warm run's and the timed one's
