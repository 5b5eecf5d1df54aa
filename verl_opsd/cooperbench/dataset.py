"""Tasks and pairs in CooperBench's layout: ``<dataset>/<repo>/task<N>/feature<K>/`` and ``<dataset>/subsets/``."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError

#: The tasks that ship with this package.
POCKET_DIR = Path(__file__).parent / "pocket"

#: Subsets of CooperBench's own data set that ship with this package; a data set's own file of the same name comes first.
SUBSETS_DIR = Path(__file__).parent / "subsets"

#: What a byte-compiling installer or an editor leaves beside the files of a tree.
IGNORED_NAMES = ("__pycache__", ".git")


@dataclass(frozen=True)
class Task:
    """One task folder. ``features`` are its feature ids, ascending."""

    dataset_dir: Path
    repo: str
    task_id: int
    features: tuple[int, ...]

    @property
    def task_dir(self) -> Path:
        """Folder of the task."""
        return self.dataset_dir / self.repo / f"task{self.task_id}"


def dataset_folder(name: str | Path, key: str = "--dataset") -> Path:
    """The folder behind a data set's name: ``pocket``, or a path.

    Raises:
        OpsdError: there is no such folder.
    """
    folder = POCKET_DIR if str(name) == "pocket" else Path(name).expanduser().resolve()
    if not folder.is_dir():
        raise OpsdError(
            f"{key}={name}: no folder {folder}",
            "it is `pocket`, the tasks that ship with the package, or a folder in CooperBench's layout",
            "correct the path",
        )
    return folder


def discover(dataset_dir: Path) -> list[Task]:
    """All tasks of a dataset, sorted by repository and task id.

    Raises:
        OpsdError: the folder is absent or holds no task.
    """
    tasks = []
    for task_dir in Path(dataset_dir).glob("*/task*"):
        features = sorted(int(p.name.removeprefix("feature")) for p in task_dir.glob("feature*") if _has_number(p, "feature"))
        if _has_number(task_dir, "task") and features:
            task_id = int(task_dir.name.removeprefix("task"))
            tasks.append(Task(Path(dataset_dir), task_dir.parent.name, task_id, tuple(features)))
    if not tasks:
        raise OpsdError(
            f"dataset {dataset_dir}: no task found",
            "a dataset holds <repo>/task<N>/feature<K>/ folders",
            "give the folder that holds the repositories' folders",
        )
    return sorted(tasks, key=lambda task: (task.repo, task.task_id))


def _has_number(path: Path, prefix: str) -> bool:
    return path.is_dir() and path.name.removeprefix(prefix).isdecimal()


#: One pair by its key (``PairTask.key``).
_PAIR_KEY = re.compile(r"(?P<repo>[^/,]+)/task(?P<task>\d+)/f(?P<a>\d+)_f(?P<b>\d+)")


def load_subset(name_or_path: str | Path, dataset_dir: Path = POCKET_DIR, *, split: str = "train") -> list[PairTask]:
    """Pairs of a subset, in its order; a task without ``pairs`` gives every pair of its features.

    Args:
        name_or_path: name of a file in ``<dataset_dir>/subsets`` (or of :data:`SUBSETS_DIR`) without ``.json``, a path that ends
            in ``.json``, or pairs by their keys, separated by commas: ``repo/task7/f1_f2,repo/task7/f1_f3``.
        split: stored in each pair.

    Raises:
        OpsdError: unknown subset (the known ones are listed), malformed file, a task or feature that the dataset lacks or that is
            excluded, or the same pair twice. Where a task's pairs are not named, those of excluded features are left out.
    """
    from verl_opsd.cooperbench.exclusions import excluded, reason_against

    dataset_dir = Path(dataset_dir)
    where, wanted = _entries(str(name_or_path), dataset_dir)
    known_tasks = {(task.repo, task.task_id): task for task in discover(dataset_dir)}
    pairs: list[PairTask] = []
    gone = excluded(dataset_dir)
    for repo, task_id, listed in wanted:
        task = known_tasks.get((repo, task_id))
        if task is None:
            raise OpsdError(
                f"subset {where}: task {repo}/task{task_id} is not in {dataset_dir}",
                f"the dataset holds {', '.join(f'{r}/task{t}' for r, t in sorted(known_tasks))}",
                "correct the subset, or point the dataset directory at the whole dataset",
            )
        for features in combinations(task.features, 2) if listed is None else listed:
            a, b = sorted(features) if len(features) == 2 else (0, 0)
            if a == b or not {a, b} <= set(task.features):
                raise OpsdError(
                    f"subset {where}: {repo}/task{task_id} pair {list(features)}",
                    f"a pair is two different features out of {list(task.features)}",
                    "correct the subset",
                )
            if reason := reason_against(gone, repo, task_id, (a, b)):
                if listed is None:
                    continue
                raise OpsdError(
                    f"subset {where}: {repo}/task{task_id} pair {[a, b]}",
                    f"excluded: {reason}",
                    "take the pair out of the subset",
                )
            pairs.append(PairTask(dataset_dir, repo, task_id, (a, b), split))
    keys = [pair.key for pair in pairs]
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise OpsdError(f"subset {where}: {', '.join(twice)} twice", "a pair stands once in a subset", "drop the repetition")
    return pairs


def _entries(name: str, dataset_dir: Path) -> tuple[str, list[tuple[str, int, list[list[int]] | None]]]:
    """Where a subset stands, and its (repo, task id, pairs or None for all)."""
    keys = [_PAIR_KEY.fullmatch(part.strip()) for part in name.split(",")]
    if all(keys):
        return name, [(k["repo"], int(k["task"]), [[int(k["a"]), int(k["b"])]]) for k in keys if k is not None]
    path = subset_file(name, dataset_dir)
    if not path.is_file():
        known = sorted({p.stem for p in [*(dataset_dir / "subsets").glob("*.json"), *SUBSETS_DIR.glob("*.json")]})
        raise OpsdError(
            f"subset {name}: {path} does not exist",
            f"known subsets of {dataset_dir}: {', '.join(known) or 'none'}",
            "give one of these names, the path of a .json file, or pairs like repo/task7/f1_f2",
        )
    try:
        return str(path), [(str(e["repo"]), int(e["task_id"]), e.get("pairs")) for e in json.loads(path.read_text())["tasks"]]
    except (ValueError, KeyError, TypeError) as e:
        raise OpsdError(
            f"subset {path}: {type(e).__name__}: {e}",
            'a subset is {"tasks": [{"repo": ..., "task_id": ..., "pairs": [[a, b], ...]}]}',
            "correct the file",
        ) from e


def subset_file(name: str, dataset_dir: Path) -> Path:
    """The file behind a subset's name or path; it need not exist."""
    if name.endswith(".json"):
        return Path(name)
    own, shipped = (folder / f"{name}.json" for folder in (dataset_dir / "subsets", SUBSETS_DIR))
    return shipped if shipped.is_file() and not own.is_file() else own


