"""Copies of a log elsewhere: the only thing that a rewritten log can be told by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import HEAD, LOG, Finding, append, verify

#: Name of the line that a copy leaves in the log, and in the copy.
COPIED = "copied"


def copy(run: Path, target: Path) -> Path:
    """Copies the log, and the predictions that it names, to ``target``; returns the copied log.

    An older copy of the same log at ``target`` is replaced by the longer one.

    Raises:
        OpsdError: the log is damaged, ``target`` lies in the run directory, or it holds the copy of another log or of
            this one before it was rewritten.
    """
    run, target = run.resolve(), target.expanduser().resolve()
    if target == run or run in target.parents:
        raise OpsdError(
            f"{target} lies in the run directory",
            "a copy protects when it lies elsewhere",
            "name a folder outside, best on another machine",
        )
    _, findings = verify(run)
    if wrong := [f for f in findings if not f.killed]:
        raise OpsdError(
            f"{run / LOG} is damaged ({wrong[0]})",
            "only a whole log is copied, so that a copy is worth something",
            f"look with `opsd evidence verify {run}`",
        )
    if (target / LOG).is_file() and (differs := against(run, target)):
        raise OpsdError(
            f"{target / LOG}: {differs[0]}",
            "a copy is replaced by a longer log that begins with it, never by another",
            "name an empty folder, and find out which of the two was rewritten",
        )
    target.mkdir(parents=True, exist_ok=True)
    same = os.stat(target).st_dev == os.stat(run).st_dev
    append(run, COPIED, str(target), None, "recorded", "on the same file system" if same else "on another file system")
    for path in (run / HEAD, *sorted((run / "predictions").glob("*.yaml")), run / LOG):
        place = target / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}")
        temporary.write_bytes(path.read_bytes())
        temporary.replace(place)
    return target / LOG


def against(run: Path, target: Path) -> list[Finding]:
    """What a log's beginning has different from an older copy of it, in ``target``."""
    mine, old = ((folder / LOG).read_bytes().split(b"\n")[:-1] for folder in (run, target))
    for n, (a, b) in enumerate(zip(mine, old, strict=False)):
        if a != b:
            return [Finding(n, f"not as in the copy {target / LOG}")]
    if len(mine) < len(old):
        return [Finding(None, f"{len(mine)} lines, the copy {target / LOG} has {len(old)}")]
    return []


def warning(log: Sequence[Mapping[str, Any]], run: Path) -> str | None:
    """What is to be said while the last lines have no copy elsewhere; None when all have one."""
    copied = [i for i, x in enumerate(log) if x["gate"] == COPIED]
    left = len(log) - (copied[-1] + 1 if copied else 0)
    if not left:
        return None
    since = (
        f"{left} of {len(log)} lines of evidence are in no copy"
        if copied
        else f"{len(log)} lines of evidence lie in the run directory only"
    )
    return f"{since}: opsd evidence copy {run} FOLDER_ELSEWHERE"
