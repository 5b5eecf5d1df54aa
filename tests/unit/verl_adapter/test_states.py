"""The hash of an update's states: the same rows in the same order, and nothing else, give the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import guards
from verl_opsd.verl_adapter.passes import jagged

ROWS = {"a": ([5, 6, 7, 8], [1, 2]), "b": ([9, 9], []), "c": ([1, 2, 3], [0])}


def detail_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str, rows: dict[str, tuple[list[int], list[int]]], padding: str = ""
) -> tuple[int, str]:
    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        columns = zip(*(rows[k] for k in keys), strict=True)
        fields = {
            f: jagged([torch.tensor(v, dtype=torch.int64) for v in c]) for f, c in zip(select_fields, columns, strict=True)
        }
        return TensorDict(fields, batch_size=len(keys))

    monkeypatch.setattr(guards.tq, "kv_batch_get", get)
    run = RunDir(tmp_path)
    batch = SimpleNamespace(keys=list(keys), tags=[{"is_padding": k in padding} for k in keys], partition_id="train")
    guards.states(SimpleNamespace(run_dir=run), batch)  # type: ignore[arg-type]
    line = json.loads((tmp_path / "evidence.jsonl").read_text().splitlines()[-1])
    assert line["gate"] == "states" and line["verdict"] == "recorded"
    return line["value"], line["detail"]


def test_order_rows_and_positions_decide_and_padding_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = detail_of(tmp_path, monkeypatch, "abc", ROWS)
    assert whole[0] == 3 and whole[1].startswith("loss positions of 3 rows, sha256 ")
    assert detail_of(tmp_path, monkeypatch, "abc", ROWS) == whole
    assert detail_of(tmp_path, monkeypatch, "abcx", ROWS | {"x": ([0], [])}, padding="x") == whole
    others = [
        detail_of(tmp_path, monkeypatch, "acb", ROWS),
        detail_of(tmp_path, monkeypatch, "ac", ROWS),
        detail_of(tmp_path, monkeypatch, "abc", ROWS | {"c": ([1, 2, 4], [0])}),
        detail_of(tmp_path, monkeypatch, "abc", ROWS | {"a": ([5, 6, 7, 8], [1, 3])}),
        detail_of(tmp_path, monkeypatch, "abc", ROWS | {"a": ([5, 6, 7], [1, 2]), "b": ([8, 9, 9], [])}),
    ]
    assert len({whole, *others}) == 6
