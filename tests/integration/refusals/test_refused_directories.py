"""Directories that a run would go on in, or that hold other things; and what good input leaves behind."""

from __future__ import annotations

import pytest


def test_predictions_are_written_down_before_anything_starts(compose, tmp_path):
    """With the file the log begins to hold its hash; a file that predicts nothing is refused; without the key there is no such line."""
    from verl_opsd.errors import OpsdError
    from verl_opsd.evidence.chain import lines
    from verl_opsd.rundir import RunDir
    from verl_opsd.verl_adapter.launch import prepare_run

    path = tmp_path / "p.yaml"
    path.write_text(
        "name: p\npredictions:\n- {metric: eval.pairs_passed, comparison: '>', threshold: 0, denominator: {of: scored pairs, at_least: 1}}\n"
    )
    short = ("+recipe=opd", "opsd.tasks.max_train=1", "opsd.tasks.max_eval=1")
    found = []
    for name, more in (("with", [f"opsd.predictions={path}"]), ("without", [])):
        prepare_run(compose(*short, *more), RunDir(tmp_path / name))
        found.append([x["value"]["name"] for x in lines(tmp_path / name) if x["gate"] == "predicted"])
    assert found == [["p"], []]
    path.write_text(path.read_text().replace("'>'", "'='"))
    with pytest.raises(OpsdError, match="comparison="):
        prepare_run(compose(*short, f"opsd.predictions={path}"), RunDir(tmp_path / "bad"))


def test_good_input_is_not_refused(compose, tmp_path, monkeypatch):
    """The counterpart of every test above: the recipe itself passes all checks."""
    from verl_opsd.rundir import RunDir
    from verl_opsd.verl_adapter.launch import prepare_run

    run = RunDir(tmp_path / "run")
    config = compose("+recipe=opd", "+actor_rollout_ref.rollout.engine_kwargs.opsd.threads=1", "opsd.tasks.max_train=1")
    opsd = prepare_run(config, run)
    assert opsd.recipe == "opd" and (run.path / "data" / "train.parquet").is_file()
    first = run.contract()
    prepare_run(config, run)  # the same run again: resumes
    assert run.contract() == first


def test_resuming_under_another_contract(refused, compose, tmp_path):
    from verl_opsd.rundir import RunDir, write_json
    from verl_opsd.verl_adapter.callback import OpsdCallback
    from verl_opsd.verl_adapter.launch import prepare_run

    run = RunDir(tmp_path / "run")
    prepare_run(compose("+recipe=opd"), run)
    before = (run.path / "contract.json").read_bytes()
    (run.episodes / "train-00001-00000-0").mkdir(parents=True)
    write_json(run.path / "keep.json", {})
    with pytest.raises(SystemExit) as stop:
        OpsdCallback().on_job_start(compose("+recipe=opd", "opsd.contract.step_limit=3"))
    assert stop.value.code == 2
    assert (run.path / "contract.json").read_bytes() == before and (run.path / "keep.json").is_file()


def test_resuming_under_another_configuration(compose, tmp_path, capsys):
    from verl_opsd.rundir import RunDir, write_json
    from verl_opsd.verl_adapter.callback import OpsdCallback
    from verl_opsd.verl_adapter.launch import plain_config, prepare_run

    run = RunDir(tmp_path / "run")
    first = compose("+recipe=opd")
    prepare_run(first, run)
    (run.episodes / "train-00001-00000-0").mkdir(parents=True)
    write_json(run.path / "meta.json", {"config": plain_config(first)})
    prepare_run(compose("+recipe=opd", "trainer.total_training_steps=5"), run)  # a longer run of the same
    with pytest.raises(SystemExit) as stop:
        OpsdCallback().on_job_start(compose("+recipe=opd", "actor_rollout_ref.actor.optim.lr=0.1"))
    assert stop.value.code == 2 and "actor_rollout_ref.actor.optim.lr=0.001 and not 0.1" in capsys.readouterr().err
    assert (run.episodes / "train-00001-00000-0").is_dir()


def test_a_refused_run_leaves_the_users_files(compose, tmp_path):
    from verl_opsd.verl_adapter.callback import OpsdCallback

    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / "main_ppo.log").write_text("")
    (run / "out.log").write_text("what tee has written")
    with pytest.raises(SystemExit):
        OpsdCallback().on_job_start(compose("+recipe=opd", "trainer.use_v1=false"))
    assert [(p.name, p.read_text()) for p in run.iterdir()] == [("out.log", "what tee has written")]


@pytest.mark.parametrize("more", [["opsd.loss.clip=-1"], ["opsd.dry_run=true"]])
def test_a_directory_that_held_other_things_is_as_before(compose, tmp_path, more):
    """Hydra writes its own files over those of an earlier run before any check can speak."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from verl_opsd.verl_adapter.callback import OpsdCallback

    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    before = {"main_ppo.log": "a log", ".hydra/config.yaml": "an earlier run", "notes.txt": "mine"}
    for name, text in before.items():
        (run / name).write_text(text)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose("ppo_trainer", ["+recipe=opd", f"hydra.run.dir={run}", *more], return_hydra_config=True)
    config.hydra.job.name = "main_ppo"
    callback = OpsdCallback()
    callback.on_run_start(config)
    (run / "main_ppo.log").write_text("a log, and a line")  # as Hydra does
    (run / ".hydra" / "config.yaml").write_text("this run")
    with pytest.raises(SystemExit) as stop:
        callback.on_job_start(compose("+recipe=opd", *more))
    assert stop.value.code == (2 if more[0].startswith("opsd.loss") else 0)
    left = {p.relative_to(run).as_posix(): p.read_text() for p in run.rglob("*") if p.is_file()}
    assert left == before
