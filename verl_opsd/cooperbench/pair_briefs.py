"""From a pair's files to its briefs and to what an audit compares them with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from verl_opsd.cooperbench.dataset import discover, tree_files
from verl_opsd.cooperbench.prepare import is_prepared, load_prepared
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.paths import cache_dir
from verl_opsd.privilege.audit import Material
from verl_opsd.privilege.briefs import Brief, TaskFacts, make_brief
from verl_opsd.privilege.library import NoBrief

#: Bytes from which on a file of the base tree is data, not something that an agent reads.
READ_LIMIT = 500_000
_FILE: dict[str, str] = {"tests": "tests.patch", "gold": "feature.patch"}


def agents_of(pair: PairTask) -> dict[str, int]:
    """Feature of each agent."""
    return {f"agent{i + 1}": f for i, f in enumerate(pair.features)}


def patch_of(pair: PairTask, feature: int, kind: Literal["tests", "gold"]) -> str:
    """The gold or hidden-test patch of a feature; empty where the dataset has none."""
    path = pair.task_dir / f"feature{feature}" / _FILE[kind]
    return path.read_bytes().decode() if path.is_file() else ""


def task_facts(pair: PairTask, files: str | None = None, student_patch: Mapping[str, str] | None = None) -> TaskFacts:
    """What task-specific briefs of a pair are made of."""
    features = agents_of(pair)
    folder = None if files is None else Path(files).expanduser()
    return TaskFacts(
        pair.key,
        lambda agent, kind: patch_of(pair, features[agent], kind),
        folder,
        student_patch,
        lambda: texts_elsewhere(pair),
    )


def pair_elsewhere(pair: PairTask) -> PairTask:
    """A pair of the next task of another repository, in the dataset's order; of another task where all are of one.

    Raises:
        OpsdError: the dataset holds no other task.
    """
    tasks = [t for t in discover(pair.dataset_dir) if len(t.features) > 1]
    here = next(i for i, t in enumerate(tasks) if (t.repo, t.task_id) == (pair.repo, pair.task_id))
    others = [*tasks[here + 1 :], *tasks[:here]]
    others = [t for t in others if t.repo != pair.repo] or others
    if not others:
        raise OpsdError(
            f"{pair.dataset_dir} holds no task but {pair.repo}/task{pair.task_id}", "a wrong task is another one", "add one"
        )
    first, second = others[0].features[:2]
    return PairTask(pair.dataset_dir, others[0].repo, others[0].task_id, (first, second), pair.split)


def texts_elsewhere(pair: PairTask) -> dict[str, str]:
    """Task texts by agent of :func:`pair_elsewhere`."""
    other = pair_elsewhere(pair)
    return {agent: other.feature_text(f) for agent, f in agents_of(other).items()}


def briefs_of(
    pair: PairTask,
    name: str,
    *,
    allow_answer: bool = False,
    files: str | None = None,
    student_patch: Mapping[str, str] | None = None,
) -> dict[str, Brief | NoBrief]:
    """Each agent's brief: what its teacher sees and it does not.

    Args:
        student_patch: patches that the agents of an episode ended with; None before there is one.

    Returns:
        by agent id; a :class:`NoBrief` where the agent has none by design.

    Raises:
        OpsdError: see :func:`verl_opsd.privilege.make_brief`.
    """
    texts = {agent: pair.feature_text(f) for agent, f in agents_of(pair).items()}
    facts = task_facts(pair, files, student_patch)
    out: dict[str, Brief | NoBrief] = {}
    for agent in texts:
        peers = {a: t for a, t in texts.items() if a != agent}
        try:
            out[agent] = make_brief(name, agent, peers, allow_answer=allow_answer, task=facts)
        except NoBrief as reason:
            out[agent] = reason
    return out


def material(
    pair: PairTask, agent: str, base: Path | None = None, observations: tuple[str, ...] = (), elsewhere: bool = False
) -> Material:
    """What an audit of this agent's brief compares it with.

    Args:
        base: folder of the base tree, which the agent can read; None leaves it out.
        observations: further texts that the agent has read.
        elsewhere: the brief holds the task of another pair (``wrong_task``).
    """
    features = agents_of(pair)
    texts = {a: pair.feature_text(f) for a, f in features.items()}
    gold = tuple(patch_of(pair, f, "gold") for f in features.values())
    tests = tuple(patch_of(pair, f, "tests") for f in features.values())
    own = (texts[agent], *observations, *(() if base is None else tree_texts(base)))
    return Material(tuple(texts.values()), own, gold, tests, tuple(texts_elsewhere(pair).values()) if elsewhere else ())


def tree_texts(base: Path) -> tuple[str, ...]:
    """The text files of a tree, each after a line with its path."""
    out = []
    for path in tree_files(base):
        if path.is_symlink() or path.stat().st_size > READ_LIMIT:
            continue
        try:
            out.append(f"{path.relative_to(base).as_posix()}\n{path.read_text(encoding='utf-8')}")
        except UnicodeDecodeError:
            continue  # not a text
    return tuple(out)


def base_tree(pair: PairTask) -> Path | None:
    """Where the base tree lies: in the task as it is prepared on this machine, or beside a task that brings its own; None: neither."""
    if is_prepared(cache_dir(), pair.repo, pair.task_id):
        return load_prepared(cache_dir(), pair.repo, pair.task_id).base
    own = pair.task_dir / "base"
    return own if own.is_dir() else None


def require_patches(pair: PairTask) -> None:
    """What a brief is audited against is there.

    Raises:
        OpsdError: a feature without gold patch or hidden tests, beside which everything would be answer-free.
    """
    for feature in pair.features:
        for kind, file in _FILE.items():
            if not patch_of(pair, feature, kind).strip():  # type: ignore[arg-type]
                raise OpsdError(
                    f"{pair.key}: feature {feature} has no text in {file}",
                    "a brief is audited against the gold patch and the hidden tests of both features",
                    "complete the task, or take the pair out of the subset",
                )


def require_workflows(pairs: list[PairTask], files: str) -> None:
    """Reads every pair's workflow and checks it against the gold patches.

    Raises:
        OpsdError: pairs without a workflow (all are named), or one that is refused.
    """
    from verl_opsd.privilege.workflows import check_workflow, file_name, read_workflow

    folder = Path(files).expanduser()
    missing = [p.key for p in pairs if not (folder / file_name(p.key)).is_file()]
    if missing:
        raise OpsdError(
            f"no workflow in {folder} for {len(missing)} pairs: {', '.join(missing[:5])}",
            "every training state must have its brief",
            "write the files, or take the pairs out of the subset",
        )
    for pair in pairs:
        workflow = read_workflow(folder, pair.key)
        check_workflow(workflow, *(patch_of(pair, f, "gold") for f in pair.features))
