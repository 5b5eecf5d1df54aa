"""Real runs of the main job with a scripted engine, watched from outside: processes, control groups, directories."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_opsd.cooperbench.sandbox.host import STATE_ROOT

ROOT = Path(__file__).resolve().parents[3]
FIRST, SECOND = "pocket_ledger_task/task1/f1_f2", "pocket_ledger_task/task1/f1_f3"  # pairs of a round
EVALUATED = "pocket_inifile_task/task1/f1_f2"
START_S = 300.0  # until the first episode runs; about 40 s on two idle cores
LOOK = {"text": "I look around.", "command": "ls"}


def load() -> float:
    """How much slower than on an idle machine things may be; the limits below are for an idle one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_for(condition: Callable[[], Any], seconds: float, what: str, job: Job | None = None) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        ended = job is not None and job.process.poll() is not None
        assert not ended, f"the run ended before {what}\n{job.text()[-5000:] if job else ''}"
        assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s\n{job.text()[-5000:] if job else ''}"
        time.sleep(0.2)
    return found


class Job:
    """A run in a directory of its own, which a second job may continue."""

    def __init__(self, run: Path, script: dict[str, dict[str, list]], *overrides: str):
        self.run = run
        run.parent.mkdir(parents=True, exist_ok=True)
        path = run.parent / f"{run.name}-script.json"
        path.write_text(json.dumps(script))
        self.log = run.parent / f"{run.name}-{time.monotonic_ns()}.log"
        command = [
            *[sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=opd", f"hydra.run.dir={run}"],
            "actor_rollout_ref.rollout.name=opsd_scripted",
            f"+actor_rollout_ref.rollout.engine_kwargs.opsd={{threads: 1, script: {path}}}",
            *["opsd.tasks.max_train=2", "opsd.tasks.max_eval=1", "opsd.contract.step_limit=2"],
            *overrides,
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=run.parent, env=env, start_new_session=True
            )
        self.seen: dict[psutil.Process, str] = {}

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def watch(self) -> dict[psutil.Process, str]:
        """Everything that descends from the run's process, with its command line; what was seen once stays in the list."""
        if self.process.poll() is None:
            for p in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    line = " ".join(p.cmdline())
                except psutil.Error:
                    continue
                if line:
                    self.seen[p] = line
        return self.seen

    def actor(self, name: str) -> psutil.Process | None:
        return next((p for p, line in self.watch().items() if line.startswith(f"ray::{name}") and p.is_running()), None)

    def ranks(self, doing: str = "") -> list[psutil.Process]:
        """Processes of the student's ranks; ``doing``: those that run this method now."""
        title = re.compile(rf"ray::\w*WorkerDict\S*{doing}")
        self.watch()
        found = []
        for p in self.seen:
            try:
                if title.match(" ".join(p.cmdline())):
                    found.append(p)
            except psutil.Error:
                continue
        return sorted(found, key=lambda p: p.pid)

    def alive(self, ours: bool) -> list[str]:
        """Processes of the run that are still there: ours (actors, sandboxes), or all."""
        here = []
        for p, line in self.seen.items():
            is_ours = line.startswith(("ray::", "opsd-sandbox")) and not line.startswith("ray::IDLE")
            try:
                if (is_ours or not ours) and p.is_running() and p.status() != psutil.STATUS_ZOMBIE:
                    here.append(f"{p.pid} {line[:120]}")
            except psutil.NoSuchProcess:
                continue
        return here

    def sandboxes(self) -> list[Path]:
        """State directories and control groups of sandboxes that processes of this run own."""
        pids = {p.pid for p in self.seen}
        owned = re.compile(r"(?:opsd-sandbox-)?\d+-(\d+)-\d+-")
        found = []
        groups = [p for v1 in ("memory", "pids") for p in Path("/sys/fs/cgroup", v1).rglob("opsd-sandbox-*")]
        groups += list(Path("/sys/fs/cgroup").glob("opsd-sandbox-*"))
        for path in [*(STATE_ROOT.iterdir() if STATE_ROOT.is_dir() else []), *groups]:
            if (match := owned.match(path.name)) and int(match[1]) in pids:
                found.append(path)
        return found

    def directories(self) -> list[Path]:
        """The run's temporary directories, as the log and the reaper's command line name them."""
        reaper = next((line for line in self.seen.values() if "verl_opsd.reaper" in line), "")
        named = set(re.findall(r"/tmp/opsd-[\w.-]+", reaper))
        assert len(named) == 2, reaper
        return [p for p in map(Path, named) if p.exists()]

    def episodes(self) -> dict[str, str]:
        """Outcome of every stored episode."""
        from verl_opsd.tokens.store import EpisodeStore

        store = EpisodeStore(self.run / "episodes")
        return {e: store.read(e).outcome for e in store.ids()}

    def require_clean(self) -> dict[str, float]:
        """Ours within 10 s, Ray's within 90 s, directories of both removed; seconds of each."""
        start, took = time.monotonic(), {}
        slower = load()
        wait_for(lambda: not self.alive(ours=True), 10 * slower, f"end of {self.alive(ours=True)}")
        took["ours"] = time.monotonic() - start
        wait_for(lambda: not self.sandboxes(), 10 * slower, f"removal of {self.sandboxes()}")
        took["sandboxes"] = time.monotonic() - start
        wait_for(lambda: not self.alive(ours=False), 90 * slower, f"end of {self.alive(ours=False)}")
        took["ray"] = time.monotonic() - start
        wait_for(lambda: not self.directories(), 10 * slower, f"removal of {self.directories()}")
        took["directories"] = time.monotonic() - start
        print(f"clean after (s): {took}")
        return took

    def stop(self) -> None:
        """After a failed test: nothing of the run may disturb the next one."""
        self.watch()
        for p in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            p.kill()
        for p in self.seen:
            if p.is_running() and "verl_opsd.reaper" not in self.seen[p]:
                p.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(script: dict[str, dict[str, list]], *overrides: str) -> Job:
        started.append(Job(tmp_path / "run", script, *overrides))
        return started[-1]

    yield start
    for j in started:
        j.stop()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared models and tasks: where the environment says, otherwise made once for this session."""
    with pytest.MonkeyPatch.context() as patch:
        if "OPSD_CACHE" not in os.environ:
            patch.setenv("OPSD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
