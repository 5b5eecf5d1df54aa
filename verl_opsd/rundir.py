"""The run directory: what ran, what was decided, what came out. Every file is written under a temporary name and renamed.

meta.json            versions, devices, command, resolved config
contract.json        the frozen evaluation contract of this run
evidence.jsonl       append-only: every gate with its threshold, value and verdict, and the hashes of what was graded;
                     each line holds the hash of the one before (verl_opsd.evidence)
episodes/            turns, episodes and grades (Parquet)
left_out/            branches of an episode that became no row, with the reason; nothing where all of them did
stages/              one manifest a stage, with its seconds and the hashes of its inputs and outputs
checkpoints/         verl's checkpoints and the exported adapter
report.json          the table at the end
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import append
from verl_opsd.evidence.graded import record_episode

if TYPE_CHECKING:
    from verl_opsd.tokens.records import Episode
    from verl_opsd.tokens.store import EpisodeStore


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` atomically: readers see the old file or the new one, never a part.

    Raises:
        OpsdError: no file can be at ``path``.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        temporary.replace(path)
    except (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise OpsdError(
            f"{path}: {error}", "a file is written into a folder that exists or can be made", "name another path"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run.

    Raises:
        OpsdError: the file holds something else.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise OpsdError(
            f"{path}: {type(error).__name__}: {error}",
            "it holds the JSON object that its run wrote",
            "restore the file, or name another run",
        ) from error


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class RunDir:
    """Paths and writers of one run directory; cheap to open from any process of the run."""

    def __init__(self, path: Path | str):
        self.path = Path(path)

    @classmethod
    def from_env(cls) -> RunDir:
        """The directory of the run that this process belongs to (``OPSD_RUN_DIR``).

        Raises:
            OpsdError: the variable is not set.
        """
        value = os.environ.get("OPSD_RUN_DIR")
        if not value:
            raise OpsdError(
                "OPSD_RUN_DIR is not set",
                "every process of a run knows its run directory; the recipe sets it through hydra.job.env_set",
                "start the run with `+recipe=...`; on an existing Ray cluster add OPSD_RUN_DIR to "
                "ray_kwargs.ray_init.runtime_env.env_vars",
            )
        return cls(value)

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    def store_episode(self, store: EpisodeStore, episode: Episode) -> None:
        """Writes an episode, then the hashes of its files to the log: a grade that is changed later is told by them."""
        store.write(episode)
        record_episode(self.path, episode.episode_id, episode.model_version, episode.outcome)

    def started(self) -> float:
        """Seconds since the epoch when the preparation of the run began."""
        return float(json.loads((self.path / "meta.json").read_text())["started"])

    def contract(self) -> EvalContract:
        """The frozen contract of this run."""
        return EvalContract.from_dict(read_json(self.path / "contract.json"))

    def evidence(self, gate: str, value: Any, threshold: Any, passed: bool | None, detail: str = "") -> None:
        """Appends one verdict to the log (``evidence.chain``); writers in any process wait for one another.

        Args:
            passed: None: the value is recorded and nothing depends on it.
        """
        append(self.path, gate, value, threshold, "recorded" if passed is None else "pass" if passed else "fail", detail)

    def write_left_out(self, episode_id: str, reasons: dict[str, str]) -> None:
        """Records which branches of an episode became no row and why, by ``AGENT/BRANCH``; replaces what an earlier attempt left."""
        path = self.path / "left_out" / f"{episode_id}.json"
        if reasons:
            write_json(path, reasons)
        else:
            path.unlink(missing_ok=True)

    def left_out(self, episode_id: str) -> dict[str, str]:
        """What :meth:`write_left_out` recorded; empty where every branch became a row."""
        path = self.path / "left_out" / f"{episode_id}.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def require(self, gate: str, value: Any, threshold: Any, passed: bool, way_out: str, detail: str = "") -> None:
        """Records a verdict and stops the run when it failed.

        Raises:
            OpsdError: ``passed`` is False.
        """
        self.evidence(gate, value, threshold, passed, detail)
        if not passed:
            raise OpsdError(f"gate {gate}: {value} against {threshold} {detail}".rstrip(), "gates fail closed", way_out)

    @contextmanager
    def stage(
        self,
        step: int,
        name: str,
        inputs: dict[str, Any] | None = None,
        started: float | None = None,
        ended: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Times a stage and writes its manifest when it ends; the body fills ``outputs``. A failed stage leaves none.

        Args:
            started, ended: seconds since the epoch when the stage began and ended; now, when left out.
        """
        outputs: dict[str, Any] = {}
        started = time.time() if started is None else started
        yield outputs
        write_json(
            self.path / "stages" / f"{step:04d}-{name}.json",
            {
                "step": step,
                "stage": name,
                "state": "done",
                "inputs": inputs or {},
                "outputs": outputs,
                "started": started,
                "seconds": (time.time() if ended is None else ended) - started,
            },
        )

    def stages(self) -> list[dict[str, Any]]:
        """All manifests, in order."""
        return [json.loads(p.read_text()) for p in sorted((self.path / "stages").glob("*.json"))]
