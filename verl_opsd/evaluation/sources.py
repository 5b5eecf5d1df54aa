"""Episodes of the models that a command names: of run directories, and of the harness' own log folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.log_tree import is_log_tree, read_log_tree
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore


def split_name(spec: str) -> tuple[str, Path]:
    """``NAME=PATH`` or ``PATH``, whose name is its last part."""
    name, equals, path = spec.rpartition("=")
    folder = Path(path).expanduser()
    return (name if equals else folder.resolve().name), folder


def load_models(specs: Sequence[str], split: str = "eval") -> dict[str, list[Episode]]:
    """Name -> episodes, in the order of ``specs``; those of one name are one model.

    Args:
        specs: ``NAME=PATH`` or ``PATH`` of a run directory or of a folder of the harness' logs.
        split: of run directories: ``train`` or ``eval``. Episodes of several policy versions are models of their own,
            ``NAME@VERSION``.

    Raises:
        OpsdError: a folder that holds neither, or nothing of the split.
    """
    models: dict[str, list[Episode]] = {}
    for spec in specs:
        name, folder = split_name(spec)
        if RunDir(folder).episodes.is_dir():
            found = [e for e in EpisodeStore(RunDir(folder).episodes).episodes() if e.split == split]
        elif folder.is_dir() and is_log_tree(folder):
            found = list(read_log_tree(folder))
        else:
            raise OpsdError(
                f"{folder} holds no episodes",
                "a run directory has a folder `episodes`, a folder of the harness' logs has a `result.json` for each pair",
                "name one of the two",
            )
        if not found:
            raise OpsdError(f"{folder} holds no {split} episodes", "a model in a table has some", "choose another --split")
        versions = sorted({e.model_version for e in found if e.scored})
        for e in found:
            own = f"{name}@{e.model_version}" if len(versions) > 1 else name
            models.setdefault(own, []).append(e)
    return models
