"""Splits and tasks that a run refuses: locked, overlapping, not there, not prepared, not measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR

TRAIN, EVAL = ("pocket_ledger_task", 1), ("pocket_textkit_task", 0)


def subset(folder: Path, name: str, repo: str, task_id: int, pairs: list[list[int]] | None = None) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"tasks": [{"repo": repo, "task_id": task_id, **({"pairs": pairs} if pairs else {})}]}))
    return path


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("opsd.tasks.test=pocket_train", "the locked test split (opsd.tasks.test=pocket_train) share pocket_ledger_task"),
        (
            "opsd.tasks.test=pocket_eval",
            "evaluation (opsd.tasks.eval=pocket_eval) and the locked test split (opsd.tasks.test=pocket_eval) share",
        ),
        ("opsd.tasks.look='the final table'", "pocket_eval holds no pair of pocket_test"),
    ],
)
def test_the_locked_split_is_neither_trained_nor_evaluated_on(refused, override, named):
    assert named in refused(override)


def test_a_look_at_the_locked_split_is_on_record(compose, tmp_path):
    from verl_opsd.rundir import RunDir
    from verl_opsd.verl_adapter.launch import prepare_run

    run = RunDir(tmp_path / "run")
    look = [
        "opsd.tasks.eval=pocket_test",
        "opsd.tasks.look='the final table'",
        "opsd.tasks.max_train=1",
        "opsd.tasks.max_eval=1",
    ]
    prepare_run(compose("+recipe=opd", *look), run)
    (line,) = [g for g in map(json.loads, (run.path / "evidence.jsonl").read_text().splitlines()) if g["gate"] == "locked_look"]
    assert line["detail"] == "pocket_test: the final table" and line["verdict"] == "recorded"
    assert json.loads((run.path / "tasks.json").read_text())["eval"] == ["pocket_spans_task/task3/f1_f2"]


def test_unknown_subset_names_the_known_ones(refused):
    text = refused("opsd.tasks.train=pocket_trian")
    assert "pocket_trian" in text and "pocket_train" in text and "pocket_eval" in text


def test_training_task_in_the_evaluation_set(refused):
    both = f"training (opsd.tasks.train=pocket_train) and evaluation (opsd.tasks.eval=pocket_train) share {TRAIN[0]}"
    assert both in refused("opsd.tasks.eval=pocket_train")


@pytest.mark.parametrize(("level", "named"), [("repo", f"share {TRAIN[0]}"), ("task", f"share {TRAIN[0]}/task1")])
def test_other_pair_of_a_training_repository_in_the_evaluation_set(refused, tmp_path, level, named):
    train, evaluation = (subset(tmp_path, n, *TRAIN, [p]) for n, p in (("t", [1, 2]), ("e", [3, 4])))
    text = refused(f"opsd.tasks.train={train}", f"opsd.tasks.eval={evaluation}", f"opsd.tasks.disjoint={level}")
    assert named in text and f"no {level} may be in both sets" in text


def test_dataset_that_does_not_exist(refused):
    assert "opsd.tasks.dataset=/no/such: no folder" in refused("opsd.tasks.dataset=/no/such")


def test_limits_do_not_hide_an_overlap(refused):
    """`max_eval=1` leaves the shared task out of the run, but not out of the sets."""
    assert TRAIN[0] in refused("opsd.tasks.eval=pocket_train", "opsd.tasks.max_train=1", "opsd.tasks.max_eval=1")


def test_task_that_is_not_prepared(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("OPSD_CACHE", str(tmp_path / "cache"))
    assert "opsd tasks prepare" in refused("opsd.tasks.prepare=false")


def test_task_that_is_prepared_and_not_measured(refused, tmp_path, monkeypatch):
    from verl_opsd.cooperbench.prepare import prepare

    monkeypatch.setenv("OPSD_CACHE", str(tmp_path / "cache"))
    names = []
    for name, (repo, task) in (("t", TRAIN), ("e", EVAL)):
        prepare(POCKET_DIR / repo / f"task{task}", None, tmp_path / "cache")
        names.append(subset(tmp_path, name, repo, task, [[1, 2]]))
    text = refused(f"opsd.tasks.train={names[0]}", f"opsd.tasks.eval={names[1]}", "opsd.tasks.prepare=false")
    assert f"{TRAIN[0]}/task1 feature 1: not measured" in text and "opsd tasks qualify" in text


def test_task_whose_base_passes_already(refused, tmp_path, monkeypatch):
    """A hidden test that the untouched base passes would reward doing nothing: `prepare=true` measures it and refuses."""
    data = tmp_path / "data"
    shutil.copytree(POCKET_DIR / TRAIN[0], data / TRAIN[0])
    shutil.copytree(POCKET_DIR / EVAL[0], data / EVAL[0])
    bad = data / EVAL[0] / "task0" / "feature1" / "tests.patch"
    bad.write_text(
        "diff --git a/tests/test_nothing.py b/tests/test_nothing.py\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/tests/test_nothing.py\n@@ -0,0 +1,2 @@\n+def test_nothing():\n+    assert True\n"
    )
    monkeypatch.setenv("OPSD_CACHE", str(tmp_path / "cache"))
    train, evaluation = (subset(tmp_path, n, *t, [[1, 2]]) for n, t in (("t", TRAIN), ("e", EVAL)))
    text = refused(
        *(f"opsd.tasks.dataset={data}", f"opsd.tasks.train={train}", f"opsd.tasks.eval={evaluation}"),
        *("opsd.tasks.test=null", "opsd.tasks.prepare=true"),
    )
    assert f"{EVAL[0]}/task0 feature 1: " in text and f"{EVAL[0]}/task0 feature 2: " not in text and TRAIN[0] not in text
