"""A warm start that is refused gives its directory back, on one rank and on several."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter import sft_launch
from verl_opsd.verl_adapter.sft_launch import WarmStartCallback


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``start(rank, ranks, error)`` goes through the callback as Hydra does; the preparation itself is the error, or nothing."""
    run = tmp_path / "runs" / "now"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OPSD_RUN_DIR", str(run))
    monkeypatch.setenv("OPSD_START", "then")

    def begin(rank: int = 0, ranks: int = 1, error: Exception | None = None) -> None:
        if ranks > 1:
            monkeypatch.setenv("RANK", str(rank))  # torchrun has set it; without torchrun Hydra does, for the job

        def prepare(self, config, directory, number):
            sft_launch.write_json(directory.path / "data" / "train.json", {})
            if error is not None:
                raise error
            sft_launch.write_json(directory.path / "data" / "start.json", {"start": "then"})

        monkeypatch.setattr(WarmStartCallback, "_start", prepare)
        monkeypatch.setattr(sft_launch, "require_command", lambda config, wanted: None)
        callback = WarmStartCallback()
        config = OmegaConf.create({"hydra": {"run": {"dir": str(run)}, "job": {"name": "sft_trainer"}}})
        callback.on_run_start(config)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        (run / ".hydra").mkdir(parents=True, exist_ok=True)  # as Hydra does
        (run / ".hydra" / "config.yaml").write_text("of this start")
        (run / "sft_trainer.log").write_text("")
        callback.on_job_start(config)

    return SimpleNamespace(begin=begin, run=run)


@pytest.mark.parametrize("error", [OpsdError("corpus", "is one", "name one"), ValueError("a bug")])
def test_a_directory_of_its_own_is_gone(start, tmp_path, capsys, error):
    with pytest.raises(SystemExit) as stop:
        start.begin(error=error)
    assert stop.value.code == 2 and not list(tmp_path.iterdir())
    assert ("way out: name one" if isinstance(error, OpsdError) else "a bug") in capsys.readouterr().err


def test_a_directory_that_held_a_run_is_as_before(start):
    (start.run / ".hydra").mkdir(parents=True)
    before = {".hydra/config.yaml": "of the first start", "checkpoints/latest": "4", "sft_trainer.log": "lines"}
    (start.run / "checkpoints").mkdir()
    for name, text in before.items():
        (start.run / name).write_text(text)
    with pytest.raises(SystemExit):
        start.begin(error=OpsdError("a", "b", "c"))
    assert {p.relative_to(start.run).as_posix(): p.read_text() for p in start.run.rglob("*") if p.is_file()} == before


def waiting(start, ranks: int) -> tuple[list[threading.Thread], list[object]]:
    """The other ranks of a start, which have come and wait for rank 0."""
    run, ended = sft_launch.RunDir(start.run), []

    def wait(rank: int) -> None:
        try:
            sft_launch._wait(run, rank, "then")
            ended.append(None)
        except OpsdError as error:
            ended.append(error)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(1, ranks)]
    for t in threads:
        t.start()
    return threads, ended


def test_ranks_that_wait_hear_of_a_refusal(start, tmp_path):
    threads, ended = waiting(start, 3)
    time.sleep(0.05)
    with pytest.raises(SystemExit):
        start.begin(0, 3, OpsdError("a", "b", "c"))
    for t in threads:
        t.join(10)
    assert [str(e).splitlines()[0] for e in ended] == ["rank 0 has refused this run"] * 2
    assert not start.run.exists()


def test_ranks_that_wait_go_on_when_the_run_is_prepared(start):
    threads, ended = waiting(start, 3)
    start.begin(0, 3)
    for t in threads:
        t.join(10)
    assert ended == [None, None] and sorted(p.name for p in (start.run / "data").iterdir()) == ["start.json", "train.json"]


def test_a_rank_that_never_comes_is_not_waited_for_long(start, monkeypatch):
    monkeypatch.setattr(sft_launch, "GATHER_S", 0.2)
    with pytest.raises(SystemExit):
        start.begin(0, 2, OpsdError("a", "b", "c"))
    assert not start.run.exists()
