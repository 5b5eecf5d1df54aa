"""`Signal`: what a teacher (or the anchor) says at loss positions. One type for every teacher, the anchor and the cache.

Shape suffixes: N loss positions, H hidden size of the teacher, K support size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError


@dataclass(frozen=True)
class Signal:
    """Exactly one of three forms.

    exact:    ``hidden_NH`` (any float dtype) and ``head_id``: apply that head for the teacher's full distribution.
              ``head_id == "student"`` means the student's own vocabulary weight (self teacher, anchor).
    support:  ``ids_NK`` int64, ``logprobs_NK`` float32 (nats, under the full distribution) and ``tail_N`` float32, the
              log-mass of everything outside the support (-inf where the support is the whole vocabulary).
    sampled:  ``logprob_N`` float32, the log-probability of the sampled token only.
    """

    hidden_NH: Tensor | None = None
    head_id: str | None = None
    ids_NK: Tensor | None = None
    logprobs_NK: Tensor | None = None
    tail_N: Tensor | None = None
    logprob_N: Tensor | None = None

    def __post_init__(self) -> None:
        form = self.form  # raises when the form is not one of the three
        if form == "support":
            assert self.ids_NK is not None and self.logprobs_NK is not None and self.tail_N is not None
            if self.ids_NK.shape != self.logprobs_NK.shape or self.tail_N.shape != self.ids_NK.shape[:1]:
                raise OpsdError(
                    f"support signal of shapes ids {tuple(self.ids_NK.shape)}, logprobs {tuple(self.logprobs_NK.shape)}, "
                    f"tail {tuple(self.tail_N.shape)}",
                    "ids and logprobs are N x K, tail is N",
                    "give all three from the same scoring pass",
                )

    @property
    def form(self) -> str:
        """``exact``, ``support`` or ``sampled``."""
        exact = (self.hidden_NH is not None, self.head_id is not None)
        support = (self.ids_NK is not None, self.logprobs_NK is not None, self.tail_N is not None)
        sampled = (self.logprob_N is not None,)
        forms = {"exact": exact, "support": support, "sampled": sampled}
        touched = [name for name, parts in forms.items() if any(parts)]
        if len(touched) != 1 or not all(forms[touched[0]]):
            raise OpsdError(
                f"signal with {touched or 'no'} parts, some of them missing",
                "a signal is exactly one of exact(hidden, head_id), support(ids, logprobs, tail), sampled(logprob)",
                "give all parts of one form and nothing of the others",
            )
        return touched[0]

    def __len__(self) -> int:
        for t in (self.hidden_NH, self.ids_NK, self.logprob_N):
            if t is not None:
                return int(t.shape[0])
        raise AssertionError("unreachable: form was checked")

    def rows(self, which: slice | Tensor) -> Signal:
        """The same signal at some of its positions; ``which`` is a slice, bool[N] or int64 indices."""

        def cut(value: Tensor) -> Tensor:
            return value[which if isinstance(which, slice) else which.to(value.device)]

        parts: dict[str, Any] = {k: cut(v) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **parts)

    def to(self, device: torch.device | str) -> Signal:
        """The same signal on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)
