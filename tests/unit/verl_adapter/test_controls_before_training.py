"""Identity, negative and conditioning gates run before the first update, and stop it when they fail."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_opsd.config import BriefConfig, GatesConfig
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import guards
from verl_opsd.verl_adapter.passes import jagged

GATES = GatesConfig(identity_max=1e-6, shifted_min=1e-3, brief_effect_min=1e-5)


@pytest.mark.parametrize(
    ("brief", "identity", "shifted", "effect", "failing"),
    [
        ("peer_spec", 1e-7, 0.5, 1e-2, None),
        ("peer_spec", 1e-5, 0.5, 1e-2, "identity"),
        ("peer_spec", 1e-7, 1e-4, 1e-2, "identity_shifted"),
        ("peer_spec", 1e-7, 0.5, 1e-5, "brief_effect"),
        ("peer_spec", 1e-7, 0.5, float("nan"), "brief_effect"),
        ("none", 1e-7, 0.5, 0.0, None),
    ],
)
def test_gates(brief, identity, shifted, effect, failing, tmp_path, monkeypatch):
    values = {("own", 0): identity, ("own", 1): shifted, ("view", 0): effect}
    monkeypatch.setattr(guards, "_sample", lambda trainer, batch: batch)
    monkeypatch.setattr(guards, "_control", lambda trainer, batch, teacher, shift, adapters: np.full(3, values[teacher, shift]))
    trainer = SimpleNamespace(opsd=SimpleNamespace(gates=GATES, brief=BriefConfig(brief)), run_dir=RunDir(tmp_path))
    if failing is None:
        guards.identity_control(trainer, None)
    else:
        with pytest.raises(OpsdError, match=f"gate {failing}:"):
            guards.identity_control(trainer, None)
    lines = [json.loads(x) for x in (tmp_path / "evidence.jsonl").read_text().splitlines()]
    assert [x["gate"] for x in lines if x["verdict"] == "fail"] == ([failing] if failing else [])
    assert failing or [x["gate"] for x in lines] == ["identity", "identity_shifted", "brief_effect"]


@pytest.mark.parametrize(
    ("own", "failing"), [([0.0, 0.0], None), ([1e-3, -1e-3], "identity"), ([float("nan"), 0.0], "identity")]
)
def test_estimates_of_either_sign_are_judged_by_their_size(own, failing, tmp_path, monkeypatch):
    """One sampled token's estimates may cancel: their mean says nothing."""
    values = {("own", 0): own, ("own", 1): [0.5, -0.5], ("view", 0): [0.1, -0.1]}
    monkeypatch.setattr(guards, "_sample", lambda trainer, batch: batch)
    monkeypatch.setattr(
        guards, "divergences", lambda trainer, batch, teacher, shift, adapters: [torch.tensor(values[teacher, shift])]
    )
    trainer = SimpleNamespace(opsd=SimpleNamespace(gates=GATES, brief=BriefConfig("peer_spec")), run_dir=RunDir(tmp_path))
    if failing is None:
        guards.identity_control(trainer, None)
    else:
        with pytest.raises(OpsdError, match=f"gate {failing}:"):
            guards.identity_control(trainer, None)


@pytest.mark.parametrize(
    ("path", "judged"), [("{}/own", True), ("{}/own/", True), ("{}/x/../own", True), ("{}/x", False), ("owner/name", False)]
)
def test_a_teacher_that_is_the_students_model_is_known_however_its_folder_is_written(path, judged, tmp_path, monkeypatch):
    for name in ("own", "x"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(guards, "_sample", lambda trainer, batch: batch)
    monkeypatch.setattr(guards, "_control", lambda trainer, batch, teacher, shift, adapters: np.full(3, 0.5))
    voice = SimpleNamespace(form="exact")
    trainer = SimpleNamespace(
        opsd=SimpleNamespace(gates=GATES), run_dir=RunDir(tmp_path / "run"), score=lambda batch, source: None,
        teachers=[SimpleNamespace(path=path.format(tmp_path), voice=voice)],
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(model=SimpleNamespace(path=str(tmp_path / "own")))),
    )  # fmt: skip
    if judged:
        with pytest.raises(OpsdError, match=r"gate device_identity: 0\.5"):
            guards.teacher_control(trainer, None)
    else:
        guards.teacher_control(trainer, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_controls_look_at_rows_that_have_loss_positions(ranks, monkeypatch):
    """The shortest rows of a round may be those of pairs that never replied: a control of these looks at nothing."""
    empty = {f"e{i}": (2, 0, False) for i in range(6)} | {"p": (2, 0, True), "q": (30, 5, True)}
    rows = empty | {"c": (60, 4, False), "a": (40, 3, False), "b": (50, 1, False)} | {"last": (5000, 7, False)}

    def get(keys, partition_id, select_fields):
        position = jagged([torch.arange(rows[k][1]) for k in keys])
        return TensorDict({"opsd_position": position}, batch_size=len(keys))

    monkeypatch.setattr(guards.tq, "kv_batch_get", get)
    group = SimpleNamespace(_query_dispatch_info=lambda name: list(range(ranks)))
    tags = [{"seq_len": n, "is_padding": padding} for n, _, padding in rows.values()]
    chosen = guards._sample(
        SimpleNamespace(actor_rollout_wg=group), KVBatchMeta(keys=list(rows), tags=tags, partition_id="train")
    )
    assert chosen.keys[:3] == ["a", "b", "c"][: len(chosen.keys)]
    assert len(chosen.keys) == {1: 3, 2: 4}[ranks] and chosen.keys[3:] == ["last"][: ranks - 1]


@pytest.mark.parametrize(
    ("passed", "fatal", "verdict"),
    [(True, True, "pass"), (True, False, "pass"), (False, False, "recorded"), (False, True, "fail")],
)
def test_a_start_up_check_that_changes_the_layout_only_is_no_pass(passed, fatal, verdict, tmp_path):
    found = [{"name": "layout", "value": 1.0, "threshold": 0.1, "passed": passed, "fatal": fatal, "note": "one row a forward"}]
    workers = SimpleNamespace(opsd_checks=lambda: [found])
    trainer = SimpleNamespace(actor_rollout_wg=workers, run_dir=RunDir(tmp_path))
    if verdict == "fail":
        with pytest.raises(OpsdError, match="layout"):
            guards.startup_checks(trainer)
    else:
        guards.startup_checks(trainer)
    (line,) = map(json.loads, (tmp_path / "evidence.jsonl").read_text().splitlines())
    assert line["verdict"] == verdict
