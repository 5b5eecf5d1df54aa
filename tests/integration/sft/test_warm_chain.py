"""Scripted experts, corpus, SFT, export: the student passes features that it could not before, and knows nothing of other families."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from verl_opsd.cli.main import main
from verl_opsd.cooperbench.dataset import load_subset
from verl_opsd.corpus.records import read_manifest
from verl_opsd.evaluation.standings import standing
from verl_opsd.evaluation.statistics import fisher
from verl_opsd.models.tiny import WARM, make_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FAMILY = "pocket_textkit_task"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        return importlib.import_module("warm_student")


@pytest.fixture(scope="module")
def arms(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Episodes of the untouched and the trained student: two pairs of the trained family twice, two of another one."""
    out = tmp_path_factory.mktemp("warm")
    untouched = make_tiny(out / "untouched", hidden_size=96, tokenizer=AutoTokenizer.from_pretrained(WARM))
    family = [p for p in load_subset("pocket_train", split="train") if p.repo == FAMILY]
    student = script.warm_up(untouched, family, out, epochs=60)
    known, unseen = [family[0], family[2]], load_subset("pocket_eval", split="eval")[:2]
    played = {
        (arm, name): script.play(model, pairs, out / f"{arm}-{name}", scripted=False, seed=1, repeats=repeats)
        for arm, model in (("untouched", untouched), ("trained", student))
        for name, pairs, repeats in (("known", known, 2), ("unseen", unseen, 1))
    }
    return {"out": out, "student": student, "played": played}


def test_experts_whose_branches_conflict_are_left_out(arms):
    manifest = read_manifest(arms["out"] / "corpus")
    assert manifest["files"]["train"]["rows"] == 4 and {k: len(v) for k, v in manifest["excluded"].items()} == {"not_passed": 2}
    assert all(g["verdict"] == "pass" for g in manifest["gates"])


def test_it_passes_what_it_could_not_pass_before(arms):
    before, after, unseen = (
        standing(k[0], arms["played"][k]).features
        for k in (("untouched", "known"), ("trained", "known"), ("trained", "unseen"))
    )
    assert (before.passed, before.total, after.total) == (0, 8, 8)
    assert fisher(before.passed, before.total, after.passed, after.total) < 0.05, after
    assert (unseen.passed, unseen.total) == (0, 4)


def test_its_agents_submit_where_the_untouched_ones_run_into_their_limits(arms):
    status = {arm: {a.status for e in arms["played"][arm, "known"] for a in e.agents} for arm in ("untouched", "trained")}
    assert status["untouched"] == {"LimitsExceeded"} and "Submitted" in status["trained"]


def test_the_trained_one_is_selected(arms, capsys):
    runs = [f"{arm}={arms['out'] / f'{arm}-known'}" for arm in ("untouched", "trained")]
    assert main(["select", *runs, "--base", "untouched", "--split", "train"]) == 0
    assert "chosen: trained" in capsys.readouterr().out


def test_the_exported_folder_was_guarded(arms):
    guards = {g["name"]: g for g in json.loads((arms["student"] / "export.json").read_text())["guards"]}
    assert guards["parity"]["value"] <= 1e-3 and guards["coherence"]["value"] >= 0.5


def test_the_shipped_student_passes_trained_pairs(script, tmp_path):
    pairs = [p for p in load_subset("pocket_train", split="train") if p.features == (1, 2) and p.repo != "pocket_routes_task"]
    found = standing("shipped", script.play(WARM, pairs, tmp_path / "run", scripted=False, seed=2, repeats=2)).features
    assert found.total == 8 and fisher(0, 8, found.passed, 8) < 0.05, found
