"""How busy each device of a run is, and how much of its memory is taken: samples of a thread in the process that holds it, by stage.

A device is what one student rank or teacher worker runs on. On an accelerator ``busy`` is the driver's own figure (share of time in which a
kernel ran) and ``bytes`` what all processes have taken there, so a rollout server beside the rank is in both. Without one, both are of the
rank's own process: processor time, resident memory. Waiting for other ranks inside an exchange is busy for a GPU and idle for a processor.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Gives ``busy`` and ``bytes`` of a :class:`Sample`.
Reader = Callable[[], tuple[float | None, int]]
#: Seconds between two samples.
EVERY_S = 0.5


@dataclass(frozen=True)
class Sample:
    """At ``time`` (seconds since the epoch): share of the time since the sample before in which the device worked (None: its driver does not
    say, as ``nvidia-ml-py`` is not installed), and bytes taken."""

    time: float
    busy: float | None
    bytes: int


def of_processor() -> Reader:
    """Reads this process: share of one processor since the last call (at most 1), resident bytes."""
    import psutil

    process = psutil.Process()
    process.cpu_percent()
    return lambda: (min(1.0, process.cpu_percent() / 100), int(process.memory_info().rss))


def of_accelerator() -> Reader:
    """Reads this process's current device; a thread sees the first one, so the device is kept."""
    import torch

    device, says = torch.cuda.current_device(), importlib.util.find_spec("pynvml") is not None

    def read() -> tuple[float | None, int]:
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.utilization(device) / 100 if says else None, total - free

    return read


def here() -> Reader:
    """The reader for this process's device."""
    import torch

    return of_accelerator() if torch.cuda.is_available() else of_processor()


class Meter:
    """Samples a device in a thread that ends with the process."""

    def __init__(self, read: Reader, every_s: float = EVERY_S):
        self._read, self._every_s = read, every_s
        self._samples: list[Sample] = []
        threading.Thread(target=self._run, daemon=True, name="opsd-meter").start()

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            try:
                sample = Sample(time.time(), *self._read())
            except Exception as error:  # a run does not end for want of a figure
                print(f"verl-opsd: this device is not sampled any more: {error!r}", flush=True)
                return
            self._samples.append(sample)  # looked up after the reading, in which the list may have been taken

    def take(self) -> list[Sample]:
        """Samples since the last call."""
        taken, self._samples = self._samples, []
        return taken


class Stages:
    """Samples of several devices, given out stage by stage."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Sample]] = {}

    def add(self, samples: Mapping[str, Iterable[Sample]]) -> None:
        """More samples of each device, later than those before."""
        for name, new in samples.items():
            self._waiting.setdefault(name, []).extend(new)

    def end(self, ended: float) -> dict[str, dict[str, Any]]:
        """What each device did in the stage that ended then: ``busy`` (mean share; None where it is not known), ``peak_bytes``, ``samples``.
        Later samples wait for the next stage."""
        out = {}
        for name, samples in self._waiting.items():
            mine = [s for s in samples if s.time <= ended]
            self._waiting[name] = samples[len(mine) :]
            known = [s.busy for s in mine if s.busy is not None]
            out[name] = {
                "busy": sum(known) / len(known) if known else None,
                "peak_bytes": max((s.bytes for s in mine), default=None),
                "samples": len(mine),
            }
        return out


def devices_of(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over the stages of a run.

    Args:
        stages: manifests (``RunDir.stages``) whose outputs may hold ``devices`` (:meth:`Stages.end`).

    Returns:
        ``idle``: by stage and device, the share of the sampled time in which it did not work; ``peak_bytes``: by device. Empty where nothing
        was sampled.
    """
    worked: dict[str, dict[str, list[float]]] = {}
    peak: dict[str, int] = {}
    for s in stages:
        for name, d in s["outputs"].get("devices", {}).items():
            if d["peak_bytes"] is not None:
                peak[name] = max(peak.get(name, 0), d["peak_bytes"])
            if d["busy"] is not None:
                worked.setdefault(s["stage"], {}).setdefault(name, []).extend([d["busy"]] * d["samples"])
    idle = {stage: {name: 1 - sum(v) / len(v) for name, v in row.items()} for stage, row in worked.items()}
    return {"idle": idle, "peak_bytes": peak} if peak else {}


def tokens_a_second(stages: Sequence[Mapping[str, Any]], epochs: int) -> dict[str, float]:
    """Of the stages that have tokens: ``train`` (the student's own sequences, once an epoch), and ``score`` (the teacher's views) where a
    stage of its own scores them."""
    seconds: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for s in stages:
        seconds[s["stage"]] += s["seconds"]
        if s["stage"] == "train" and "student_tokens" in s["outputs"]:
            tokens["train"] += s["outputs"]["student_tokens"] * epochs
            tokens["score"] += s["outputs"]["view_tokens"]
    return {name: n / seconds[name] for name, n in tokens.items() if n and seconds[name] > 0}


def device_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the lines that a report's ``tokens_a_second`` and ``devices`` make; none where nothing was measured."""
    rows = []
    if rates := report.get("tokens_a_second"):
        rows.append(("tokens a second", "  ".join(f"{k} {v:.0f}" for k, v in rates.items())))
    if devices := report.get("devices"):
        for stage, row in devices["idle"].items():
            rows.append((f"idle while {stage}", "  ".join(f"{k} {v:.0%}" for k, v in row.items())))
        rows.append(("peak memory (GB)", "  ".join(f"{k} {v / 1e9:.2f}" for k, v in devices["peak_bytes"].items())))
    return rows
