"""What is moved when a run is started again, by hand-made directories: nothing of a finished round, all of an interrupted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_opsd import resume
from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir, write_json

EPISODES = [f"{split}-{step:05d}-{row:05d}-0" for split in ("train", "eval") for step in (1, 2, 3) for row in (0, 1)]
STAGES = [f"{step:04d}-{stage}.json" for step in (1, 2, 3) for stage in ("collect", "train", "publish", "evaluate")]
TELEMETRY = ["00001.npz", "00002.npz", "00003.npz"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    for folder, names in (("episodes", EPISODES), ("stages", STAGES), ("telemetry", TELEMETRY)):
        for name in names:
            path = made.path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if folder == "episodes" else path.write_text(name)
    (made.episodes / "store.json").write_text("{}")
    (made.episodes / ".0123.tmp").mkdir()
    return made


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("keep_evaluation", [True, False])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_rounds_after_the_checkpoint_are_moved(run: RunDir, step: int, keep_evaluation: bool) -> None:
    target = resume.set_aside(run, step, keep_evaluation)
    assert target == run.path / "interrupted" / "0"
    kept = range(1, step + 1)
    judged = range(1, step + 1 if keep_evaluation else step)
    left = {f"train-{s:05d}-{r:05d}-0" for s in kept for r in (0, 1)} | {
        f"eval-{s:05d}-{r:05d}-0" for s in judged for r in (0, 1)
    }
    assert names(run.episodes) == left | {"store.json"}
    assert names(target / "episodes") == set(EPISODES) - left
    stages = {f"{s:04d}-{k}.json" for s in kept for k in ("collect", "train", "publish")} | {
        f"{s:04d}-evaluate.json" for s in judged
    }
    assert names(run.path / "stages") == stages and names(target / "stages") == set(STAGES) - stages
    assert names(run.path / "telemetry") == {f"{s:05d}.npz" for s in kept}
    line = json.loads((run.path / "evidence.jsonl").read_text())
    assert (line["gate"], line["value"]) == ("resume", step)
    assert line["detail"].startswith(f"{len(set(EPISODES) - left)} episodes and ")


def test_nothing_is_recorded_when_nothing_is_moved(run: RunDir) -> None:
    assert resume.set_aside(run, 3, keep_evaluation=True) is None
    assert names(run.episodes) == {*EPISODES, "store.json"} and not (run.path / "evidence.jsonl").exists()
    assert resume.set_aside(RunDir(run.path / "empty"), 0, keep_evaluation=False) is None


def test_two_interruptions_are_kept_apart(run: RunDir) -> None:
    assert resume.set_aside(run, 2, True) == run.path / "interrupted" / "0"
    (run.episodes / "train-00003-00000-0").mkdir()
    assert resume.set_aside(run, 2, True) == run.path / "interrupted" / "1"
    assert names(run.path / "interrupted" / "1" / "episodes") == {"train-00003-00000-0"}
    assert {"train-00003-00000-0", "train-00003-00001-0"} <= names(run.path / "interrupted" / "0" / "episodes")


def test_evaluation_counts_once_it_has_ended(run: RunDir) -> None:
    assert resume.evaluated(run, 2)
    (run.path / "stages" / "0002-evaluate.json").unlink()
    assert not resume.evaluated(run, 2)


def test_episodes_bind_a_directory_to_their_contract(run: RunDir) -> None:
    write_json(run.path / "contract.json", EvalContract(step_limit=7).as_dict())
    resume.check(run, EvalContract(step_limit=7), {})
    with pytest.raises(OpsdError, match="step_limit: 7 there, 8 here"):
        resume.check(run, EvalContract(step_limit=8), {})


def test_a_directory_without_episodes_takes_any_contract(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.path / "contract.json", EvalContract(step_limit=7).as_dict())
    resume.check(run, EvalContract(step_limit=8), {})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"opsd": {"loss": {"anchor": 0.5}}}, "opsd.loss.anchor=0.0 and not 0.5"),
        ({"actor": {"optim": {"lr": 1}}}, "actor.optim.lr=None and not 1"),
        ({"trainer": {"total_training_steps": 9}}, None),
        ({"trainer": {"logger": ["console", "wandb"]}}, None),
    ],
)
def test_a_run_is_continued_under_its_own_configuration(run: RunDir, changed: dict, named: str | None) -> None:
    began = {"opsd": {"loss": {"anchor": 0.0}}, "trainer": {"total_training_steps": 2, "logger": ["console"]}}
    write_json(run.path / "contract.json", EvalContract().as_dict())
    write_json(run.path / "meta.json", {"config": began})
    merged = {k: began.get(k, {}) | changed.get(k, {}) for k in {*began, *changed}}
    if named is None:
        resume.check(run, EvalContract(), merged)
    else:
        with pytest.raises(OpsdError, match=named):
            resume.check(run, EvalContract(), merged)
