"""One queue in front of each teacher of a run: a Ray actor that scores rows as they come, from agent-loop workers and the trainer.

It holds the teacher's pool of workers or its server, and the cache. Rows go in as token ids, signals come out as one tensor a row
(``teachers.base.Voice``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError
from torch import Tensor

from verl_opsd.config import OpsdConfig
from verl_opsd.config.teacher import ModelTeacher
from verl_opsd.errors import OpsdError
from verl_opsd.metering import Sample
from verl_opsd.paths import cache_dir
from verl_opsd.teachers.base import Pass, Voice, common, on_the_wire
from verl_opsd.teachers.cache import SignalCache, TeacherKey, revision_of
from verl_opsd.teachers.server import ServerTeacher
from verl_opsd.verl_adapter.routes import models_of
from verl_opsd.verl_adapter.teacher import TeacherClosed, TeacherPool, TeacherWorker

#: Name of verl's resource pools that hold the workers' device slots.
POOL = "opsd_teacher"
#: Seconds that ending a teacher may take.
CLOSE_TIMEOUT_S = 30.0


class ServerPool:
    """A server teacher behind the pool's interface. Requests that fail are sent again by the teacher itself."""

    spread = 0.0
    tolerance = 0.0

    def __init__(self, teacher: ServerTeacher):
        self._teacher = teacher
        self._under_way: dict[asyncio.Future[Any], int] = {}
        self._closed: TeacherClosed | None = None

    async def load(self) -> None:
        """Probes the server (``ServerTeacher.probe``)."""
        found = await self._teacher.probe()
        self.head_error, self.identity = found.prefix_error, found.logprobs_P

    @property
    def counts(self) -> dict[str, int]:
        """For a stage's manifest; see :class:`ServerTeacher`."""
        return {"restarts": 0, "positions": self._teacher.positions, "tails_floored": self._teacher.floored}

    @property
    def voice(self) -> Voice:
        """Its signal's form."""
        return self._teacher.voice

    async def head_weight(self) -> Tensor | None:
        """None: a support signal needs no vocabulary weight."""
        return None

    async def samples(self) -> list[list[Sample]]:
        """None: its devices are another host's."""
        return []

    async def score(self, rows: Sequence[Sequence[Pass]]) -> list[Tensor]:
        """See :meth:`TeacherPool.score`; packed support signals."""
        if self._closed is not None:
            raise self._closed
        work = asyncio.gather(*map(self._teacher.score, rows))
        self._under_way[work] = len(rows)
        try:
            return [self.voice.pack(s) for s in await work]
        except asyncio.CancelledError:
            raise self._closed or asyncio.CancelledError from None
        finally:
            del self._under_way[work]

    async def close(self) -> None:
        """Ends requests and connections. The server is another's and runs on."""
        self._closed = self._closed or TeacherClosed(self._teacher.name, sum(self._under_way.values()))
        work = list(self._under_way)
        for calls in work:
            calls.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await self._teacher.close()


@dataclass(frozen=True)
class QueueFacts:
    """What a queue says once its teacher is loaded; ``head_error`` of a server is its ``prefix_error``, in nats."""

    voice: Voice
    head_error: float
    spread: float
    tolerance: float


class TeacherQueue:
    """Ray actor; its calls overlap."""

    def __init__(self, pool: Any, key: TeacherKey | None):
        """
        Args:
            pool: :class:`TeacherPool` or :class:`ServerPool`, not loaded.
            key: of the cache, without the revision; None: there is none.
        """
        self._pool, self._key = pool, key
        self._cache: SignalCache | None = None

    async def load(self) -> QueueFacts:
        """Loads the teacher and opens the cache.

        Raises:
            OpsdError, InfraFault: see ``TeacherPool.load`` and ``ServerTeacher.probe``.
        """
        pool = self._pool
        await pool.load()
        if self._key is not None:
            revision = await asyncio.to_thread(revision_of, self._key.teacher, pool.identity)
            self._cache = SignalCache(cache_dir() / "teacher_signals", replace(self._key, revision=revision))
        self._facts = QueueFacts(pool.voice, pool.head_error, pool.spread, pool.tolerance)
        return self._facts

    async def facts(self) -> QueueFacts:
        """What :meth:`load` gave."""
        return self._facts

    async def head_weight(self) -> Tensor | None:
        """[V, H] of a teacher with exact signals."""
        weight: Tensor | None = await self._pool.head_weight()
        return weight

    async def score(self, rows: Sequence[Sequence[Pass]], cached: bool = True) -> list[Tensor]:
        """Signals of rows, [N_r, width] each; what the cache holds is read, the rest is scored and kept.

        Args:
            cached: whether the cache is read and written.
        """
        if self._cache is None or not cached:
            scored: list[Tensor] = await self._pool.score(rows)
            return scored
        cache, voice = self._cache, self._pool.voice
        found = [
            await asyncio.to_thread(cache.get, row) if row else torch.empty(0, voice.width, dtype=voice.dtype) for row in rows
        ]
        missing = [i for i, signal in enumerate(found) if signal is None]
        for i, signal in zip(missing, await self._pool.score([rows[i] for i in missing]), strict=True):
            await asyncio.to_thread(cache.put, rows[i], signal)
            found[i] = signal
        return [signal for signal in found if signal is not None]

    async def samples(self) -> list[list[Sample]]:
        """Of each worker (``TeacherPool.samples``)."""
        found: list[list[Sample]] = await self._pool.samples()
        return found

    async def close(self) -> None:
        """See :meth:`TeacherPool.close`."""
        await self._pool.close()

    async def report(self) -> dict[str, int]:
        """Counts for a stage's manifest."""
        counts = await asyncio.to_thread(self._cache.report) if self._cache is not None else {}
        return {**self._pool.counts, **counts}


