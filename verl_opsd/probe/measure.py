"""The measurement: divergences at the student's own tokens, under every context, and what they say by class, turn and depth.

Two families of numbers that are never put into one table:

    effect   KL(teacher without the brief || teacher with it): what the brief does, whoever the student is
    pull     KL(student || teacher): what training would follow; the models' gap plus the brief's effect

Nats a token, temperature 1. Suffixes: N loss positions of a branch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_opsd.distill import dense
from verl_opsd.distill.telemetry import Distribution, bucket
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import ChatMarkers, Placement
from verl_opsd.probe.states import Branch, BriefChoice, context_ids, own_passes, passes_of_view, view_of
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.device import DeviceTeacher
from verl_opsd.tokens.branches import loss_positions
from verl_opsd.tokens.records import TOKEN_CLASSES

#: Temperature of the void control, on both sides: it must stay at zero.
VOID_TEMPERATURE = 0.7
#: Loss positions a chunk: two [chunk, V] blocks of float32 at a time.
CHUNK = 256
#: Upper ends of the depth buckets, in tokens of prefix.
DEPTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
Values = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Probe:
    """Per-position values of all branches, one after another.

    Attributes:
        branches: in order. lengths: loss positions of each.
        values: by name, float32[sum N]: ``identity``, ``void``, ``shifted``, ``gap``, ``nll`` (student's, of its own tokens), and for
            each placement and arm ``effect/PLACEMENT/ARM``, ``flip/...`` (1 where the teacher's most probable token changes) and
            ``pull/...``.
        labels: int64[sum N]: ``class``, ``turn``, ``depth`` (tokens before the token).
    """

    branches: tuple[Branch, ...]
    lengths: tuple[int, ...]
    values: Values
    labels: Mapping[str, NDArray[np.int64]]


class Head:
    """Hidden states [N, H] under the vocabulary weight of their model."""

    def __init__(self, model: DeviceTeacher, hidden_NH: Tensor):
        self.hidden_NH, self._model = hidden_NH, model

    @classmethod
    def of(cls, model: DeviceTeacher, passes: Sequence[Pass]) -> Head:
        """Of one scoring."""
        hidden = model.score(passes).hidden_NH
        assert hidden is not None
        return cls(model, hidden)

    def logits(self, rows: slice) -> Tensor:
        """[C, V] float32.

        Raises:
            OpsdError: some are not finite: distributions leave such values out, and the others would pass every gate.
        """
        weight = self._model.weight_VH
        out_CV = torch.nn.functional.linear(self.hidden_NH[rows].to(weight.device), weight).float()
        if bad := int((~out_CV.isfinite()).any(-1).sum()):
            raise OpsdError(
                f"model {self._model.name}: logits that are not finite at {bad} of {len(out_CV)} positions",
                "every table and gate of a probe is over all loss positions",
                "look at the model's weights; try --dtype float32",
            )
        return out_CV


def divergence(student: Head, teacher: Head, temperature: float = 1.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """KL(student || teacher) in nats and whether both have the same most probable token (1 or 0); float32[N] each."""
    kl, agree = [], []
    for start in range(0, len(student.hidden_NH), CHUNK):
        rows = slice(start, start + CHUNK)
        s, t = student.logits(rows) / temperature, teacher.logits(rows) / temperature
        scored = dense.score(s, t)
        kl.append(scored.value_C.cpu().numpy())
        agree.append(scored.norms.agree_C.cpu().numpy())
    return np.concatenate(kl), np.concatenate(agree)


def nll(model: Head, labels_N: NDArray[np.int64]) -> NDArray[np.float32]:
    """Negative log-likelihood of tokens, nats, float32[N]."""
    out = []
    for start in range(0, len(labels_N), CHUNK):
        logp = model.logits(slice(start, start + CHUNK)).log_softmax(-1).cpu()
        out.append(-logp.gather(1, torch.from_numpy(labels_N[start : start + CHUNK])[:, None])[:, 0].numpy())
    return np.concatenate(out)


def measure(
    branches: Sequence[Branch],
    student: DeviceTeacher,
    teacher: DeviceTeacher,
    tokenizer: Any,
    choice: BriefChoice,
    arms: Sequence[str],
    placements: Sequence[Placement],
    progress: Callable[[int], None] = lambda done: None,
    workers: int = 1,
) -> Probe:
    """Scores every branch under every context.

    Args:
        student, teacher: may be one object; then there is no gap between the models.
        placements: the brief is measured under all of them, the arms that it is held against under the first.
        progress: called with the number of branches that are done.
        workers: branches at a time. On a CPU several workers of one thread each are faster than one of several threads.
    """
    markers = ChatMarkers.from_tokenizer(tokenizer)

    def one(branch: Branch) -> dict[str, NDArray[np.float32]]:
        t = branch.trajectory
        position = loss_positions(t.loss_mask)
        both = Head.of(student, own_passes(t, shifts=(0, 1))).hidden_NH
        own, moved = Head(student, both[: len(position)]), Head(student, both[len(position) :])
        again = Head.of(student, own_passes(t, by_turn=True))
        bare = own if teacher is student else Head.of(teacher, own_passes(t))
        values = {
            "identity": divergence(own, again)[0],
            "void": divergence(own, again, VOID_TEMPERATURE)[0],
            "shifted": divergence(own, moved)[0],
            "gap": divergence(own, bare)[0],
            "nll": nll(own, t.input_ids[position + 1].astype(np.int64)),
        }
        for arm in arms:
            ids = context_ids(branch, arm, choice, tokenizer)
            for placement in placements if arm == "brief" else placements[:1]:
                seen = Head.of(teacher, passes_of_view(view_of(branch, ids, placement, choice, markers)))
                effect, agree = divergence(bare, seen)
                values[f"effect/{placement}/{arm}"], values[f"flip/{placement}/{arm}"] = effect, 1 - agree
                values[f"pull/{placement}/{arm}"] = effect if bare is own else divergence(own, seen)[0]
        return values

    parts: list[dict[str, NDArray[np.float32]]] = []
    with ThreadPoolExecutor(workers) as pool:
        for values in pool.map(one, branches):
            parts.append(values)
            progress(len(parts))
    positions = [(b.trajectory, loss_positions(b.trajectory.loss_mask)) for b in branches]
    labels: dict[str, list[Any]] = {
        "class": [t.token_class[p + 1] for t, p in positions],
        "turn": [t.turn_index[p + 1] for t, p in positions],
        "depth": [p + 1 for _, p in positions],
    }
    return Probe(
        tuple(branches),
        tuple(len(p["nll"]) for p in parts),
        {k: np.concatenate([p[k] for p in parts]).astype(np.float32) for k in parts[0]},
        {k: np.concatenate(v).astype(np.int64) for k, v in labels.items()},
    )


def stats(values: NDArray[np.float32]) -> dict[str, float | None]:
    """mean, median, p90, p99, max, max_over_mean, top1pct_share; see ``distill.telemetry.Distribution.stats``."""
    seen = Distribution()
    seen.add_all(values)
    return seen.stats()


def spikes(values: NDArray[np.float32]) -> dict[str, float]:
    """Teachability of tokens by their NLL under the student: mean, max, and spike, the mean of the largest 1% (at least one)."""
    ordered = np.sort(values.astype(np.float64))
    top = ordered[len(ordered) - max(1, len(ordered) // 100) :]
    return {"tokens": float(len(ordered)), "mean": float(ordered.mean()), "max": float(ordered[-1]), "spike": float(top.mean())}


def teachability(branches: Sequence[Branch], student: DeviceTeacher) -> dict[str, float]:
    """:func:`spikes` of all policy tokens of trajectories that another policy wrote."""
    out = []
    for b in branches:
        labels = b.trajectory.input_ids[loss_positions(b.trajectory.loss_mask) + 1].astype(np.int64)
        out.append(nll(Head.of(student, own_passes(b.trajectory)), labels))
    return spikes(np.concatenate(out))


def depth_bucket(depth: int) -> str:
    """Bucket of a prefix length, e.g. ``512-1024``."""
    below = [d for d in (0, *DEPTHS) if d <= depth]
    above = [d for d in DEPTHS if d > depth]
    return f"{below[-1]}-{above[0]}" if above else f">={below[-1]}"


def groups(probe: Probe, by: str) -> dict[str, NDArray[np.bool_]]:
    """Positions by ``class``, ``turn`` or ``depth``: name -> mask, in order, empty ones left out."""
    label = probe.labels[by]
    if by == "class":
        return {name: label == code for code, name in enumerate(TOKEN_CLASSES) if (label == code).any()}
    if by == "turn":
        return {f"turn {t}": label == t for t in np.unique(label).tolist()}
    lower = bucket(label, np.array([0, *DEPTHS]))
    return {depth_bucket(d): lower == d for d in np.unique(lower).tolist()}


def summary(probe: Probe) -> dict[str, Any]:
    """Everything as plain values: controls, one effect table and one pull table a placement, each also by class, turn and depth."""
    placements = list(dict.fromkeys(k.split("/")[1] for k in probe.values if k.startswith("effect/")))
    arms_of = {p: [k.split("/")[2] for k in probe.values if k.startswith(f"effect/{p}/")] for p in placements}
    out: dict[str, Any] = {
        "episodes": len({b.trajectory.episode_id for b in probe.branches}),
        "branches": len(probe.branches),
        "positions": int(sum(probe.lengths)),
        "controls": {k: stats(probe.values[k]) for k in ("identity", "void", "shifted")},
        "gap": stats(probe.values["gap"]),
        "teachability": {"student's own tokens": spikes(probe.values["nll"])},
        "effect": {},
        "pull": {},
    }
    for family in ("effect", "pull"):
        for placement, arms in arms_of.items():
            table = {a: stats(probe.values[f"{family}/{placement}/{a}"]) for a in arms}
            if family == "effect":
                for a in arms:
                    table[a]["flips"] = float(probe.values[f"flip/{placement}/{a}"].mean())
            by = {
                kind: {
                    name: {a: float(probe.values[f"{family}/{placement}/{a}"][mask].mean()) for a in arms}
                    | {"n": int(mask.sum())}
                    for name, mask in groups(probe, kind).items()
                }
                for kind in ("class", "turn", "depth")
            }
            out[family][placement] = {"arms": table, "by": by}
    return out
