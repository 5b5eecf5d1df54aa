"""The device teacher's workers, and the pool that deals rows to them as they come.

A worker is a Ray actor with one device slot. One holds the whole model, or ``ranks`` of them hold it together (a replica). Processes of
the workers load this file, so it imports neither verl nor the student's code. Suffixes: N loss positions, H hidden size.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import OutOfMemoryError, RayActorError
from torch import Tensor

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.metering import Meter, Sample, here
from verl_opsd.teachers.base import Pass, Voice, slots_of
from verl_opsd.teachers.device import TOLERANCE, DeviceTeacher, check_passes
from verl_opsd.teachers.fp8 import require_device

#: Seconds that loading the model and that one call may take; calls that a replica has at a time, the one that it works on included.
START_TIMEOUT_S, SCORE_TIMEOUT_S, IN_FLIGHT = 1800.0, 900.0, 2
#: Seconds in which the death of one rank of a replica is seen after another rank has failed.
GRACE_S = 20.0


@dataclass(frozen=True)
class TeacherFacts:
    """What a worker says about itself once its model is loaded: ``probe_PH`` are hidden states of one fixed sequence; ``limit`` and
    ``vocabulary`` what it may be given."""

    head_error: float
    probe_PH: Tensor
    voice: Voice
    limit: int | None
    vocabulary: int


def own_device() -> torch.device:
    """The accelerator that Ray gave this worker; the host where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    (slot,) = map(str, ray.get_gpu_ids())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return torch.device("cuda", visible.index(slot) if slot in visible else int(slot))


