"""Processes of their own without an interpreter's start: a server imports once what is slow to import, and forks.

python forked.py PRELOAD        reads requests as lines of JSON, answers each with the exit codes
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What verl's commands import beside verl itself.
LIBRARIES = (
    "import torch, torch.distributed.fsdp, torch.utils.data, ray, ray.util.placement_group, transformers, transformers.modeling_utils, hydra, "
    "omegaconf, tensordict, peft, datasets, pyarrow.parquet, pandas, fastapi, uvicorn, aiohttp, accelerate"
)


@dataclass(frozen=True)
class Done:
    """How a process ended: its exit code (minus the signal that ended it) and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """A server with ``preload`` imported; use as a context manager. ``path``: folders put before the others that modules are found in."""

    def __init__(self, preload: str, folder: Path, path: tuple[Path, ...] = ()):
        self._folder, self._count = folder, 0
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(map(str, (*path, os.environ.get("PYTHONPATH", "")))).rstrip(":"),
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__, preload], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(60)

    def run(
        self, code: str, *argv: list[str], cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 120.0
    ) -> list[Done]:
        """Runs ``code`` as ``python -c`` does, in one process for each of ``argv`` at the same time; what takes longer is killed."""
        jobs = []
        for arguments in argv:
            self._count += 1
            out, err = (str(self._folder / f"{self._count}.{name}") for name in ("out", "err"))
            jobs.append({"argv": arguments, "out": out, "err": err})
        request = {"code": code, "cwd": str(cwd), "env": dict(os.environ) | (env or {}), "timeout_s": timeout_s, "jobs": jobs}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the server ended with {self._server.wait(60)}"
        texts = [[Path(job[name]).read_text(errors="replace") for name in ("out", "err")] for job in jobs]
        return [Done(returncode, *text) for returncode, text in zip(json.loads(answer), texts, strict=True)]


def _child(request: dict[str, Any], job: dict[str, Any]) -> None:
    for number, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (job["out"], _WRITE), (job["err"], _WRITE))):
        handle = os.open(path, flags, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *job["argv"]]
    sys.path.insert(0, "")
    code = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _serve(preload: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    exec(preload, {})
    for line in sys.stdin:
        request = json.loads(line)
        running: dict[int, int] = {}
        codes = [-signal.SIGKILL] * len(request["jobs"])
        for i, job in enumerate(request["jobs"]):
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                _child(request, job)
            running[pid] = i
        until = time.monotonic() + request["timeout_s"]
        while running:
            for pid in list(running):
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
