"""The agent-loop worker's side of a run's teachers: an episode's rows are scored when it ends, while others still run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from verl_opsd.config import OpsdConfig
from verl_opsd.verl_adapter.passes import by_row, view_passes
from verl_opsd.verl_adapter.routes import models_of
from verl_opsd.verl_adapter.teacher_queue import TeacherHandle, actor_name, score_rows


class TeacherClient:
    """The run's teachers, found among its actors when the first episode ends."""

    def __init__(self, opsd: OpsdConfig):
        self._models = models_of(opsd)
        self._lock = asyncio.Lock()
        self._teachers: list[TeacherHandle] = []

    async def add_signals(self, outputs: Sequence[Any]) -> None:
        """Puts ``opsd_signal`` into the rows of one episode's outputs (``OpsdOutput.opsd_row``); nothing where the teacher is the student.

        Raises:
            InfraFault, OpsdError: see ``TeacherPool.score``.
        """
        if not self._models or not outputs:
            return
        async with self._lock:
            if not self._teachers:
                actors = [ray.get_actor(actor_name(n)) for n in range(len(self._models))]
                facts = await asyncio.gather(*(_get(a.facts.remote()) for a in actors))
                pairs = zip(self._models.items(), actors, facts, strict=True)
                self._teachers = [TeacherHandle(name, str(m.path), a, f) for (name, m), a, f in pairs]
        rows = [o.opsd_row for o in outputs]
        whose = [int(r["opsd_teacher"][0]) for r in rows]
        signals = await score_rows(self._teachers, by_row(view_passes(rows), len(rows)), whose)
        for row, signal in zip(rows, signals, strict=True):
            row["opsd_signal"] = signal


async def _get(ref: Any) -> Any:
    return await ref
