"""Identity, negative and conditioning gates run before the first update, and stop it when they fail."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_opsd.config import BriefConfig, GatesConfig
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import guards

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
