"""Episodes of the models that a command names: of run directories, and of the harness' own log folders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.log_tree import is_log_tree, read_log_tree
from verl_opsd.evaluation.compare import compare
from verl_opsd.evaluation.design import Rerun, noise_floor
from verl_opsd.evaluation.memory import uncollected
from verl_opsd.evaluation.shapes import Comparison, Standing
from verl_opsd.evaluation.standings import ModelInfo, by_version, model_info, outcomes, standing
from verl_opsd.evidence.chain import lines
from verl_opsd.evidence.graded import graded_versions
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore


def split_name(spec: str) -> tuple[str, Path]:
    """``NAME=PATH`` or ``PATH``, whose name is its last part; a folder that is there may have ``=`` in its own name.

    Raises:
        OpsdError: ``=PATH``.
    """
    name, equals, path = ("", "", spec) if Path(spec).expanduser().is_dir() else spec.partition("=")
    if equals and not name:
        raise OpsdError(spec, "a model has a name, its own or the folder's", f"write NAME={path}, or {path}")
    folder = Path(path if equals else spec).expanduser()
    return (name if equals else folder.resolve().name), folder


@uncollected()
def load_models(specs: Sequence[str], split: str = "eval") -> dict[str, list[Episode]]:
    """Name -> episodes, in the order of ``specs``; those of one name are one model.

    Args:
        specs: ``NAME=PATH`` or ``PATH`` of a run directory or of a folder of the harness' logs.
        split: of run directories: ``train`` or ``eval``. Episodes of several policy versions are models of their own,
            ``NAME@VERSION``; one whose episodes are all gone has none.

    Raises:
        OpsdError: a folder that holds neither, or nothing of the split.
    """
    models: dict[str, list[Episode]] = {}
    for spec in specs:
        name, folder = split_name(spec)
        graded = graded_versions(lines(folder), split)
        if RunDir(folder).episodes.is_dir():
            found = [e for e in EpisodeStore(RunDir(folder).episodes).episodes() if e.split == split]
        elif graded:
            found = []
        elif folder.is_dir() and is_log_tree(folder):
            found = list(read_log_tree(folder))
        else:
            raise OpsdError(
                f"{folder} holds no episodes",
                "a run directory has a folder `episodes`, a folder of the harness' logs has a `result.json` for each pair",
                "name one of the two",
            )
        versions = by_version(found, graded)
        if not versions:
            raise OpsdError(f"{folder} holds no {split} episodes", "a model in a table has some", "choose another --split")
        for version, own in versions.items():
            models.setdefault(f"{name}@{version}" if len(versions) > 1 else name, []).extend(own)
    return models


def model_standings(specs: Sequence[str], models: Mapping[str, Sequence[Episode]], split: str = "eval") -> list[Standing]:
    """A row a model of :func:`load_models`; what its run directories say of it (size, serving, plan, patches alone) is taken along."""
    rows = []
    for name, episodes in models.items():
        infos = []
        for own, folder in map(split_name, specs):
            if found := re.fullmatch(rf"{re.escape(own)}(?:@(-?\d+))?", name):
                infos.append(_info(folder, episodes, split, None if found[1] is None else int(found[1])))
        info = infos[0]
        if len(infos) > 1:  # several runs of one model
            planned = [i.planned for i in infos if i.planned is not None]
            alone = {k: v for i in infos for k, v in i.alone.items()}
            said, unsure = (tuple(dict.fromkeys(x for i in infos for x in getattr(i, k))) for k in ("invalidated", "doubts"))
            whole = sum(planned) if len(planned) == len(infos) else None
            info = replace(info, planned=whole, alone=alone, invalidated=said, doubts=unsure)
        rows.append(standing(name, episodes, info))
    return rows


def _info(folder: Path, episodes: Sequence[Episode], split: str, version: int | None) -> ModelInfo:
    """What a run directory says of those of a model's episodes that it holds; of a folder of the harness' logs nothing is known."""
    store = RunDir(folder).episodes
    held = set(EpisodeStore(store).ids()) if store.is_dir() else set()
    mine = [e for e in episodes if e.episode_id in held]
    return model_info(folder, mine, split, version)


def require_one_contract(specs: Sequence[str], varies: str | None) -> None:
    """Refuses to compare run directories of different contracts, but for one declared field, and a folder with itself. Logs of the
    harness carry no contract.

    Raises:
        OpsdError: naming the fields that differ, or a folder that is named twice.
    """
    folders = [folder.resolve() for _, folder in map(split_name, specs)]
    if twice := sorted({str(f) for f in folders if folders.count(f) > 1}):
        raise OpsdError(f"{', '.join(twice)} named twice", "a run compared with itself shows nothing", "name each run once")
    runs = [RunDir(folder) for _, folder in map(split_name, specs) if (folder / "contract.json").is_file()]
    for run in runs[1:]:
        runs[0].contract().require_same(run.contract(), str(run.path), varies, mine=str(runs[0].path))


def comparisons(
    models: Mapping[str, Sequence[Episode]],
    baseline: str,
    reruns: Sequence[str],
    nodes: Mapping[str, str],
    correction: Literal["holm", "bh"] = "holm",
) -> list[Comparison]:
    """Every model but the re-runs against the baseline, on pairs and on features passed, on common pairs.

    Args:
        reruns: models that are the baseline's weights once more; with the baseline they give the noise floor.
        nodes: model -> what served it.

    Raises:
        OpsdError: a name that is no model, a re-run that is the baseline or named twice, or nothing to compare.
    """
    unknown = {baseline, *reruns} - set(models)
    others = [m for m in models if m != baseline and m not in reruns]
    if unknown or not others or len({baseline, *reruns}) <= len(reruns):
        raise OpsdError(
            f"baseline {baseline}, re-runs {list(reruns)}, models {list(models)}",
            "a comparison is of a model with a baseline among those that were named; a re-run is another of them, named once",
            "correct the names, or name a model to compare",
        )
    rng = np.random.default_rng(0)
    out: list[Comparison] = []
    for metric in ("pairs", "features"):
        floor = None
        if reruns:
            runs = [_rerun(n, i, models[n], metric, nodes[n]) for i, n in enumerate((baseline, *reruns))]
            floor = noise_floor(runs)
        scores = [outcomes(n, models[n], metric) for n in others]
        out += compare(outcomes(baseline, models[baseline], metric), scores, rng, floor=floor, correction=correction)
    return out


def _rerun(name: str, number: int, episodes: Sequence[Episode], metric: str, node: str) -> Rerun:
    values = {pair: float(np.mean(v)) for pair, v in outcomes(name, episodes, metric).values.items()}
    return Rerun(values, node=node, seed=number)
