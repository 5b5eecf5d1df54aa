"""Hydra callback of every recipe: checks before a job, the table and the clean-up after it.

Hydra swallows exceptions of callbacks and runs the job all the same, so every refusal leaves as ``SystemExit(2)``.
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from verl_opsd import reaper
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir, write_json


class OpsdCallback(Callback):
    """One instance a process; a multirun calls it once for each job."""

    def __init__(self) -> None:
        # the interpreter's last collections walk over everything that torch and verl have loaded: seconds, for nothing
        atexit.register(gc.freeze)
        self._reaper: subprocess.Popen[bytes] | None = None
        self._ray_was_up = False
        self._run: RunDir | None = None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuses bad input and prepares the run."""
        from verl_opsd.verl_adapter.launch import meta, prepare_run

        started = time.time()
        self._run = run = RunDir.from_env()
        try:
            if "verl_opsd.plugin" not in sys.modules:
                raise OpsdError(
                    "verl did not load the verl-opsd plugin",
                    "registrations happen through the entry point group `verl.plugins`",
                    "unset VERL_USE_EXTERNAL_PLUGINS and reinstall with `pip install .`",
                )
            opsd = prepare_run(config, run)
        except OpsdError as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        except Exception:
            traceback.print_exc()
            print("error: preparing the run failed; nothing was started", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        os.environ["OPSD_TMP"] = tempfile.mkdtemp(prefix="opsd-")
        os.environ["OPSD_DRIVER_PID"] = str(os.getpid())
        self._reaper = reaper.start([os.environ["OPSD_TMP"], os.environ["OPSD_RAY_TMP"]])
        write_json(run.path / "meta.json", meta(config, opsd, started))
        import ray

        self._ray_was_up = ray.is_initialized()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Shows the table, shuts down a Ray cluster that this job started, and lets the reaper remove temporary files."""
        import ray

        from verl_opsd.evaluation.report import print_table

        if ray.is_initialized() and not self._ray_was_up:
            ray.shutdown()
        if self._run is None:
            return
        report = self._run.report
        if report.is_file():
            print_table(report)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper = None
        if not report.is_file():
            print(
                f"verl-opsd: no report was written; evidence so far: {Path(report).with_name('evidence.jsonl')}",
                file=sys.stderr,
            )
