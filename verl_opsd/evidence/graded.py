"""What was graded: the hashes of each stored episode's files stand in the log, and are compared with the files later."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import LOG, append, verify

#: Name of the lines that hold an episode's hashes.
EPISODE = "episode"
FILES = ("turns", "grades", "episodes")

#: ``whole``: the files are those that were graded. ``altered``: they are others. ``gone``: they are not there.
#: ``unrecorded``: they are there, and the log doesn't know them.
State = Literal["whole", "altered", "gone", "unrecorded"]


def record_episode(run: Path, episode_id: str, version: int, outcome: str) -> None:
    """Appends the hashes of a stored episode's files, and the policy version that acted, to the log of ``run``."""
    hashes = _hashes(run / "episodes" / _name(episode_id))
    append(run, EPISODE, {"episode": episode_id, "version": version, **hashes}, None, "recorded", outcome)


def check_episodes(run: Path, log: Iterable[Mapping[str, Any]]) -> dict[str, tuple[State, str]]:
    """Episode id -> its state and what is wrong ("" where nothing is). Episodes that a restart moved to ``interrupted/`` are
    looked up there."""
    known = {x["value"]["episode"]: x["value"] for x in log if x["gate"] == EPISODE}
    folders = {urllib.parse.unquote(p.name): p for p in _folders(run / "episodes")}
    aside = {urllib.parse.unquote(p.name): p for p in run.glob("interrupted/*/episodes/*") if p.is_dir()}
    states: dict[str, tuple[State, str]] = {}
    for episode_id, hashes in known.items():
        folder = folders.get(episode_id, aside.get(episode_id))
        if folder is None:
            states[episode_id] = ("gone", "its files are gone: what was computed from them can't be verified")
            continue
        now = _hashes(folder)
        changed = [f"{name}.parquet" for name in FILES if now.get(name) != hashes.get(name)]
        states[episode_id] = ("altered", f"{', '.join(changed)} not as graded") if changed else ("whole", "")
    for episode_id in folders.keys() - known.keys():
        states[episode_id] = ("unrecorded", "the log does not know it: added by hand, or its writer was killed")
    return states


def graded_versions(log: Iterable[Mapping[str, Any]], split: str) -> set[int]:
    """The policy versions of which the log has scored episodes of a split."""
    of_split = (x for x in log if x["gate"] == EPISODE and x["detail"] == "scored" and x["value"]["episode"].startswith(split))
    return {int(x["value"]["version"]) for x in of_split}


def gone(
    log: Iterable[Mapping[str, Any]], states: Mapping[str, tuple[State, str]], split: str, version: int | None
) -> list[str]:
    """Episodes of a split (and of a policy version) that were graded and whose files are no longer there."""
    graded = (x["value"] for x in log if x["gate"] == EPISODE)
    of_row = {v["episode"] for v in graded if version in (None, v["version"]) and v["episode"].startswith(split)}
    return sorted(e for e in of_row if states[e][0] == "gone")


def doubts(
    log: Sequence[Mapping[str, Any]],
    states: Mapping[str, tuple[State, str]],
    episodes: Sequence[str],
    split: str,
    version: int | None,
) -> tuple[str, ...]:
    """What is to be said of a row over ``episodes``, those of a split (and of a policy version) that are there: whether its raw logs are
    gone, changed, or unknown to the evidence."""
    lost = gone(log, states, split, version)
    found = [f"unverifiable: {len(lost)} graded episodes are gone, and in no number here"] if lost else []
    counts = Counter(states.get(e, ("unrecorded", ""))[0] for e in episodes)
    if n := counts["altered"]:
        found.append(f"altered: the files of {n} of {len(episodes)} episodes are not as graded")
    if n := counts["unrecorded"]:
        found.append(f"unverifiable: the evidence does not know {n} of {len(episodes)} episodes")
    return tuple(found)


def require_untouched(run: Path, what: str) -> None:
    """Refuses a run whose log or graded episodes were changed. A run without a log, and episodes that a log does not know, pass: what
    is not there can't have been changed.

    Raises:
        OpsdError: naming the first finding.
    """
    if not (run / LOG).is_file():
        return
    log, findings = verify(run)
    wrong = [str(f) for f in findings if not f.killed]
    wrong += [f"episode {e}: {why}" for e, (state, why) in check_episodes(run, log).items() if state == "altered"]
    if wrong:
        raise OpsdError(
            f"{what} {run}: {wrong[0]}{f', and {len(wrong) - 1} more' if len(wrong) > 1 else ''}",
            "what was graded is trained on as it was graded",
            f"look with `opsd evidence verify {run}`; collect again",
        )


def _folders(store: Path) -> list[Path]:
    return [p for p in store.iterdir() if p.is_dir() and not p.name.startswith(".")] if store.is_dir() else []


def _hashes(folder: Path) -> dict[str, str]:
    paths = ((name, folder / f"{name}.parquet") for name in FILES)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths if path.is_file()}


def _name(episode_id: str) -> str:
    name = urllib.parse.quote(episode_id, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name
