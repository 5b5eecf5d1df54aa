"""Is a teacher worth distilling? Outcomes of context x model, with intervals, and the gate that reads them.

A context is a brief in the actor's own prompt; the models are the student and the teacher. What a teacher knows and the student can't
find out is no reason to distil it, however well it scores: the gate wants a gain beyond the noise of re-runs, a student that gains
from the same text, and a brief without answers. What was not measured fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scipy.stats import binomtest

from verl_opsd.errors import OpsdError

Model = Literal["student", "teacher"]
#: The context without a brief.
BARE = "none"
#: Rate of pairs by which re-runs of the same weights differ: two of ten, seeds' noise table.
NOISE = 0.2
HEADROOM = ("already solved", "unlocked by context", "partial", "capability", "harmed by the brief", "out of reach")


@dataclass(frozen=True)
class Count:
    """Passed of total.

    Raises:
        OpsdError: not 0 <= passed <= total, or nothing was run.
    """

    passed: int
    total: int

    def __post_init__(self) -> None:
        if not (type(self.passed) is int and type(self.total) is int and 0 <= self.passed <= self.total and self.total > 0):
            raise OpsdError(
                f"{self.passed} of {self.total}", "0 <= passed <= total, and something was run", "correct the table"
            )

    @property
    def rate(self) -> float:
        """Share that passed."""
        return self.passed / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson interval of the rate."""
        found = binomtest(self.passed, self.total).proportion_ci(0.95, method="wilson")
        return float(found.low), float(found.high)


def difference(a: Count, b: Count) -> tuple[float, float, float]:
    """Rate of ``a`` minus rate of ``b``, and its 95% interval.

    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10), from the two Wilson intervals; the samples count as
    independent.
    """
    d, (al, ah), (bl, bh) = a.rate - b.rate, a.interval, b.interval
    return d, d - math.hypot(a.rate - al, bh - b.rate), d + math.hypot(ah - a.rate, b.rate - bl)


@dataclass(frozen=True)
class Cell:
    """Outcome of one model under one context. ``invalidated``: invalidations of the run that it was measured in, in words."""

    pairs: Count
    features: Count | None = None
    invalidated: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskOutcome:
    """Features that passed (0..2) of one pair under one context."""

    task: str
    context: str
    base: int
    student: int
    teacher: int


@dataclass(frozen=True)
class Matrix:
    """Everything that was measured.

    Attributes:
        cells: by (context, model). answer_free: the audit's verdict by context; a missing one counts as not free.
        tasks: outcomes by task, where they are known. noise: rate of pairs by which re-runs of the same weights differ.
    """

    cells: Mapping[tuple[str, Model], Cell]
    answer_free: Mapping[str, bool]
    tasks: tuple[TaskOutcome, ...] = ()
    noise: float = NOISE

    @property
    def contexts(self) -> list[str]:
        """Names of contexts, the bare one first."""
        names = dict.fromkeys([BARE, *(c for c, _ in self.cells)])
        return [c for c in names if any((c, m) in self.cells for m in ("student", "teacher"))]


@dataclass(frozen=True)
class Condition:
    """One condition of the gate. ``value`` is a difference of rates with its 95% interval, where there is one."""

    name: str
    passed: bool
    detail: str
    value: tuple[float, float, float] | None = None


def worth(matrix: Matrix, context: str) -> tuple[Condition, ...]:
    """The gate's conditions for one context; it passes when all of them do.

    Raises:
        OpsdError: nothing was measured under this context, or it is the bare one.
    """
    if context == BARE or context not in matrix.contexts:
        raise OpsdError(
            f"context {context!r}",
            f"measured contexts are {[c for c in matrix.contexts if c != BARE]}",
            "measure it first, with evaluation runs",
        )

    def beats(name: str, a: tuple[str, Model], b: tuple[str, Model], beyond: bool = True) -> Condition:
        missing = [f"{m} with {c}" for c, m in (a, b) if (c, m) not in matrix.cells]
        if missing:
            return Condition(name, False, f"not measured: {', '.join(missing)}")
        one, other = matrix.cells[a].pairs, matrix.cells[b].pairs
        value = difference(one, other)
        margin = max(matrix.noise, two_pairs((one, other))) if beyond else 0.0
        detail = f"{one.passed}/{one.total} against {other.passed}/{other.total}, more than {margin:.2f} wanted"
        return Condition(name, value[0] > margin + 1e-9, detail, value)

    briefed: tuple[str, Model] = (context, "teacher")
    free = matrix.answer_free.get(context)
    marked = [f"{m} with {c}" for (c, m), cell in matrix.cells.items() if c in (context, BARE) and cell.invalidated]
    return (
        beats("briefed teacher beats the bare teacher beyond the noise", briefed, (BARE, "teacher")),
        beats("briefed teacher beats the base beyond the noise", briefed, (BARE, "student")),
        beats("briefed student beats the base", (context, "student"), (BARE, "student"), beyond=False),
        Condition(
            "the brief is answer-free",
            free is True,
            "not audited" if free is None else "audited" if free else "audited, it leaks",
        ),
        *([Condition("what it stands on is valid", False, f"invalidated: {', '.join(marked)}")] if marked else []),
    )