class TeacherWorker:
    """Ray actor around one :class:`DeviceTeacher`. The model is loaded by :meth:`load`, so that a refusal arrives as what it is."""

    def __init__(self, path: str, dtype: str, name: str, fp8: bool = False):
        self._path, self._dtype, self._name, self._rank = path, getattr(torch, dtype), name, 0
        self._fp8 = fp8
        self._meter: Meter | None = None

    def meeting_point(self) -> str:
        """An address of this host at which the ranks of a replica can meet."""
        with socket.socket() as s:
            s.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def load(self, rank: int = 0, ranks: int = 1, meet: str | None = None) -> TeacherFacts:
        """Loads the model, or this rank's part of it; once."""
        mesh, device = None, own_device()
        self._rank = rank
        if self._fp8:
            require_device(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
        if ranks > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            backend = "nccl" if device.type == "cuda" else "gloo"
            timeout = timedelta(seconds=SCORE_TIMEOUT_S)
            dist.init_process_group(backend, init_method=meet, rank=rank, world_size=ranks, timeout=timeout)
            mesh = dist.init_device_mesh(device.type, (ranks,))
        self._teacher = DeviceTeacher(self._path, self._dtype, device, self._name, mesh=mesh, fp8=self._fp8)
        return TeacherFacts(self._teacher.head_error, self._teacher.probe(), self._teacher.voice, *self._teacher.limits)

    def head_weight(self) -> Tensor:
        """[V, H] the vocabulary weight, on the host."""
        return self._teacher.weight_VH.cpu()

    def samples(self) -> list[Sample]:
        """See ``OpsdWorker.opsd_samples``."""
        self._meter = self._meter or Meter(here())
        return self._meter.take()

    def score(self, rows: Sequence[Sequence[Pass]]) -> Tensor:
        """[N, H] hidden states of this rank's row of ``rows`` (one a rank, empty where there are fewer), on the host."""
        hidden_NH = self._teacher.score(rows[self._rank], max(map(len, rows))).hidden_NH
        assert hidden_NH is not None
        return hidden_NH


class TeacherClosed(OpsdError):
    """A teacher was asked after its end, or had not scored a row by then.

    Args:
        waiting: rows that were not scored when it was closed.
    """

    def __init__(self, name: str, waiting: int):
        super().__init__(
            f"teacher {name} is closed; {waiting} rows were waiting for it",
            "a teacher scores between its start and the end of the run's services",
            "close it after everything that scores has ended",
        )
        self.args = (name, waiting)  # how it is made again where it is unpickled


@dataclass
class _Replica:
    """Workers that hold one copy of the model together. ``generation`` counts how often they were started."""

    number: int
    workers: list[Any]
    generation: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(order=True)
class _Job:
    """A row that waits. Rows of one call are dealt longest first, calls in their order."""

    order: tuple[int, int, int]
    passes: list[Pass] = field(compare=False)
    done: asyncio.Future[Tensor] = field(compare=False)


class TeacherPool:
    """One queue in front of all replicas, a bounded number of rows in flight. A replica of which a worker dies is started again once, and
    what it had is scored again. Everything happens in one event loop, which ends after :meth:`close`.

    Attributes:
        name: ``Signal.head_id`` of the signal.
        head_error: see :class:`DeviceTeacher`; the largest over workers.
        spread: largest relative difference of a hidden state of the fixed sequence between the first worker and any other.
        restarts: replicas that were started again.
        facts: of the first worker.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        start: Callable[[int], Any],
        replicas: int,
        ranks: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
        score_timeout_s: float = SCORE_TIMEOUT_S,
    ):
        """
        Args:
            start: makes the actor (:class:`TeacherWorker`) of a slot, 0..replicas*ranks-1; called again for slots of a replica that died.
            ranks: workers of a replica.
            start_timeout_s, score_timeout_s: seconds, of loading the model and of one call.
        """
        self.name, self.tolerance, self.restarts = name, TOLERANCE[dtype], 0
        self._start, self._ranks, self._count = start, ranks, replicas
        self._start_timeout_s, self._score_timeout_s = start_timeout_s, score_timeout_s
        self._waiting: list[_Job] = []
        self._open: dict[int, _Job] = {}  # by the job's own number: waiting, under way, or on its way back after a death
        self._numbers = itertools.count()
        self._failure: Exception | None = None
        self._replicas: list[_Replica] = []
        self._lanes: list[asyncio.Task[None]] = []

    async def load(self) -> None:
        """Starts all workers and compares them.

        Raises:
            OpsdError: the model is refused (:class:`DeviceTeacher`).
            InfraFault: ``teacher_died`` or ``teacher_timeout`` while loading.
        """
        self._require_alive()
        self._there = asyncio.Condition()
        self._replicas = [_Replica(n, self._slots(n)) for n in range(self._count)]
        loaded = [fact for facts in await asyncio.gather(*map(self._load, self._replicas)) for fact in facts]
        self.facts: TeacherFacts = loaded[0]
        self.head_error = _worst(f.head_error for f in loaded)
        self.spread = _worst(self._distance(f.probe_PH) for f in loaded)
        self._require_alive()
        self._lanes = [asyncio.create_task(self._lane(r)) for _ in range(IN_FLIGHT) for r in self._replicas]

    async def close(self) -> None:
        """Ends the lanes and the workers; rows that were not scored by then raise. Once is enough, more does no harm."""
        if not isinstance(self._failure, TeacherClosed):
            self._failure = TeacherClosed(self.name, len(self._open))
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._fail(self._failure, [*self._open.values()])  # those that lanes had taken, too
        for replica in self._replicas:
            for worker in replica.workers:
                ray.kill(worker, no_restart=True)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def counts(self) -> dict[str, int]:
        """For a stage's manifest."""
        return {"restarts": self.restarts}

    @property
    def voice(self) -> Voice:
        """Its signal's form."""
        return self.facts.voice

    @property
    def identity(self) -> Tensor:
        """Numbers that change with the weights (``cache.revision_of``)."""
        return self.facts.probe_PH

    async def head_weight(self) -> Tensor:
        """[V, H] the vocabulary weight in the teacher's dtype."""
        self._require_alive()
        ref = self._replicas[0].workers[0].head_weight.remote()
        return (await self._wait([ref], self._start_timeout_s, "sending its head"))[0]

    async def samples(self) -> list[list[Sample]]:
        """:meth:`TeacherWorker.samples` of each worker, after what it is working on; none of one that has died."""
        workers = [w for r in self._replicas for w in r.workers]

        async def ask(worker: Any) -> list[Sample]:
            try:
                found: list[Sample] = await worker.samples.remote()
            except RayActorError:  # it is started again at its next row
                return []
            return found

        return list(await asyncio.gather(*map(ask, workers)))

    async def score(self, rows: Sequence[Sequence[Pass]]) -> list[Tensor]:
        """Scores rows; calls may overlap.

        Args:
            rows: the passes of each row (``teachers.base.Scorer.score``); none for a row without loss positions.

        Returns:
            For each row, in the order of ``rows``, [N_r, H] hidden states in the teacher's dtype, on the host.

        Raises:
            InfraFault: ``teacher_died``: a replica's second death; ``teacher_timeout``: a call was not finished in time.
            OpsdError: a row that can't be scored; :class:`TeacherClosed`: after :meth:`close`, or before its end.
        """
        self._require_alive()
        for passes in rows:
            slots_of(passes)
            check_passes(passes, self.name, self.facts.limit, self.facts.vocabulary)
        call, loop = next(self._numbers), asyncio.get_running_loop()
        jobs: dict[int, _Job] = {}
        for i, passes in enumerate(rows):
            if passes:
                order = (call, -sum(len(p.ids_T) for p in passes), i)
                jobs[i] = _Job(order, [_portable(p) for p in passes], loop.create_future())
        async with self._there:
            self._require_alive()  # nobody would take what is put behind a failure
            own = {id(j): j for j in jobs.values()}
            self._open |= own
            self._push(own.values())
        try:
            await asyncio.gather(*(j.done for j in jobs.values()))
        finally:
            for key in own:
                del self._open[key]
        nothing = torch.empty(0, self.voice.width, dtype=self.voice.dtype)
        return [jobs[i].done.result() if i in jobs else nothing for i in range(len(rows))]

    async def _put(self, jobs: Iterable[_Job]) -> None:
        async with self._there:
            self._push(jobs)

    def _push(self, jobs: Iterable[_Job]) -> None:
        for job in jobs:
            heapq.heappush(self._waiting, job)
        self._there.notify_all()

    async def _lane(self, replica: _Replica) -> None:
        """Keeps one call under way at a replica, until :meth:`close`."""
        while True:
            async with self._there:
                await self._there.wait_for(lambda: self._waiting and not replica.lock.locked())  # not while it starts again
                jobs = [heapq.heappop(self._waiting) for _ in range(min(self._ranks, len(self._waiting)))]
            generation = replica.generation
            rows = [j.passes for j in jobs] + [[] for _ in range(self._ranks - len(jobs))]
            try:
                refs = [w.score.remote(rows) for w in replica.workers]
                parts = await self._wait(refs, self._score_timeout_s, f"scoring {len(jobs)} rows", died=False)
            except (RayActorError, OutOfMemoryError) as error:
                await self._put(jobs)
                try:
                    await self._restart(replica, generation, error)
                except Exception as fatal:
                    self._fail(fatal, [])
                    return
                await self._put([])  # the other lane may have waited for the restart alone
            except Exception as fatal:
                self._fail(fatal, jobs)
                return
            else:
                for job, part in zip(jobs, parts, strict=False):
                    if not job.done.done():
                        job.done.set_result(part.clone())

    def _fail(self, error: Exception, jobs: list[_Job]) -> None:
        """Nothing more is scored, and everyone who waits learns why."""
        self._failure = self._failure or error
        for job in [*jobs, *self._waiting]:
            if not job.done.done():
                job.done.set_exception(self._failure)
        self._waiting.clear()

    def _slots(self, number: int) -> list[Any]:
        return [self._start(slot) for slot in range(number * self._ranks, (number + 1) * self._ranks)]

    async def _load(self, replica: _Replica) -> list[TeacherFacts]:
        doing = "loading the model"
        if self._ranks == 1:
            return await self._wait([replica.workers[0].load.remote()], self._start_timeout_s, doing)
        (meet,) = await self._wait([replica.workers[0].meeting_point.remote()], self._start_timeout_s, doing)
        refs = [w.load.remote(rank, self._ranks, meet) for rank, w in enumerate(replica.workers)]
        return await self._wait(refs, self._start_timeout_s, doing)

    async def _restart(self, replica: _Replica, generation: int, error: Exception) -> None:
        async with replica.lock:
            if replica.generation != generation:
                return  # the other call of this replica has seen to it
            if replica.generation > 0:
                raise self._died(f"scoring, the second time on replica {replica.number}", error) from error
            for worker in replica.workers:
                ray.kill(worker, no_restart=True)
            replica.workers = self._slots(replica.number)
            distance = _worst([self._distance(f.probe_PH) for f in await self._load(replica)])
            replica.generation += 1
            self.restarts += 1
            if not distance <= self.tolerance:
                raise OpsdError(
                    f"teacher {self.name}: the worker that was started again differs by {distance:.2g}",
                    f"all workers of a teacher agree within {self.tolerance:g}",
                    "the model's folder changed during the run; start again",
                )

    async def _wait(self, refs: list[Any], timeout_s: float, doing: str, died: bool = True) -> list[Any]:
        """Results of remote calls. A death is an :class:`InfraFault`, or what Ray raises where the caller sees to it (``died=False``)."""

        async def get(ref: Any) -> Any:
            return await ref

        tasks = [asyncio.ensure_future(get(ref)) for ref in refs]
        try:
            done, left = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = [e for t in done if (e := t.exception()) is not None]
            if not errors and left:
                raise InfraFault(
                    "teacher_timeout",
                    f"teacher {self.name}: {doing} took more than {timeout_s:g} s",
                    "every wait for the teacher has a limit",
                    "look at the teacher worker's log: a slow disk, a device that hangs, or views that are too long",
                )
            if errors and left:  # a rank that dies breaks the others' exchange, and their error may be here first
                done, _ = await asyncio.wait(left, timeout=GRACE_S)
                errors += [e for t in done if (e := t.exception()) is not None]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        death = next((e for e in errors if isinstance(e, (RayActorError, OutOfMemoryError))), None)
        if death is not None and died:
            raise self._died(doing, death) from death
        if errors:
            raise death or errors[0]
        return [t.result() for t in tasks]

    def _died(self, doing: str, error: Exception) -> InfraFault:
        return InfraFault(
            "teacher_died",
            f"teacher {self.name}: a worker died while {doing}: {error}",
            "a worker is started again once; nothing is trained on rows that were not scored",
            "look at the teacher worker's log; a lack of memory needs a smaller teacher or shorter views",
        )

    def _distance(self, probe_PH: Tensor) -> float:
        ours = self.facts.probe_PH.float()
        apart_P = (ours - probe_PH.float()).norm(dim=-1)
        return float(
            torch.where(apart_P == 0, 0.0, apart_P / ours.norm(dim=-1)).max()
        )  # a padding token's embedding may be zero


def _worst(values: Iterable[float]) -> float:
    """The largest; NaN where one is, which Python's ``max`` passes over."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _portable(p: Pass) -> Pass:
    """Its tensors alone: a view into a batch would take the whole batch along."""
    return replace(p, slots_N=p.slots_N.clone(), ids_T=p.ids_T.clone(), index_N=p.index_N.clone())
