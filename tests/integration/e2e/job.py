"""Runs verl's trainer in a process of its own, watches every process and sandbox that it starts, and says what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

#: Limits of the evaluation contract that keep a run short; runs that share a corpus share them.
SHORT = ("opsd.contract.step_limit=2", "opsd.contract.max_tokens=32", "opsd.tasks.max_eval=1")
SANDBOXES = Path("/run/opsd-sandbox")
OURS_S, RAYS_S = 10.0, 90.0


@dataclass
class Watch:
    """Everything that belonged to a run while it ran: processes by identity, sandboxes by the process that owns them."""

    processes: set[psutil.Process]
    sandboxes: dict[str, list[Path]] = field(default_factory=dict)

    def look(self) -> None:
        """Adds what is there now; a descendant stays known after its parent has ended."""
        pids = {p.pid for p in self.processes if p.is_running()}
        there = [(p.pid, p.info["ppid"], p) for p in psutil.process_iter(["ppid"])]
        while new := [p for pid, parent, p in there if parent in pids and pid not in pids]:
            self.processes.update(new)
            pids |= {p.pid for p in new}
        owners = {p.pid for p in self.processes}
        for path in SANDBOXES.glob("*-*-*-*"):
            if int(path.name.split("-")[1]) in owners:
                groups = path / "cgroups"
                try:
                    lines = groups.read_text().split() if groups.exists() else []
                except OSError:  # closed while we looked
                    lines = []
                self.sandboxes[path.name] = [Path(x) for x in lines] or self.sandboxes.get(path.name, [])

    def alive(self) -> list[str]:
        """Command lines of the processes that have not ended."""
        lines = []
        for p in self.processes:
            try:
                if p.is_running() and p.status() != psutil.STATUS_ZOMBIE:
                    lines.append(" ".join(p.cmdline()) or p.name())
            except psutil.NoSuchProcess:
                continue
        return lines

    def left(self) -> list[Path]:
        """State directories and control groups of the run's sandboxes that still exist."""
        paths = [SANDBOXES / name for name in self.sandboxes] + [g for groups in self.sandboxes.values() for g in groups]
        return [p for p in paths if p.exists()]


def of_ray(line: str) -> bool:
    """Whether a command line is Ray's own, not a worker's that runs this project's or verl's code; the reaper, which
    waits for Ray, counts as Ray's."""
    own = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return "/ray/" in line or line.startswith(own) or "verl_opsd.reaper" in line


@dataclass(frozen=True)
class Job:
    """A finished run: its output, its directories, and what was left of it."""

    returncode: int
    output: str
    seconds: float
    cwd: Path
    directories: list[Path]
    sandboxes: list[str]
    ours_left: list[str]
    all_left: list[str]
    ours_gone_s: float
    all_gone_s: float
    sandbox_rests: list[Path]

    @property
    def directory(self) -> Path:
        assert len(self.directories) == 1, self.output[-4000:]
        return self.directories[0]

    def temporary(self) -> list[Path]:
        """Temporary directories that the runs named in meta.json."""
        return [Path(p) for d in self.directories for p in json.loads((d / "meta.json").read_text())["temporary"].values()]

    def assert_done(self) -> None:
        """Exit code 0, and nothing left: processes, sandboxes, temporary directories."""
        assert self.returncode == 0, self.output[-6000:]
        assert self.ours_left == [] and self.ours_gone_s < OURS_S, (self.ours_left, self.ours_gone_s)
        assert self.all_left == [] and self.all_gone_s < RAYS_S, (self.all_left, self.all_gone_s)
        assert self.sandboxes, "the watch saw no sandbox"
        assert self.sandbox_rests == []
        assert self.temporary() and [p for p in self.temporary() if p.exists()] == []


def run_trainer(cwd: Path, *overrides: str, timeout_s: float = 600.0) -> Job:
    """``python -m verl.trainer.main_ppo OVERRIDES`` in ``cwd``; waits until its processes are gone, 90 s at most.

    Raises:
        AssertionError: it did not end in time; what is left of it was killed.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (cwd / "output.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "verl.trainer.main_ppo", *overrides],
            cwd=cwd,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "WANDB_MODE": "offline"},
            start_new_session=True,
        )
        watch, ended = Watch({psutil.Process(process.pid)}), threading.Event()

        def observe() -> None:
            while not ended.wait(0.5):
                watch.look()

        observer = threading.Thread(target=observe)
        observer.start()
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            exit_time = time.monotonic()
            ended.set()
            observer.join()
        if code is None:
            for p in watch.processes:
                if p.is_running():
                    p.send_signal(signal.SIGKILL)
            process.wait()
    output = (cwd / "output.txt").read_text(errors="replace")
    assert code is not None, f"no end after {timeout_s} s:\n{output[-6000:]}"

    ours_gone = all_gone = float("inf")
    ours: list[str] = []
    while True:
        alive = watch.alive()
        now = time.monotonic() - exit_time
        if not [x for x in alive if not of_ray(x)]:
            ours_gone = min(ours_gone, now)
        elif now < OURS_S:
            ours = [x for x in alive if not of_ray(x)]
        if not alive:
            all_gone = now
        if not alive or now > RAYS_S:
            break
        time.sleep(0.2)
    names = re.findall(r"^verl-opsd: recipe=\S+ scale=\S+ run directory (.+)$", output, re.MULTILINE)
    return Job(
        returncode=code,
        output=output,
        seconds=exit_time - started,
        cwd=cwd,
        directories=[Path(n.strip()) for n in names],
        sandboxes=sorted(watch.sandboxes),
        ours_left=[] if ours_gone < OURS_S else ours,
        all_left=alive,
        ours_gone_s=ours_gone,
        all_gone_s=all_gone,
        sandbox_rests=watch.left(),
    )


# ---- reading a run directory without this project's code --------------------------------------------------------------


def table(run: Path, name: str, split: str) -> list[dict[str, Any]]:
    """Rows of all episodes' ``turns``, ``grades`` or ``episodes`` tables of a split, with ``file_contract`` from the file."""
    rows = []
    for folder in sorted((run / "episodes").glob(f"{split}-*")):
        read = pq.read_table(folder / f"{name}.parquet")
        stamp = read.schema.metadata[b"contract_hash"].decode()
        rows += [{**r, "episode_id": folder.name, "file_contract": stamp} for r in read.to_pylist()]
    return rows


def stages(run: Path) -> list[dict[str, Any]]:
    """Stage manifests in the order of their files."""
    return [json.loads(p.read_text()) for p in sorted((run / "stages").glob("*.json"))]


def evidence(run: Path, gate: str) -> list[dict[str, Any]]:
    """Verdicts of one gate, in order."""
    lines = [json.loads(x) for x in (run / "evidence.jsonl").read_text().splitlines()]
    return [x for x in lines if x["gate"] == gate]


def telemetry(run: Path) -> list[dict[str, np.ndarray]]:
    """Per-position values of each round, in float64."""
    return [
        {k: v.astype(np.float64) for k, v in np.load(p).items() if k != "row_names"}
        for p in sorted((run / "telemetry").glob("*.npz"))
    ]


def report(run: Path) -> dict[str, Any]:
    """report.json."""
    value: dict[str, Any] = json.loads((run / "report.json").read_text())
    return value