def headroom_of(t: TaskOutcome) -> str:
    """Which part of the headroom a task belongs to, by features passed: base, student with context, teacher with context."""
    if t.student < t.base:
        return "harmed by the brief"
    if t.base == 2:
        return "already solved"
    if t.student == 2:
        return "unlocked by context"
    if t.student > t.base:
        return "partial"
    return "capability" if t.teacher > t.student else "out of reach"


def headroom(tasks: Iterable[TaskOutcome]) -> dict[str, int]:
    """Number of tasks in each part."""
    found = Counter(headroom_of(t) for t in tasks)
    return {name: found[name] for name in HEADROOM}


def two_pairs(runs: Iterable[Count]) -> float:
    """Two pairs of the smallest run, as a rate: fewer may differ by chance, whatever the noise was measured to be."""
    return 2 / min(c.total for c in runs)


def noise_of(reruns: Iterable[Count]) -> float:
    """Rate of pairs by which re-runs of the same weights differ: the largest difference between any two, and two pairs of the smallest run
    at least, since a few re-runs agree by chance.

    Raises:
        OpsdError: fewer than two runs.
    """
    runs = list(reruns)
    rates = sorted(c.rate for c in runs)
    if len(rates) < 2:
        raise OpsdError(f"{len(rates)} runs of the same weights", "noise needs two or more", "evaluate the same weights again")
    return max(rates[-1] - rates[0], two_pairs(runs))


def parse(values: Mapping[str, Any]) -> Matrix:
    """A matrix from plain values, the format of ``opsd teacher-matrix``.

    Args:
        values: ``cells`` (context, model, pairs [passed, total], features likewise or null, invalidated: reasons), ``answer_free`` by context, ``tasks``
            (task, context, base, student, teacher), and ``noise``, or ``reruns`` ([passed, total] of the same weights again and
            again), from which it is taken. All but cells may be left out.

    Raises:
        OpsdError: an unknown key, a value out of range, a cell or a task twice, or a task of a context without a cell.
    """
    known = {"cells", "answer_free", "tasks", "noise", "reruns"}
    if not values.keys() <= known or "cells" not in values or {"noise", "reruns"} <= values.keys():
        raise OpsdError(
            f"keys {sorted(values)}",
            f"the keys are {sorted(known)}; cells is needed, noise and reruns exclude one another",
            "correct the file",
        )
    cells: dict[tuple[str, Model], Cell] = {}
    try:
        for c in values["cells"]:
            key = (str(c["context"]), c["model"])
            features = None if c.get("features") is None else Count(*c["features"])
            if (
                key in cells
                or key[1] not in ("student", "teacher")
                or not c.keys() <= {"context", "model", "pairs", "features", "invalidated"}
                or not isinstance(c["context"], str)
                or isinstance(c.get("invalidated"), str)
            ):
                raise OpsdError(
                    f"cell {c}", "context, model student or teacher, pairs, features; each cell once", "correct the file"
                )
            cells[key] = Cell(Count(*c["pairs"]), features, tuple(c.get("invalidated", ())))
        tasks = tuple(TaskOutcome(**t) for t in values.get("tasks", ()))
        noise = noise_of(Count(*c) for c in values["reruns"]) if "reruns" in values else values.get("noise", NOISE)
        inside = 0 <= noise < 1 and all(type(f) is int and 0 <= f <= 2 for t in tasks for f in (t.base, t.student, t.teacher))
        free = values.get("answer_free", {})
        stated = all(isinstance(v, bool) for v in free.values())
    except (KeyError, TypeError, AttributeError) as e:
        raise OpsdError(
            f"teacher matrix: {type(e).__name__}: {e}", "see docs/teacher_matrix.md for the format", "correct the file"
        ) from e
    if not inside:
        raise OpsdError(
            "a task outside 0..2 features, or noise outside [0, 1)", "two features a pair; noise is a rate", "correct the file"
        )
    if not cells:
        raise OpsdError("cells is empty", "a matrix compares what was measured", "name evaluation runs, or give counts")
    named = [(t.task, t.context) for t in tasks]
    twice = sorted({n for n in named if named.count(n) > 1})
    foreign = sorted({context for _, context in named} - {context for context, _ in cells})
    if twice or foreign:
        raise OpsdError(
            f"tasks: {twice[:3]} more than once" if twice else f"tasks of contexts {foreign}, which no cell has",
            "headroom counts each task once under a context that was measured",
            "correct the file",
        )
    if not stated:
        raise OpsdError(f"answer_free {free}", "true or false for each context", "correct the file")
    return Matrix(cells, free, tasks, float(noise))
