"""Starting a run again in its own directory: everything is counted once.

The trainer continues after its last checkpoint. What later, interrupted rounds have left (episodes, telemetry, stage
manifests) is moved to ``interrupted/<number>/`` of the run directory, where no report looks, and the rounds are run again.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir

#: Episode folders are named <split>-<step>-<row>-<session>; stage manifests <step>-<stage>.json; telemetry <step>.npz.
_EPISODE, _NUMBERED = re.compile(r"(train|eval)-(\d+)-"), re.compile(r"(\d+)[-.]")


#: Keys that may change when a run is continued: how long and how often, where output goes, what carries the processes.
MAY_CHANGE = (
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.val_before_train",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.resume",
    "trainer.max_actor_ckpt_to_keep",
    "ray_kwargs",
    "global_profiler",
    "opsd.threads",
    "opsd.worth.override",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.engine_kwargs",
)


def check(run: RunDir, contract: EvalContract, config: dict[str, Any]) -> None:
    """A run directory that holds episodes is continued under its own contract and configuration only.

    Args:
        config: the composed configuration, references unresolved, without Hydra's section.

    Raises:
        OpsdError: naming the fields that differ.
    """
    if not (run.path / "contract.json").is_file() or not run.episodes.is_dir() or not any(run.episodes.iterdir()):
        return
    contract.require_same(run.contract(), f"run directory {run.path}")
    meta = run.path / "meta.json"
    if not meta.is_file():
        return
    require_same(run, json.loads(meta.read_text())["config"], config)


def require_same(
    run: RunDir, earlier: dict[str, Any], config: dict[str, Any], may_change: tuple[str, ...] = MAY_CHANGE
) -> None:
    """A run is continued under the configuration that it was started with.

    Raises:
        OpsdError: naming the keys that differ.
    """
    before, now = flat(earlier), flat(json.loads(json.dumps(config)))
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and not k.startswith(may_change))
    if changed:
        raise OpsdError(
            f"run directory {run.path} was started with "
            + "; ".join(f"{k}={before.get(k)} and not {now.get(k)}" for k in changed[:5])
            + (f" (and {len(changed) - 5} more keys)" if len(changed) > 5 else ""),
            "a run is continued under its own configuration; two of them would be one curve",
            "give the same keys, or start a run of its own (leave hydra.run.dir out)",
        )


def flat(values: Any, where: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    if not isinstance(values, dict):
        return {where: values}
    return {k: v for key, below in values.items() for k, v in flat(below, f"{where}.{key}" if where else str(key)).items()}


def earlier_meta(run: RunDir) -> list[dict[str, Any]]:
    """Meta data of the earlier starts of this run, oldest first."""
    path = run.path / "meta.json"
    if not path.is_file():
        return []
    meta = json.loads(path.read_text())
    return [*meta.pop("earlier"), meta]


def evaluated(run: RunDir, step: int) -> bool:
    """Whether the evaluation after round ``step`` came to its end."""
    return (run.path / "stages" / f"{step:04d}-evaluate.json").is_file()


def set_aside(run: RunDir, step: int, keep_evaluation: bool) -> Path | None:
    """Moves what belongs to rounds after ``step`` out of the way, and records it in the evidence.

    Args:
        step: the round of the checkpoint that the trainer continues from; 0 for a start from scratch.
        keep_evaluation: keep the evaluation after round ``step``; otherwise it is moved too, because it is run again.

    Returns:
        The directory of what was moved; None when there was nothing.
    """

    def later(number: int, evaluation: bool) -> bool:
        return number > step or (number == step and evaluation and not keep_evaluation)

    moved: list[Path] = []
    for path in _children(run.episodes):
        if path.name.endswith(".tmp"):  # an episode that was being written
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif (match := _EPISODE.match(path.name)) and later(int(match[2]), match[1] == "eval"):
            moved.append(path)
    for folder in ("stages", "telemetry"):
        for path in _children(run.path / folder):
            if (match := _NUMBERED.match(path.name)) and later(int(match[1]), path.stem.endswith("evaluate")):
                moved.append(path)
    if not moved:
        return None
    root = run.path / "interrupted"
    target = root / str(len(_children(root)))
    for path in moved:
        place = target / path.parent.name / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    run.report.unlink(missing_ok=True)
    run.report.with_suffix(".html").unlink(missing_ok=True)
    episodes = sum(p.parent == run.episodes for p in moved)
    run.evidence("resume", step, None, None, f"{episodes} episodes and {len(moved) - episodes} files moved to {target}")
    return target


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
