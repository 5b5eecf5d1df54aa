"""The comparison of runs by their ranks, on reports made by hand."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scaling.py"


@pytest.fixture(scope="module")
def scaling() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def report(folder: Path, ranks: int, **rates: float) -> Path:
    folder.mkdir()
    names = [f"student {n}" for n in range(ranks)]
    devices = {
        "idle": {"train": {n: 0.1 * (i + 1) for i, n in enumerate(names)} | {"teacher 0": 0.99}},
        "peak_bytes": {n: 10**9 * (i + 1) for i, n in enumerate(names)} | {"teacher 0": 10**12},
    }
    (folder / "report.json").write_text(json.dumps({"tokens_a_second": rates, "devices": devices}))
    return folder


def test_efficiency_is_a_ranks_share_of_the_smallest_run(scaling: Any, tmp_path: Path) -> None:
    read = scaling["Run"].read
    two, eight = read(report(tmp_path / "b", 2, train=100.0, score=50.0)), read(report(tmp_path / "a", 8, train=340.0))
    assert (two.ranks, eight.ranks) == (2, 8) and two.peak_bytes == 2 * 10**9 and two.idle == (0.1, 0.2)
    assert scaling["efficiency"](eight, two, "train") == pytest.approx(340 / 8 / (100 / 2))
    assert scaling["efficiency"](eight, two, "score") is None
    columns = [list(c.cells) for c in scaling["table"]([eight, two]).columns]
    assert columns[0] == ["b", "a"] and columns[1] == ["2", "8"]
    assert columns[3] == ["100, 100%", "340, 85%"] and columns[2] == ["50, 100%", "-"]


@pytest.mark.parametrize(
    "other", [{"branches": {"sequence_tokens": 9, "loss_tokens": 5}}, {"teacher": "self"}, {"brief": {"name": "none"}}]
)
def test_runs_of_other_rows_are_not_compared(scaling: Any, tmp_path: Path, other: dict[str, Any]) -> None:
    same = {"branches": {"sequence_tokens": 90, "loss_tokens": 5}, "teacher": "device", "brief": {"name": "peer_spec"}}
    folders = [report(tmp_path / name, ranks, train=100.0) for name, ranks in (("one", 1), ("two", 2), ("four", 4))]
    for folder, more in zip(folders, (same, same, same | other), strict=True):
        path = folder / "report.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    one, two, four = map(scaling["Run"].read, folders)
    assert list(scaling["table"]([two, one]).columns[0].cells) == ["one", "two"]
    with pytest.raises(SystemExit, match="four and one ran other rows"):
        scaling["table"]([two, four, one])
    with pytest.raises(SystemExit, match="no run"):
        scaling["table"]([])


@pytest.mark.parametrize(
    "content", [None, {}, {"tokens_a_second": {}, "devices": {"idle": {}, "peak_bytes": {"student 0": 1}}}]
)
def test_runs_without_figures_are_named(scaling: Any, tmp_path: Path, content: Any) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"report.json has no figures"):
        scaling["Run"].read(tmp_path)