def subset_hash(pairs: Iterable[PairTask]) -> str:
    """SHA-256 (hex) over the pairs' keys and splits, whatever their order."""
    lines = sorted(f"{pair.split}\0{pair.key}\n" for pair in pairs)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def assert_disjoint(
    first: Iterable[PairTask],
    second: Iterable[PairTask],
    *,
    level: Literal["feature", "task", "repo"] = "repo",
    what: tuple[str, str] = ("training", "evaluation"),
) -> None:
    """Refuses sets that share a feature, a task or a repository. ``what`` names the two.

    Raises:
        OpsdError: naming everything that both hold.
    """

    def names(pairs: Iterable[PairTask]) -> set[str]:
        if level == "repo":
            return {pair.repo for pair in pairs}
        if level == "task":
            return {f"{pair.repo}/task{pair.task_id}" for pair in pairs}
        return {f"{pair.repo}/task{pair.task_id}/f{feature}" for pair in pairs for feature in pair.features}

    if level not in ("feature", "task", "repo"):
        raise OpsdError(f"level {level!r}", "level is 'feature', 'task' or 'repo'", "give one of the three")
    shared = sorted(names(first) & names(second))
    if shared:
        raise OpsdError(
            f"{what[0]} and {what[1]} share {', '.join(shared)}",
            f"no {level} may be in both sets: what a model has seen in one says nothing in the other",
            "take the shared ones out of one of the two subsets",
        )


def tree_files(root: Path) -> list[Path]:
    """Files and symbolic links below ``root`` in a fixed order, without byte code and git's own folder."""
    if root.is_file():
        return [root]
    files = []
    for folder, names, leaves in os.walk(root):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        names[:] = [name for name in names if name not in IGNORED_NAMES and name not in links]
        files += [Path(folder) / leaf for leaf in [*leaves, *links] if not leaf.endswith(".pyc")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def tree_hash(paths: Sequence[Path]) -> str:
    """SHA-256 (hex) over names, kinds and contents of the files below ``paths``, in the order of ``paths``.

    Names are relative to each path, so that the same tree has the same hash wherever it lies.
    """
    digest = hashlib.sha256()
    for number, root in enumerate(paths):
        if not root.exists():
            raise OpsdError(f"{root} does not exist", "only existing files have a hash", "check the path")
        for path in tree_files(root):
            name = path.relative_to(root).as_posix()
            kind, content = ("link", os.readlink(path).encode()) if path.is_symlink() else ("file", path.read_bytes())
            digest.update(f"{number}\0{kind}\0{name}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
            digest.update(content)
    return digest.hexdigest()
