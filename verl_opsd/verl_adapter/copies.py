"""Teachers that are the student's own weights at another time: as they were at the start, their moving average, or some rounds ago.

A copy holds this rank's shards of the trainable weights (with an adapter: the adapter alone) on the host, and moves with training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.loss import OpsdLoss


class WeightCopy(Protocol):
    """One rank's part of a teacher's weights.

    ``shards`` are in the order of the engine's trainable shards, on the host, and never shared with them.
    """

    @property
    def shards(self) -> Sequence[Tensor]: ...

    def stepped(self, current: Sequence[Tensor]) -> None:
        """After every optimizer step."""

    def round_begins(self, current: Sequence[Tensor]) -> None:
        """At the start of every update, once its rows are scored."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state` of another process."""


def _host(shards: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [s.detach().to("cpu", dtype or s.dtype, copy=True) for s in shards]


class FrozenCopy:
    """The weights as they were when the copy was made. A resumed run makes the same copy before it loads its checkpoint."""

    def __init__(self, start: Sequence[Tensor]):
        self.shards: Sequence[Tensor] = _host(start)

    def stepped(self, current: Sequence[Tensor]) -> None:
        """Stays."""

    def round_begins(self, current: Sequence[Tensor]) -> None:
        """Stays."""

    def state(self) -> dict[str, Any]:
        return {"shards": list(self.shards)}

    def load(self, state: dict[str, Any]) -> None:
        self.shards = state["shards"]


class EmaCopy:
    """``w <- decay * w + (1 - decay) * student`` after every optimizer step, in float32: a small step would vanish in bf16."""

    def __init__(self, start: Sequence[Tensor], decay: float):
        self.decay = decay
        self.shards: Sequence[Tensor] = _host(start, torch.float32)

    def stepped(self, current: Sequence[Tensor]) -> None:
        for mean, now in zip(self.shards, current, strict=True):
            mean.lerp_(now.detach().to("cpu", torch.float32), 1 - self.decay)

    def round_begins(self, current: Sequence[Tensor]) -> None:
        """Moves with steps."""

    def state(self) -> dict[str, Any]:
        return {"decay": self.decay, "shards": list(self.shards)}

    def load(self, state: dict[str, Any]) -> None:
        self.shards = state["shards"]


class LaggedCopy:
    """The weights with which the round ``lag`` rounds before began; the initial ones while there is none. Keeps ``lag`` copies."""

    def __init__(self, start: Sequence[Tensor], lag: int):
        self.lag = lag
        self._rounds: deque[list[Tensor]] = deque([_host(start)], maxlen=lag)

    @property
    def shards(self) -> Sequence[Tensor]:
        return self._rounds[0]

    def stepped(self, current: Sequence[Tensor]) -> None:
        """Moves with rounds."""

    def round_begins(self, current: Sequence[Tensor]) -> None:
        self._rounds.append(_host(current))

    def state(self) -> dict[str, Any]:
        return {"lag": self.lag, "rounds": list(self._rounds)}

    def load(self, state: dict[str, Any]) -> None:
        self._rounds = deque(state["rounds"], maxlen=self.lag)


def copy_for(loss: OpsdLoss, start: Sequence[Tensor]) -> WeightCopy:
    """The copy that a loss's teacher is, from the weights as they are now."""
    if loss.teacher == "ema":
        assert loss.decay is not None
        return EmaCopy(start, loss.decay)
    if loss.teacher == "lagged":
        assert loss.lag is not None
        return LaggedCopy(start, loss.lag)
    return FrozenCopy(start)


def state_file(folder: str, rank: int, world: int) -> Path:
    """Where a rank's copy lies in a checkpoint."""
    return Path(folder, f"opsd_teacher_world_size_{world}_rank_{rank}.pt")


def save_copy(copy: WeightCopy, folder: str, rank: int, world: int) -> None:
    """Writes a rank's copy beside verl's part of the checkpoint, whole or not at all."""
    path = state_file(folder, rank, world)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    torch.save({"kind": type(copy).__name__} | copy.state(), temporary)
    temporary.replace(path)


def load_copy(copy: WeightCopy, folder: str, rank: int, world: int) -> None:
    """Continues the copy of a checkpoint.

    Raises:
        OpsdError: the checkpoint has none, or one of another teacher, decay, lag or shape.
    """
    path = state_file(folder, rank, world)
    found = torch.load(path, weights_only=True) if path.is_file() else {"kind": None}
    now = {"kind": type(copy).__name__} | copy.state()
    wanted = {k: v for k, v in now.items() if k not in ("shards", "rounds")}
    got = {k: found.get(k) for k in wanted}
    if got != wanted:
        raise OpsdError(
            f"{path} holds {got if path.is_file() else 'nothing: there is no such file'}, the run's teacher is {wanted}",
            "a teacher made of the student's earlier weights goes on where the checkpoint left it",
            "resume with the teacher that the run was started with, or start a new run",
        )
    shapes = [list(s.shape) for s in copy.shards]
    copy.load(found)
    if [list(s.shape) for s in copy.shards] != shapes:
        raise OpsdError(
            f"{path} with shards of {[list(s.shape) for s in copy.shards][:3]}, the model has {shapes[:3]}",
            "a copy has the shapes of the weights that are trained",
            "resume with the model, adapter and number of ranks that the run was started with",
        )
