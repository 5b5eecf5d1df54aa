"""Which of several teachers a task has. Plain values; nothing here is loaded with a device."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from verl_opsd.config import OpsdConfig
from verl_opsd.config.teacher import ModelTeacher
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError


def models_of(opsd: OpsdConfig) -> dict[str, ModelTeacher]:
    """The teachers of a run that are other models, by name, in the order of their numbers in the rows; none where it is the student."""
    teacher = opsd.teacher
    if teacher.kind == "routed":
        return dict(teacher.members)
    return {f"{teacher.kind}:{teacher.path}": teacher} if teacher.kind in ("device", "server") else {}


def task_of(pair: PairTask) -> str:
    """What patterns of tasks are matched with."""
    return f"{pair.repo}/task{pair.task_id}"


def matching(opsd: OpsdConfig, task: str) -> list[int]:
    """Numbers of the members that teach a task."""
    members = opsd.teacher.members.values()
    return [n for n, m in enumerate(members) if any(fnmatchcase(task, pattern) for pattern in m.tasks)]


def teacher_of(opsd: OpsdConfig, pair: PairTask) -> dict[str, Tensor]:
    """The field ``opsd_teacher`` of a pair's rows, int64[1], the number of its teacher; none where the teacher is the student itself.

    Evaluation has no teacher; its rows, which are never trained on, say 0.
    """
    if not models_of(opsd):
        return {}
    found = matching(opsd, task_of(pair)) if opsd.teacher.kind == "routed" and pair.split == "train" else [0]
    return {"opsd_teacher": torch.tensor(found[:1], dtype=torch.int64)}


def check_routes(opsd: OpsdConfig, pairs: Sequence[PairTask]) -> None:
    """Every training task has exactly one teacher, and every pattern a training task.

    Raises:
        OpsdError: tasks with none or several (all are named), or patterns and teachers without a task.
    """
    if opsd.teacher.kind != "routed":
        return
    names, tasks = list(opsd.teacher.members), sorted({task_of(p) for p in pairs})
    wrong = {t: [names[n] for n in matching(opsd, t)] for t in tasks if len(matching(opsd, t)) != 1}
    if wrong:
        raise OpsdError(
            f"training tasks with none or several teachers: {', '.join(f'{t}: {n or None}' for t, n in wrong.items())}",
            "each training task has exactly one teacher",
            "correct opsd.teacher.members.NAME.tasks: patterns of repo/taskN that do not overlap",
        )
    idle = [f"{k}: {p}" for k, m in opsd.teacher.members.items() for p in m.tasks if not any(fnmatchcase(t, p) for t in tasks)]
    if idle:
        raise OpsdError(
            f"patterns without a training task: {', '.join(idle)}",
            "a route that no task takes is a mistake, and its teacher would hold a device for nothing",
            f"correct or remove them; the training tasks are {', '.join(tasks)}",
        )
