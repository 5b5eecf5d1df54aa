"""Tasks and features that no subset may use any more, with the reason: a log that only grows, in ``<dataset>/exclusions/``.

The log is a hash chain (``evidence.chain``): a line that was edited or taken out is noticed when it is read.
"""

from __future__ import annotations

import re
from pathlib import Path

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import append, verify

#: A task, or one feature of it.
_KEY = re.compile(r"(?P<repo>[^/,]+)/task(?P<task>\d+)(?:/f(?P<feature>\d+))?")


def exclude(dataset_dir: Path, key: str, reason: str) -> None:
    """Adds ``repo/task7`` or ``repo/task7/f3``.

    Raises:
        OpsdError: no such task or feature in the data set, a reason of less than three words, or a log that was edited.
    """
    match = _KEY.fullmatch(key)
    folder = dataset_dir / match["repo"] / f"task{int(match['task'])}" if match else dataset_dir / "none"
    known = (folder / f"feature{int(match['feature'])}" if match and match["feature"] else folder).is_dir()
    if not known or len(reason.split()) < 3:
        raise OpsdError(
            f"exclusion of {key!r} from {dataset_dir} because {reason!r}",
            "a task (repo/task7) or one feature (repo/task7/f3) of the data set is excluded, for a reason that is understood later",
            "name one of the two, and give the reason in a few words",
        )
    excluded(dataset_dir)
    append(dataset_dir / "exclusions", "exclude", key, None, "recorded", reason)


def excluded(dataset_dir: Path) -> dict[str, str]:
    """Excluded tasks and features with their reasons.

    Raises:
        OpsdError: a line was edited or taken out.
    """
    folder = dataset_dir / "exclusions"
    if not folder.is_dir():
        return {}
    lines, findings = verify(folder)
    if edited := [str(f) for f in findings if not f.killed]:
        raise OpsdError(
            f"{folder}: {'; '.join(edited)}",
            "the list of exclusions only grows",
            "restore the file; what may be used again is decided by a new data set, not by an edit",
        )
    return {str(line["value"]): str(line["detail"]) for line in lines if line["gate"] == "exclude"}


def reason_against(found: dict[str, str], repo: str, task_id: int, features: tuple[int, ...]) -> str:
    """Why these features of a task may not be used; empty where they may."""
    keys = [f"{repo}/task{task_id}", *(f"{repo}/task{task_id}/f{feature}" for feature in features)]
    return "; ".join(f"{key}: {found[key]}" for key in keys if key in found)
