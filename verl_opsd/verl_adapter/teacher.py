"""The device teacher in a run: Ray workers that each hold the whole model on their own device slot, and the pool before them.

Processes of the workers load this file, so it imports neither verl nor the student's code. Suffixes: N loss positions, H hidden size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError
from torch import Tensor

from verl_opsd.config import OpsdConfig, TeacherConfig
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.paths import cache_dir
from verl_opsd.teachers.base import Pass, slots_of
from verl_opsd.teachers.cache import SignalCache, TeacherKey, revision_of, tokenizer_hash
from verl_opsd.teachers.device import TOLERANCE, DeviceTeacher

#: Seconds that loading the model and that one row may take; rows that a worker has at a time, the one that it scores included.
START_TIMEOUT_S, SCORE_TIMEOUT_S, IN_FLIGHT = 1800.0, 900.0, 2
#: Name of verl's resource pool that holds the workers' device slots.
POOL = "opsd_teacher"


@dataclass(frozen=True)
class TeacherFacts:
    """What a worker says about itself once its model is loaded: ``probe_PH`` are hidden states of one fixed sequence."""

    head_error: float
    probe_PH: Tensor


def own_device() -> torch.device:
    """The accelerator that Ray gave this worker; the host where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    (slot,) = map(str, ray.get_gpu_ids())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return torch.device("cuda", visible.index(slot) if slot in visible else int(slot))


class TeacherWorker:
    """Ray actor around one :class:`DeviceTeacher`. The model is loaded by :meth:`load`, so that a refusal arrives as what it is."""

    def __init__(self, path: str, dtype: str, name: str):
        self._path, self._dtype, self._name = path, getattr(torch, dtype), name

    def load(self) -> TeacherFacts:
        """Loads the model; once."""
        self._teacher = DeviceTeacher(self._path, self._dtype, own_device(), self._name)
        return TeacherFacts(self._teacher.head_error, self._teacher.probe())

    def head_weight(self) -> Tensor:
        """[V, H] the vocabulary weight, on the host."""
        return self._teacher.weight_VH.cpu()

    def score(self, passes: Sequence[Pass]) -> Tensor:
        """[N, H] hidden states of one row, on the host."""
        hidden_NH = self._teacher.score(passes).hidden_NH
        assert hidden_NH is not None
        return hidden_NH