@dataclass(frozen=True)
class TeacherHandle:
    """A run's teacher, as the trainer and agent-loop workers see it."""

    name: str
    path: str
    actor: Any
    facts: QueueFacts

    @property
    def voice(self) -> Voice:
        """Its signal's form."""
        return self.facts.voice

    def head_weight(self) -> Any:
        """Reference, in Ray's object store, to the vocabulary weight; the driver does not load it."""
        return self.actor.head_weight.remote()

    def samples(self) -> list[list[Sample]]:
        """See :meth:`TeacherQueue.samples`."""
        found: list[list[Sample]] = ray.get(self.actor.samples.remote())
        return found

    def report(self) -> dict[str, int]:
        """See :meth:`TeacherQueue.report`."""
        counts: dict[str, int] = ray.get(self.actor.report.remote())
        return counts


def pools_of(opsd: OpsdConfig) -> dict[str, list[int]]:
    """Device slots of the teachers' workers, by the name of verl's resource pool."""
    return {
        f"{POOL}_{n}": [1] * model.devices for n, (_, model) in enumerate(models_of(opsd).items()) if model.kind == "device"
    }


def actor_name(number: int) -> str:
    """Name of a teacher's queue among the run's actors."""
    return f"opsd_teacher_queue_{number}"


def start_teachers(opsd: OpsdConfig, slots: dict[str, Any], vocabulary: int, tokenizer: str) -> list[TeacherHandle]:
    """Starts every teacher of a run, all at once.

    Args:
        slots: verl's resource pools of :func:`pools_of`.
        vocabulary: rows of the student's vocabulary weight.
        tokenizer: ``cache.tokenizer_hash`` of the student's.

    Raises:
        OpsdError, InfraFault: see :meth:`TeacherQueue.load`.
    """
    brief, actors = opsd.brief, []
    for number, (name, model) in enumerate(models_of(opsd).items()):
        assert model.path is not None
        pool = (
            _server_pool(opsd, name, model, vocabulary)
            if model.kind == "server"
            else _device_pool(name, model, slots[f"{POOL}_{number}"])
        )
        dtype = (
            model.dtype + "|fp8" * (model.fp8 is not None) if model.kind == "device" else f"server top {opsd.loss.top_k or 0}"
        )
        key = TeacherKey(model.path, "", dtype, tokenizer, f"{brief.name}|{brief.placement}|{brief.user_turn}")
        actor = ray.remote(TeacherQueue).options(name=actor_name(number), num_cpus=0, max_concurrency=1000)
        actors.append(actor.remote(pool, key if model.cache else None))
    facts = ray.get([a.load.remote() for a in actors])
    return [TeacherHandle(n, str(m.path), a, f) for (n, m), a, f in zip(models_of(opsd).items(), actors, facts, strict=True)]


def close_teachers(teachers: Sequence[TeacherHandle]) -> None:
    """Ends every teacher of a run. It is the run's last act, also of one that failed, whose cause it must not hide: a teacher that does not
    end is said, and ends with Ray; a queue that has died has nothing left to end."""
    for t, ref in [(t, t.actor.close.remote()) for t in teachers]:
        try:
            ray.get(ref, timeout=CLOSE_TIMEOUT_S)
        except RayActorError:
            continue
        except RayError as error:
            print(f"warning: teacher {t.name} did not end: {type(error).__name__}: {error}", flush=True)


def _server_pool(opsd: OpsdConfig, name: str, model: ModelTeacher, vocabulary: int) -> ServerPool:
    assert model.url is not None and model.path is not None
    return ServerPool(ServerTeacher(model.url, model.path, name, opsd.loss.top_k or 0, vocabulary, model.requests))


def _device_pool(name: str, model: ModelTeacher, slots: Any) -> TeacherPool:
    from verl.single_controller.ray import RayClassWithInitArgs
    from verl.utils.device import get_device_name

    fp8 = model.fp8 is not None
    make = RayClassWithInitArgs(ray.remote(TeacherWorker), path=model.path, dtype=model.dtype, name=name, fp8=fp8)
    groups = slots.get_placement_groups(device_name=get_device_name())
    replicas = model.devices // model.ranks
    return TeacherPool(name, getattr(torch, model.dtype), lambda slot: make(groups[slot], 0), replicas, model.ranks)


async def score_rows(
    teachers: Sequence[TeacherHandle], rows: Sequence[Sequence[Pass]], whose: Sequence[int], cached: bool = True
) -> list[Tensor]:
    """Signals of rows by each one's own teacher, as they are stored: one width and dtype (``teachers.base.common``).

    Args:
        rows: the passes of each row. whose: number of each row's teacher.
    """
    width, dtype = common([t.voice for t in teachers])
    out: list[Tensor | None] = [None] * len(rows)

    async def ask(number: int) -> None:
        mine = [i for i, n in enumerate(whose) if n == number]
        if mine:
            for i, signal in zip(mine, await teachers[number].actor.score.remote([rows[i] for i in mine], cached), strict=True):
                out[i] = on_the_wire(signal, width, dtype)

    await asyncio.gather(*map(ask, range(len(teachers))))
    return [_there(signal) for signal in out]


def _there(signal: Tensor | None) -> Tensor:
    if signal is None:
        raise OpsdError("a row of no teacher", "each row is scored by exactly one teacher", "look at opsd.teacher.members")
    return signal
