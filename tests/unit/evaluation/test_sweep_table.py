"""The jobs of a multirun joined: what was swept, what was declared, and what each scored."""

import dataclasses
import json

import pytest
import yaml
from synthetic import episode, turn

from verl_opsd.cli.main import main
from verl_opsd.contract import EvalContract
from verl_opsd.evaluation.sweep import read_sweep
from verl_opsd.rundir import write_json
from verl_opsd.tokens.store import EpisodeStore

QUIET = ([turn("", ("ls", "", 0))], [turn("", ("ls", "", 0))])


def job(root, number, limit, passed, varies="step_limit"):
    contract = EvalContract(step_limit=limit)
    run = root / str(number)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text(
        yaml.safe_dump(["+recipe=full_eval", f"opsd.contract.step_limit={limit}", "tasks=pocket"])
    )
    write_json(run / "contract.json", contract.as_dict())
    write_json(run / "meta.json", {"opsd": {"varies": varies}})
    store = EpisodeStore(run / "episodes")
    for version, wins in ((1, 0), (2, passed)):
        for k in range(4):
            e = episode(
                f"eval-{version:05d}-{k:05d}-0", QUIET, passed=(k < wins, k < wins), task_id=k, contract_hash=contract.hash
            )
            store.write(dataclasses.replace(e, model_version=version))


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "multirun.yaml").write_text("{}")
    for number, (limit, passed) in enumerate(((100, 1), (200, 3), (300, 2))):
        job(tmp_path, number, limit, passed)
    return tmp_path


def test_jobs_are_told_apart_by_what_was_swept_and_their_last_version_counts(sweep):
    found = read_sweep(sweep)
    assert found.varies == "step_limit"
    assert [j.swept for j in found.jobs] == [{"opsd.contract.step_limit": str(n)} for n in (100, 200, 300)]
    assert [(j.standing.pairs.passed, j.standing.pairs.total) for j in found.jobs] == [(1, 4), (3, 4), (2, 4)]


def test_the_command_prints_and_writes_table_and_plot(sweep, capsys):
    assert main(["sweep", str(sweep)]) == 0
    assert "step_limit varies, as declared" in capsys.readouterr().out
    page = (sweep / "sweep.html").read_text()
    assert page.count("<svg") == 6 and "http" not in page
    assert [j["standing"]["pairs"]["passed"] for j in json.loads((sweep / "sweep.json").read_text())["jobs"]] == [1, 3, 2]


def test_a_job_without_evaluation_is_said(sweep):
    (sweep / "3" / ".hydra").mkdir(parents=True)
    (sweep / "3" / ".hydra" / "overrides.yaml").write_text(
        '["+recipe=full_eval", "opsd.contract.step_limit=400", "tasks=pocket"]'
    )
    assert main(["sweep", str(sweep)]) == 1 and "not evaluated" in (sweep / "sweep.html").read_text()
    assert [j["standing"] is None for j in json.loads((sweep / "sweep.json").read_text())["jobs"]] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("text", [None, "", "{", "a: 1", "- 3"])
def test_overrides_that_cannot_be_read_are_named(sweep, text, capsys):
    path = sweep / "1" / ".hydra" / "overrides.yaml"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert main(["sweep", str(sweep)]) == 2 and f"error: {path}: " in capsys.readouterr().err


def test_undeclared_differences_and_other_folders_are_refused(sweep, tmp_path_factory, capsys):
    job(sweep, 3, 400, 0, varies=None)
    assert main(["sweep", str(sweep)]) == 2 and "varies one field" in capsys.readouterr().err
    other = tmp_path_factory.mktemp("other")
    (other / "multirun.yaml").write_text("{}")
    for number, limit in enumerate((100, 200)):
        job(other, number, limit, 1, varies=None)
    assert main(["sweep", str(other)]) == 2 and "step_limit" in capsys.readouterr().err
    assert main(["sweep", str(other / "0")]) == 2 and "no multirun" in capsys.readouterr().err
