"""A multirun: every job is checked once, before the first one starts; what is refused leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import leavings

SHORT = ("opsd.tasks.max_train=1", "opsd.tasks.max_eval=1")


@pytest.fixture
def sweep(compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``sweep("+recipe=opd", "a=1,2")`` calls the callback as ``-m`` does, and gives it."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from verl_opsd.verl_adapter.callback import OpsdCallback

    monkeypatch.delenv("OPSD_RUN_DIR")
    monkeypatch.delenv("OPSD_RAY_TMP")

    def start(*overrides: str) -> OpsdCallback:
        words = ["+recipe=opd", *SHORT, f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides]
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config("ppo_trainer", words, run_mode=RunMode.MULTIRUN)
        config.hydra.job.name = "main_ppo"
        callback = OpsdCallback()
        callback.on_multirun_start(config, "ppo_trainer")
        return callback

    with initialize_config_module("verl.trainer.config", version_base=None):
        yield start


@pytest.fixture
def refused_sweep(sweep, tmp_path, capsys) -> Callable[..., str]:
    def text_of(*overrides: str) -> str:
        import ray

        before = leavings()
        with pytest.raises(SystemExit) as stop:
            sweep(*overrides)
        assert stop.value.code == 2
        assert not (tmp_path / "sweep").exists() and leavings() <= before and not ray.is_initialized()
        text = capsys.readouterr().err
        assert "rule:" in text and "way out:" in text and "Traceback" not in text, text
        return text

    return text_of


@pytest.mark.parametrize(
    ("swept", "words"),
    [
        ("opsd.loss.anchor=0.0,-1.0", ["opsd.loss.anchor=-1.0"]),
        ("brief=peer_spec,nosuch", ["brief=nosuch", "brief/nosuch"]),
        ("opsd.brief.name=peer_spec,nosuch", ["opsd.brief.name=nosuch"]),
        ("opsd.brief.max_view_tokens=null,10", ["10 fit"]),
        ("opsd.budget.max_hours=null,0.0001", ["opsd.budget.max_hours=0.0001"]),
        ("opsd.actor_brief.name=none,nosuch", ["nosuch"]),
        ("opsd.worth.override='a good reason',null", ["peer_spec is not shown"]),
        ("opsd.predictions=null,/no/such.yaml", ["/no/such.yaml"]),
        ("opsd.tasks.train=pocket_train,pocket_eval", ["share"]),
        ("actor_rollout_ref.model.target_modules=all-linear,[nosuch]", ["nosuch"]),
        ("actor_rollout_ref.model.path=${opsd_student:tiny},/no/such", ["/no/such"]),
        ("trainer.total_training_steps=2,0", ["total_training_steps=0"]),
        ("opsd.lossy=1,2", ["lossy"]),
        ("opsd.dry_run=false,true", ["dry run"]),
    ],
)
def test_a_later_value_is_refused_before_the_first_job(refused_sweep, swept, words):
    text = refused_sweep(swept)
    number = 0 if swept.startswith("opsd.lossy") else 1
    assert f"job {number} of 2 ({swept.split('=')[0]}=" in text and all(w in text for w in words), text


def test_more_of_the_contract_varies_than_is_declared(refused_sweep):
    text = refused_sweep("opsd.varies=top_k", "opsd.contract.top_k=-1,20", "opsd.contract.max_tokens=96,64")
    assert "job 1 of 4 " in text and "(max_tokens: 96 there, 64 here)" in text and "only top_k was declared" in text


def test_a_glob_over_files_that_are_no_choices(refused_sweep):
    text = refused_sweep("loss=glob(*)")
    assert "loss=_base" in text and "glob(*,exclude=_*)" in text


def test_values_that_the_sweeper_can_not_list(refused_sweep):
    assert "-m: " in (text := refused_sweep("opsd.loss.anchor=interval(0,1)")) and "INTERVAL" in text


def test_jobs_with_one_place_for_their_checkpoints(refused_sweep, tmp_path):
    text = refused_sweep("opsd.loss.anchor=0.0,0.5", f"trainer.default_local_dir={tmp_path / 'all'}")
    assert "job 1 of 2" in text and f"trainer.default_local_dir={tmp_path / 'all'}, as in job 0" in text


def test_what_is_checked_for_a_sweep_is_not_checked_again(sweep, tmp_path, monkeypatch):
    """Two jobs of one student: one tokenizer is read, and each job's checks run once; the second job is prepared all the same."""
    from hydra import compose
    from transformers import AutoTokenizer

    from verl_opsd.verl_adapter import launch, requirements

    read, checked = [], []
    real_read, real_check = AutoTokenizer.from_pretrained, launch.check_host
    requirements.tokenizer_of.cache_clear()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, *a, **k: read.append(path) or real_read(path, *a, **k))
    monkeypatch.setattr(launch, "check_host", lambda config: checked.append(1) or real_check(config))
    callback = sweep("loss=glob([anchored,reverse_kl])")
    assert len(checked) == 2
    for number, loss in enumerate(("anchored", "reverse_kl")):
        run = tmp_path / "sweep" / str(number)
        (run / ".hydra").mkdir(parents=True)
        monkeypatch.setenv("OPSD_RUN_DIR", str(run))
        monkeypatch.setenv("OPSD_RAY_TMP", str(tmp_path / "ray"))
        callback.on_job_start(compose("ppo_trainer", ["+recipe=opd", *SHORT, f"loss={loss}"]))
        callback._unwatch(started=False)
        assert (run / "meta.json").is_file() and (run / "data" / "train.parquet").is_file()
    assert len(checked) == 2 and len(read) == 1
