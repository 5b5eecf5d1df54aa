"""A plan, what is missing of it, its progress line, and what is moved aside; sizes of models."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from synthetic import episode, turn

from verl_opsd.config import OpsdConfig
from verl_opsd.cooperbench.dataset import load_subset
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.model_size import model_size
from verl_opsd.evaluation.plan import Progress, missing, read_plan, record_fault, running, set_aside_faults, write_plan
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.store import EpisodeStore

QUIET = ([turn("", ("ls", "", 0))], [turn("", ("ls", "", 0))])


def numbered(k, passed=(False, False), fault=None):
    e = episode(f"eval-00000-{k:05d}-0", QUIET, passed=passed, task_id=k)
    return e if fault is None else dataclasses.replace(e, outcome=f"infra:{fault}", grade=None)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    write_plan(run, load_subset("pocket_eval")[:2], 2, {"path": "m", "parameters": 5}, {"serving": "embedded"})
    return run


def test_a_plan_is_every_pair_by_seeds_and_says_what_it_can_show(run):
    said = read_plan(run)
    assert len(said["planned"]) == 4 and said["seeds"] == 2 and said["parameters"] == 5
    assert "2 pairs x 2 seeds" in said["design"] and said["serving"]["serving"] == "embedded" and said["serving"]["node"]


def test_missing_and_faulty_episodes_run_again_scored_ones_stay(run):
    store = EpisodeStore(run.episodes)
    assert missing(run, store) == [0, 1, 2, 3]
    store.write(numbered(0))
    store.write(numbered(2, fault="engine_died"))
    assert missing(run, store) == [1, 3]
    assert set_aside_faults(run) == 1 and missing(run, store) == [1, 2, 3]
    assert (run.path / "interrupted" / "0" / "episodes" / "eval-00000-00002-0").is_dir()
    assert set_aside_faults(run) == 0
    store.write(numbered(2, fault="engine_died"))  # it failed again: a second place for it
    assert set_aside_faults(run) == 1 and (run.path / "interrupted" / "1" / "episodes").is_dir()


def test_progress_prints_a_line_for_each_new_episode(run, capsys):
    store = EpisodeStore(run.episodes)
    progress = Progress(store, 4)
    assert "planned 4, ran 0, scored 0, void 0" in progress.look()
    assert progress.look() is None
    store.write(numbered(0, passed=(True, False)))
    assert "features 1/2 50%" in progress.look() and "pairs 0/1" in capsys.readouterr().out


def test_faults_are_void_in_the_running_line_and_on_record(run):
    line = running([numbered(0, (True, True)), numbered(1, fault="x"), numbered(2, fault="x")], 4)
    assert line.startswith("planned 4, ran 3, scored 1, void 2 x: features 2/2 100%")
    record_fault(run, numbered(1, fault="x"), 0, "why")
    record_fault(run, numbered(1, fault="x"), 1, "why again")
    lines = [json.loads(x) for x in (run.path / "faults.jsonl").read_text().splitlines()]
    assert [(x["attempt"], x["outcome"], x["detail"]) for x in lines] == [(0, "infra:x", "why"), (1, "infra:x", "why again")]


def test_model_sizes_from_headers(tmp_path):
    assert model_size(tmp_path) == (None, None)
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}, tmp_path / "1.safetensors")
    assert model_size(tmp_path) == (10, 10)
    save_file({"l.mlp.experts.0.w": np.zeros((8, 10), np.float32)}, tmp_path / "2.safetensors")
    assert model_size(tmp_path) == (90, None)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_experts": 8, "num_experts_per_tok": 2}}))
    assert model_size(tmp_path) == (90, 30)


def parse(**opsd):
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["test", "+recipe=full_eval"])
        patch.setenv("OPSD_RUN_DIR", "/run")
        patch.setenv("OPSD_RAY_TMP", "/ray")
        import verl  # noqa: F401

        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", ["+recipe=full_eval", "scale=local"])
    values = OmegaConf.to_container(config.opsd, resolve=True)
    return OpsdConfig.parse({**values, **{k: {**values[k], **v} if isinstance(v, dict) else v for k, v in opsd.items()}})


def test_keys_of_an_evaluation():
    assert parse(evaluation={"seeds": 3}).evaluation.seeds == 3
    with pytest.raises(OpsdError, match="would ignore"):
        parse(tasks={"train": "pocket_train"})
    online = {"mode": "online", "evaluation": {"seeds": 2}, "tasks": {"train": "pocket_train"}}
    for wrong in ({"evaluation": {"seeds": 0}}, {"evaluation": {"retries": -1}}, online):
        with pytest.raises(OpsdError, match="evaluation"):
            parse(**wrong)
