"""Hydra callback of every recipe: checks before a job, the table and the clean-up after it.

Hydra swallows exceptions of callbacks and runs the job all the same, so every refusal leaves as ``SystemExit(2)``.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl_opsd import reaper
from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import lines
from verl_opsd.evidence.copies import warning
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.verl_adapter.budget import DryRun
from verl_opsd.verl_adapter.choices import check_choices, require_command
from verl_opsd.verl_adapter.place import Found, require_writable

if TYPE_CHECKING:
    from verl_opsd.verl_adapter.launch import Launch

#: Stands for the directories of a sweep's jobs while nothing is started.
NOT_YET = "opsd-not-yet"


@contextmanager
def refusing() -> Iterator[None]:
    """Errors leave as ``SystemExit(2)``, printed, and a dry run as ``SystemExit(0)``: Hydra swallows every exception of a callback.

    Raises:
        SystemExit: see above.
    """
    try:
        yield
    except DryRun as estimate:
        print(f"verl-opsd: dry run, nothing was started\n{estimate}", flush=True)
        raise SystemExit(0) from None
    except OpsdError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
    except SystemExit as e:  # a registration of the plugin that failed while a check imported verl's modules
        print(e, file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
        print("error: preparing the run failed (traceback above); nothing was started", file=sys.stderr, flush=True)
    else:
        return
    raise SystemExit(2)


class OpsdCallback(Callback):
    """One instance a process; a multirun calls it once for each job."""

    def __init__(self) -> None:
        # the interpreter's last collections walk over everything that torch and verl have loaded: seconds, for nothing
        atexit.register(gc.freeze)
        self._reaper: subprocess.Popen[bytes] | None = None
        self._ray_was_up = False
        self._threads = os.environ.get("OMP_NUM_THREADS")
        self._tmpdir, self._base = os.environ.get("TMPDIR"), tempfile.gettempdir()
        self._run: RunDir | None = None
        self._found: Found | None = None
        self._checked: dict[str, Launch] = {}

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuses a wrong entry point, or a run directory that can't be, and remembers what that held before Hydra writes into it.

        Raises:
            SystemExit: 2, after the error was printed.
        """
        with refusing():
            require_command(config, "ppo_trainer")
            check_choices(config)
            require_writable(config.hydra.run.dir, "hydra.run.dir")
        self._found = Found.of(Path(config.hydra.run.dir), str(config.hydra.job.name))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuses bad input and prepares the run; a refused run, and a dry one, leaves no directory behind.

        Raises:
            SystemExit: 2, after the error was printed; 0 after a dry run.
        """
        found, self._found = self._found, None
        try:
            with refusing():
                self._run = RunDir.from_env()
                if found is None:  # a job of a sweep: Hydra's own files are there already
                    job = str(OmegaConf.select(config, "hydra.job.name", default="main_ppo"))
                    found = Found.of(self._run.path, job, fresh=True)
                self._start(config, self._run)
        except SystemExit:
            self._unwatch(started=False)
            if found is not None and self._run is not None:
                found.restore(self._run.path)
            raise

    def _start(self, config: DictConfig, run: RunDir) -> None:
        from verl_opsd.resume import earlier_meta
        from verl_opsd.verl_adapter.launch import meta, prepare_run
        from verl_opsd.verl_adapter.requirements import require_plugin
        from verl_opsd.verl_adapter.sweep import key_of

        started = time.time()
        require_plugin()
        self._watch()
        checked = self._checked.get(key_of(config)) if self._checked else None  # a job of a sweep
        opsd = prepare_run(config, run, checked)
        import ray

        self._ray_was_up = ray.is_initialized()
        threads = self._threads if opsd.threads is None else str(opsd.threads)
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)  # of an earlier job of a multirun
        else:
            os.environ["OMP_NUM_THREADS"] = threads  # Ray's processes inherit it
        write_json(run.path / "meta.json", meta(config, opsd, started) | {"earlier": earlier_meta(run)})

    def _watch(self) -> None:
        """Everything temporary of this process and of those that it starts goes into one directory, which a reaper removes."""
        os.environ["OPSD_TMP"] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="opsd-", dir=self._base)
        os.environ["OPSD_DRIVER_PID"] = str(os.getpid())
        self._reaper = reaper.start([os.environ["OPSD_TMP"], os.environ["OPSD_RAY_TMP"]])

    def _unwatch(self, started: bool) -> None:
        """Lets the reaper clean up; where nothing was ``started`` there is nothing to wait for."""
        tempfile.tempdir = self._base
        if self._tmpdir is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._tmpdir
        if self._reaper is None or self._reaper.stdin is None:
            return
        folder = os.environ.pop("OPSD_TMP")
        if not started:
            self._reaper.kill()
            self._reaper.wait()
            shutil.rmtree(folder)
        self._reaper.stdin.close()
        self._reaper = None

    def on_multirun_start(self, config: DictConfig, config_name: str | None = None, **kwargs: Any) -> None:
        """Refuses a sweep with a bad value before its first job starts and before Hydra makes the sweep's directory.

        Raises:
            SystemExit: 2, after the error was printed.
        """
        with refusing():
            require_command(config, "ppo_trainer")
            require_writable(config.hydra.sweep.dir, "hydra.sweep.dir")
            self._checked = self._check_jobs(config, config_name or str(config.hydra.job.config_name))
        jobs = len(self._checked)
        print(
            f"verl-opsd: {jobs} jobs checked"
            if jobs
            else "verl-opsd: the sweeper chooses values later; jobs are checked one by one"
        )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Says how the jobs are joined."""
        print(f"verl-opsd: the jobs in one table and plot: opsd sweep {config.hydra.sweep.dir}", flush=True)

    def _check_jobs(self, config: DictConfig, config_name: str) -> dict[str, Launch]:
        from verl_opsd.verl_adapter.requirements import require_plugin
        from verl_opsd.verl_adapter.sweep import check_multirun

        require_plugin()
        # what a job's own environment names; nothing is written there by a check
        names = ("OPSD_RUN_DIR", "OPSD_RAY_TMP")
        os.environ.update({name: str(Path(self._base, NOT_YET)) for name in names})
        self._watch()
        try:
            return check_multirun(config, config_name)
        finally:
            self._unwatch(started=False)
            for name in names:
                del os.environ[name]

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Shows the table or the cause of the failure, shuts down a Ray cluster that this job started, and lets the reaper
        remove temporary files."""
        import ray

        from verl_opsd.evaluation.report import print_table

        if ray.is_initialized() and not self._ray_was_up:
            ray.shutdown()
        if self._run is None:
            return
        report, failed = self._run.report, job_return.status == JobStatus.FAILED
        if report.is_file() and not failed:
            print_table(report)
            print(f"verl-opsd: {self._run.path}/report.html", flush=True)
            if text := warning(lines(self._run.path), self._run.path):
                print(f"warning: {text}", file=sys.stderr, flush=True)
        self._unwatch(started=True)
        if not failed and not report.is_file():
            print(f"verl-opsd: the job ended without a report; evidence: {self._run.path}/evidence.jsonl", file=sys.stderr)
        if failed:
            cause = getattr(job_return._return_value, "cause", job_return._return_value)
            print(f"error: {cause}\nverl-opsd: evidence so far: {self._run.path}/evidence.jsonl", file=sys.stderr, flush=True)
