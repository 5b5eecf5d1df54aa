"""Makes a task ready to run on this machine: base repository, runner, test environment, data files.

Layout of the cache::

    downloads/                              source releases and wheels
    venvs/<hash of the requirements>/       environments, shared by tasks that need the same
    tasks/<repo>/task<N>/<inputs' hash>/    base/ runner.sh files/ prepared.json (and qualification.json)
    tasks/<repo>/task<N>/current            the name of the folder in use

A task's folder is written under a temporary name and renamed, and never changed again: whoever uses it is not disturbed
by a later preparation. Concurrent preparations of one task wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from verl_opsd.cooperbench.base_tree import Source, commit_tree, extract_wheel_files, fetch, locked, pip, run_command
from verl_opsd.cooperbench.dataset import tree_hash
from verl_opsd.cooperbench.recipes import Recipe, recipe_for, render_runner
from verl_opsd.cooperbench.types import PreparedTask
from verl_opsd.errors import OpsdError
from verl_opsd.paths import cache_dir as default_cache

#: Where the tree lies in every sandbox.
REPO_INSIDE = "/workspace/repo"

_FORMAT = 2


def prepare(task_dir: Path, source: str | None = None, cache_dir: Path | None = None) -> PreparedTask:
    """Prepares one task; what is already there for the same inputs is used again.

    Args:
        task_dir: ``<dataset>/<repo>/task<N>``.
        source: where the base tree comes from (:class:`~verl_opsd.cooperbench.base_tree.Source`); by default the task's
            ``base/`` folder, or else its recipe's source.
        cache_dir: by default :func:`verl_opsd.paths.cache_dir`.

    Raises:
        OpsdError: no source or runner is known, a download fails, or the environment holds the task's own package.
    """
    task_dir, cache = Path(task_dir).absolute(), Path(cache_dir or default_cache()).absolute()
    repo, task_id = _name_of(task_dir)
    recipe = recipe_for(repo, task_id)
    chosen = _source(task_dir, source, recipe)
    home = cache / "tasks" / repo / f"task{task_id}"
    with locked(home / "lock"):
        name = _inputs_hash(task_dir, chosen, recipe)
        if not (home / name / "prepared.json").is_file():
            python_prefix = ensure_environment(recipe.requirements, cache)
            with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as folder:
                _build(Path(folder) / name, task_dir, chosen, recipe, python_prefix, cache)
                os.rename(Path(folder) / name, home / name)
        pointer = home / ".current-new"
        pointer.write_text(name + "\n")
        os.replace(pointer, home / "current")
    return load_prepared(cache, repo, task_id)


def is_prepared(cache_dir: Path, repo: str, task_id: int) -> bool:
    """Whether :func:`prepare` made this task in this cache."""
    return (Path(cache_dir) / "tasks" / repo / f"task{task_id}" / "current").is_file()


def load_prepared(cache_dir: Path, repo: str, task_id: int) -> PreparedTask:
    """What the last :func:`prepare` of a task made.

    Raises:
        OpsdError: the task is not prepared in this cache, or its environment is gone.
    """
    home = Path(cache_dir).absolute() / "tasks" / repo / f"task{task_id}"
    way_out = f"run: opsd tasks prepare --dataset DIR --repo {repo} --task {task_id} --cache-dir {cache_dir}"
    if not is_prepared(cache_dir, repo, task_id):
        raise OpsdError(
            f"task {repo}/task{task_id} is not prepared in {cache_dir}", "a task is prepared before it runs", way_out
        )
    folder = home / (home / "current").read_text().strip()
    data = json.loads((folder / "prepared.json").read_text())
    if "near_benchmark" not in data:
        raise OpsdError(f"{folder} was prepared by an earlier version", "a tree says what it was made of", way_out)
    python_prefix = Path(data["python_prefix"])
    if not (python_prefix / "complete").is_file():
        raise OpsdError(f"{python_prefix} is gone", f"{folder} needs this environment", f"delete {folder}, then {way_out}")
    binds = [(folder / "files" / name, inside) for name, inside in data["ro_files"]]
    return PreparedTask(
        repo=repo,
        task_id=task_id,
        base=folder / "base",
        base_sha=data["base_sha"],
        runner=folder / "runner.sh",
        python_prefix=python_prefix,
        ro_binds=tuple(binds),
        env=data["env"],
        tree_hash=data["tree_hash"],
        near_benchmark=data["near_benchmark"],
    )


def _name_of(task_dir: Path) -> tuple[str, int]:
    number = task_dir.name.removeprefix("task")
    if not task_dir.is_dir() or not number.isdecimal():
        raise OpsdError(f"{task_dir} is no task folder", "a task is <dataset>/<repo>/task<N>", "check the dataset directory")
    return task_dir.parent.name, int(number)


def _source(task_dir: Path, given: str | None, recipe: Recipe) -> Source:
    if given:
        return Source.parse(given)
    if (task_dir / "base").is_dir():
        return Source("tree", str(task_dir / "base"))
    if recipe.source:
        return Source.parse(recipe.source)
    raise OpsdError(
        f"{task_dir}: it is not known where its base tree comes from",
        "a task has a base/ folder, a recipe, or a source given by hand",
        "give --source pypi:NAME==VERSION, clone:PATH@COMMIT or git+URL@COMMIT",
    )


#: How a task's own Dockerfile checks its base commit out.
_CHECKOUT = re.compile(r"git (?:checkout|reset --hard)\s+([0-9a-f]{40})\b")


def near_benchmark(task_dir: Path, source: Source, recipe: Recipe) -> str:
    """Why a score on a tree from ``source`` is not a score of the benchmark that the task belongs to; empty where it is one: the
    tree is the benchmark's commit, without anything added, or the task brings its own tree along."""
    own = task_dir / "base"
    if source.kind == "tree" and own.is_dir() and Path(source.location).resolve() == own.resolve():
        return ""
    dockerfile = task_dir / "Dockerfile"
    told = _CHECKOUT.search(dockerfile.read_text()) if dockerfile.is_file() else None
    commit = recipe.commit or (told[1] if told else "")
    if commit and source.kind in ("git", "clone") and source.revision == commit and not recipe.tree_files:
        return ""
    made = f"the release {source.location} {source.revision}" if source.kind == "pypi" else str(source)
    added = f" with files of {', '.join(files.wheel for files in recipe.tree_files)}" if recipe.tree_files else ""
    wanted = f"commit {commit}" if commit else "known to be the benchmark's commit"
    return f"base is {made}{added}, not {wanted}: not a CooperBench score"


