"""A GPU's second stream, for work that runs beside the current stream's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType

import torch


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One a GPU, whose blocks go first where both streams have some; none on the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


class Beside:
    """Runs functions beside what the current stream gets after them; without a second stream, in order.

    Only memory that outlives the block may be used, and that from the allocator of the current stream: it waits for the second at the end
    of the block, whatever happened in it, so memory that is freed later is used again after both.
    """

    def __init__(self, device: torch.device, overlap: bool = True):
        self._side = second_stream(device) if overlap else None
        self._main = None if self._side is None else torch.cuda.current_stream(device)

    def __enter__(self) -> Beside:
        return self

    def run(self, function: Callable[..., object], *args: object) -> torch.cuda.Event | None:
        """Calls ``function``, which starts after all that the current stream has been given; the event of its end."""
        if self._side is None or self._main is None:
            function(*args)
            return None
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            function(*args)
        return self._side.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What the current stream is given from here on starts after ``event``."""
        if event is not None and self._main is not None:
            self._main.wait_event(event)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._side is not None and self._main is not None:
            self._main.wait_stream(self._side)