class TeacherPool:
    """Deals rows to workers, a bounded number at a time. A worker that dies is started again once, and what it had is scored again.

    Attributes:
        name: ``Signal.head_id`` of the signal.
        head_error: see :class:`DeviceTeacher`; the largest over workers.
        spread: largest relative difference of a hidden state of the fixed sequence between the first worker and any other.
        restarts: workers that were started again.
        probe_PH: hidden states of the fixed sequence, from the first worker.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        start: Callable[[int], Any],
        workers: int,
        start_timeout_s: float = START_TIMEOUT_S,
        score_timeout_s: float = SCORE_TIMEOUT_S,
    ):
        """
        Args:
            start: makes the actor (:class:`TeacherWorker`) of a slot, 0..workers-1; called again for a slot whose actor died.
            start_timeout_s, score_timeout_s: seconds, of loading the model and of one row.

        Raises:
            OpsdError: the model is refused (:class:`DeviceTeacher`).
            InfraFault: ``teacher_died`` or ``teacher_timeout`` while loading.
        """
        self.name, self.tolerance, self.restarts = name, TOLERANCE[dtype], 0
        self._dtype, self._start = dtype, start
        self._start_timeout_s, self._score_timeout_s = start_timeout_s, score_timeout_s
        self._deaths = [0] * workers
        self._workers = [start(slot) for slot in range(workers)]
        facts: list[TeacherFacts] = self._wait([w.load.remote() for w in self._workers], start_timeout_s, "loading the model")
        self.probe_PH = facts[0].probe_PH
        self.head_error = max(f.head_error for f in facts)
        self.spread = max(self._distance(f.probe_PH) for f in facts)

    def _wait(self, refs: Any, timeout_s: float, doing: str) -> Any:
        try:
            return ray.get(refs, timeout=timeout_s)
        except GetTimeoutError:
            raise self._late(timeout_s, doing) from None
        except (RayActorError, OutOfMemoryError) as e:
            raise self._died(doing, e) from e

    def _late(self, timeout_s: float, doing: str) -> InfraFault:
        return InfraFault(
            "teacher_timeout",
            f"teacher {self.name}: {doing} took more than {timeout_s:g} s",
            "every wait for the teacher has a limit",
            "look at the teacher worker's log: a slow disk, a device that hangs, or views that are too long",
        )

    def _died(self, doing: str, error: Exception) -> InfraFault:
        return InfraFault(
            "teacher_died",
            f"teacher {self.name}: a worker died while {doing}: {error}",
            "a worker is started again once; nothing is trained on rows that were not scored",
            "look at the teacher worker's log; a lack of memory needs a smaller teacher or shorter views",
        )

    def _distance(self, probe_PH: Tensor) -> float:
        ours, theirs = self.probe_PH.float(), probe_PH.float()
        return float(((ours - theirs).norm(dim=-1) / ours.norm(dim=-1)).max())

    def head_weight(self) -> Any:
        """Reference, in Ray's object store, to the vocabulary weight [V, H] in the teacher's dtype; the driver does not load it."""
        return self._workers[0].head_weight.remote()

    def _restart(self, slot: int, error: Exception) -> None:
        self._deaths[slot] += 1
        if self._deaths[slot] > 1:
            raise self._died(f"scoring, the second time on slot {slot}", error) from error
        ray.kill(self._workers[slot], no_restart=True)
        self._workers[slot] = self._start(slot)
        facts = self._wait(self._workers[slot].load.remote(), self._start_timeout_s, "loading the model again")
        self.restarts += 1
        if not self._distance(facts.probe_PH) <= self.tolerance:
            raise OpsdError(
                f"teacher {self.name}: the worker that was started again differs by {self._distance(facts.probe_PH):.2g}",
                f"all workers of a teacher agree within {self.tolerance:g}",
                "the model's folder changed during the run; start again",
            )

    def score(self, rows: Sequence[Sequence[Pass]]) -> list[Tensor]:
        """Scores rows, longest first.

        Args:
            rows: the passes of each row (``teachers.base.Scorer.score``); none for a row without loss positions.

        Returns:
            For each row, in the order of ``rows``, [N_r, H] hidden states in the teacher's dtype, on the host.

        Raises:
            InfraFault: ``teacher_died``: a slot's second death; ``teacher_timeout``: no row was finished in time.
            OpsdError: a row that can't be scored.
        """
        out = [torch.empty(len(slots_of(r)), self.probe_PH.shape[-1], dtype=self._dtype) for r in rows]
        todo = deque(sorted((i for i, r in enumerate(rows) if r), key=lambda i: -sum(len(p.ids_T) for p in rows[i])))
        flying: dict[Any, tuple[int, int]] = {}
        while todo or flying:
            for _ in range(IN_FLIGHT):  # one each, then a second each
                for slot, worker in enumerate(self._workers):
                    if todo and sum(s == slot for s, _ in flying.values()) < IN_FLIGHT:
                        row = todo.popleft()
                        flying[worker.score.remote([_portable(p) for p in rows[row]])] = (slot, row)
            done, _ = ray.wait(list(flying), num_returns=1, timeout=self._score_timeout_s)
            if not done:
                raise self._late(self._score_timeout_s, f"scoring rows {sorted(r for _, r in flying.values())}")
            slot, row = flying[done[0]]
            try:
                out[row].copy_(ray.get(done[0], timeout=self._score_timeout_s))
                del flying[done[0]]
            except (RayActorError, OutOfMemoryError) as e:
                for ref in [ref for ref, (s, _) in flying.items() if s == slot]:
                    todo.appendleft(flying.pop(ref)[1])
                self._restart(slot, e)
        return out


def _portable(p: Pass) -> Pass:
    """Its tensors alone: a view into a batch would take the whole batch along."""
    return replace(p, slots_N=p.slots_N.clone(), ids_T=p.ids_T.clone(), index_N=p.index_N.clone())


def teacher_pool(config: TeacherConfig, slots: Any) -> TeacherPool:
    """The pool of a run.

    Args:
        slots: verl's resource pool :data:`POOL`, one placement group a worker.
    """
    from verl.single_controller.ray import RayClassWithInitArgs
    from verl.utils.device import get_device_name

    assert config.path is not None
    name = f"device:{config.path}"
    make = RayClassWithInitArgs(ray.remote(TeacherWorker), path=config.path, dtype=config.dtype, name=name)
    groups = slots.get_placement_groups(device_name=get_device_name())
    return TeacherPool(name, getattr(torch, config.dtype), lambda slot: make(groups[slot], 0), config.devices)


def signal_cache(opsd: OpsdConfig, pool: TeacherPool, tokenizer: Any) -> SignalCache | None:
    """The cache of a run's device teacher, under ``OPSD_CACHE``; None where it is turned off.

    The brief's text is part of a view's ids, so its name and placement are enough to tell configurations apart.
    """
    teacher, brief = opsd.teacher, opsd.brief
    if not teacher.cache:
        return None
    assert teacher.path is not None
    key = TeacherKey(
        teacher.path,
        revision_of(teacher.path, pool.probe_PH),
        teacher.dtype,
        tokenizer_hash(tokenizer),
        f"{brief.name}|{brief.placement}|{brief.user_turn}",
    )
    return SignalCache(cache_dir() / "teacher_signals", key)
