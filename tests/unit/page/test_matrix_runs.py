"""Cells of a teacher matrix that name runs: each is one model under its own context, and all played the same pairs under one contract."""

import json
import shutil

import pytest
from page_run import make_run

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.teacher_matrix import read_matrix
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.store import EpisodeStore


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training run that evaluated version 0 and version 1."""
    return make_run(tmp_path_factory.mktemp("trained") / "run", rounds=1, episodes=1, evaluated=4, turns=1).path


@pytest.fixture
def evaluation(trained, tmp_path):
    def make(name, brief="none", where="eval", without=("eval-00000-*",), **contract):
        run = shutil.copytree(trained, tmp_path / name, ignore=shutil.ignore_patterns(*without))
        meta = json.loads((run / "meta.json").read_text())
        meta["opsd"]["actor_brief"] |= {"name": brief, "where": where}
        (run / "meta.json").write_text(json.dumps(meta))
        rules = json.loads((run / "contract.json").read_text())
        (run / "contract.json").write_text(json.dumps(rules | contract))
        return run

    return make


@pytest.fixture
def matrix(tmp_path):
    def read(*cells):
        keys = ("context", "model", "run", "pairs")
        named = [{k: str(v) if k == "run" else v for k, v in zip(keys, c, strict=False)} for c in cells]
        (tmp_path / "matrix.json").write_text(json.dumps({"cells": named}))
        return read_matrix(tmp_path / "matrix.json")

    return read


def test_counts_are_those_of_the_runs(evaluation, matrix):
    a, b = evaluation("a", serving="one device"), evaluation("b", "peer_spec", serving="two devices")
    found = matrix(("none", "student", "a"), ("peer_spec", "teacher", b))
    assert [c.pairs.total for c in found.cells.values()] == [4, 4]
    episodes = [e for e in EpisodeStore(RunDir(a).episodes).episodes() if e.split == "eval"]
    assert found.cells["none", "student"].pairs.passed == sum(
        e.grade.features[0].passed and e.grade.features[1].passed for e in episodes
    )


@pytest.mark.parametrize(
    "brief,where,context",
    [
        ("peer_spec", "train", "peer_spec"),  # its evaluation read nothing
        ("gold_patch", "train", "peer_spec"),
        ("gold_patch", "both", "none"),
        ("none", "eval", "peer_spec"),
    ],
)
def test_a_run_under_another_context_is_refused(evaluation, matrix, brief, where, context):
    with pytest.raises(OpsdError, match="whose actors had read"):
        matrix((context, "teacher", evaluation("run", brief, where)))


def test_a_run_that_says_nothing_is_one_without_a_brief(evaluation, matrix):
    run = evaluation("run")
    (run / "meta.json").unlink()
    assert matrix(("none", "teacher", run)).cells["none", "teacher"].pairs.total == 4
    with pytest.raises(OpsdError, match="whose actors had read"):
        matrix(("peer_spec", "teacher", run))


def test_versions_of_a_training_run_are_not_one_model(evaluation, matrix):
    run = evaluation("run", without=())
    with pytest.raises(OpsdError, match=r"evaluated the policy versions \[0, 1\]"):
        matrix(("none", "student", run))


def test_runs_that_can_not_be_compared_are_refused(evaluation, matrix):
    whole = evaluation("whole")
    fewer = evaluation("fewer", "peer_spec", without=("eval-00000-*", "eval-00001-00003-*"))
    other = evaluation("other", "peer_spec", step_limit=7)
    for run, why in ((fewer, "played 3 pairs"), (other, "step_limit: 7 there, 200 here")):
        with pytest.raises(OpsdError, match=why):
            matrix(("none", "student", whole), ("peer_spec", "teacher", run))
    with pytest.raises(OpsdError, match="two cells name"):
        matrix(("none", "student", whole), ("none", "teacher", whole.parent / "x" / ".." / "whole"))
    with pytest.raises(OpsdError, match="a cell with run and pairs"):
        matrix(("none", "student", whole, [10, 10]))
    with pytest.raises(OpsdError, match="holds no evaluation episodes"):
        matrix(("none", "student", evaluation("empty", without=("eval-*",))))