def _inputs_hash(task_dir: Path, source: Source, recipe: Recipe) -> str:
    """Hash of all that a preparation depends on; 16 hex digits."""
    inputs = {
        "format": _FORMAT,
        "task": tree_hash([task_dir]),
        "source": "" if source.kind == "tree" else str(source),  # a tree is its content: checkouts may share a cache
        "tree": tree_hash([Path(source.location)]) if source.kind == "tree" else "",
        "recipe": asdict(recipe),
        "runner": _runner_text(task_dir, recipe),
        "python": list(sys.version_info[:3]),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _runner_text(task_dir: Path, recipe: Recipe) -> str:
    if recipe.test_command:
        return render_runner(recipe.test_command)
    path = task_dir / "runner.sh"
    if not path.is_file():
        raise OpsdError(f"{task_dir}: no runner.sh and no recipe", "a task says how its tests run", "add one of the two")
    text = path.read_text()
    if "pip install" in text or "uv " in text:
        raise OpsdError(
            f"{path} installs packages",
            "a sandbox has no network, and an editable install is replaced by PYTHONPATH",
            "add a recipe with the test command and the requirements to recipes.json",
        )
    return text


def _build(folder: Path, task_dir: Path, source: Source, recipe: Recipe, python_prefix: Path, cache: Path) -> None:
    """Writes a task's folder; everything in it is readable by any user."""
    downloads = cache / "downloads"
    downloads.mkdir(exist_ok=True)
    folder.mkdir()
    base = folder / "base"
    fetch(source, base, downloads)
    for files in recipe.tree_files:
        extract_wheel_files(files, base / files.into, downloads)
    (folder / "runner.sh").write_text(_runner_text(task_dir, recipe))
    content = tree_hash([base, task_dir, folder / "runner.sh"])
    _assert_not_importable(own_packages(base), python_prefix)
    ro_files = []
    for number, files in enumerate(recipe.ro_files):
        extract_wheel_files(files, folder / "files" / str(number), downloads)
        ro_files.append((str(number), files.into))
    path = f"{python_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    python_path = f"{REPO_INSIDE}/src:{REPO_INSIDE}"
    data = {
        "source": str(source),
        "base_sha": commit_tree(base),
        "python_prefix": str(python_prefix),
        "env": {"PATH": path, "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1", **recipe.env},
        "ro_files": ro_files,
        "tree_hash": content,
        "near_benchmark": near_benchmark(task_dir, source, recipe),
    }
    (folder / "prepared.json").write_text(json.dumps(data, indent=1))
    _make_readable(folder)


def _make_readable(folder: Path) -> None:
    """Lets every user read: commands run under another user id than the one that prepares."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


def ensure_environment(requirements: tuple[str, ...], cache_dir: Path) -> Path:
    """A virtual environment of this interpreter with exactly ``requirements`` (and what they need), made once.

    It holds no pip. ``freeze.txt`` in it lists what was installed.

    Raises:
        OpsdError: pip failed.
    """
    key = hashlib.sha256("\n".join([sys.version, sys.base_prefix, *sorted(requirements)]).encode()).hexdigest()[:16]
    prefix = cache_dir / "venvs" / key
    with locked(cache_dir / "venvs" / f"{key}.lock"):
        if not (prefix / "complete").is_file():
            if prefix.exists():
                shutil.rmtree(prefix)
            run_command([sys.executable, "-m", "venv", "--without-pip", str(prefix)], way_out="install Python's venv module")
            python = str(prefix / "bin" / "python")
            pip("--python", python, "install", *requirements)
            (prefix / "freeze.txt").write_text(pip("--python", python, "freeze"))
            _make_readable(prefix)
            (prefix / "complete").touch()
    return prefix


def own_packages(tree: Path) -> list[str]:
    """Import names of the packages and modules that a tree itself provides, under ``src/`` or at its top."""
    root = tree / "src" if any((tree / "src").glob("*/__init__.py")) else tree
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    return sorted(packages - {"tests", "test", "docs", "examples", "benchmarks"})


def _assert_not_importable(packages: list[str], python_prefix: Path) -> None:
    """Refuses an environment that holds one of ``packages``: tests would run on another release's code."""
    if not packages:
        raise OpsdError(f"base tree for {python_prefix}: no package found", "a base tree has a package", "check the source")
    code = "import sys, importlib.util as u; print([p for p in sys.argv[1:] if u.find_spec(p)])"
    python = str(python_prefix / "bin" / "python")
    found = run_command([python, "-I", "-c", code, *packages], way_out="rebuild the environment").strip()
    if found != "[]":
        raise OpsdError(
            f"{python_prefix} holds {found}",
            "a task's own package comes only from its tree: an installed release may hold the very feature",
            "take the requirement that brings it out of the recipe",
        )
