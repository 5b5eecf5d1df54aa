"""From rows to sequences that a model can run: passes of the teacher's views, their grouping, and the layout of a forward.

Pure tensor functions; nothing here knows verl, FSDP or the model. Suffixes: N loss positions of a row, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError
from verl_opsd.teachers.base import Pass
from verl_opsd.tokens.rows import FIELDS, check_row


def rows_of(data: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Splits jagged fields into rows and asserts the row contract of each.

    Raises:
        OpsdError: a field is missing, or a row breaks ``tokens.rows``.
    """
    missing = [k for k in ("input_ids", *FIELDS) if k not in data]
    if missing:
        raise OpsdError(
            f"batch lacks the fields {missing}",
            "every row of a distillation batch has the fields of verl_opsd.tokens.rows, padding rows too",
            "build the rows with tokens.rows, and padding rows with tokens.rows.padding_fields",
        )
    columns = {k: data[k].unbind() for k in ("input_ids", *FIELDS)}
    rows = [{k: v[r] for k, v in columns.items()} for r in range(len(columns["input_ids"]))]
    for row in rows:
        check_row(row["input_ids"], row)
    return rows


def _check_shift(index_N: Tensor, lengths: Tensor, shift: int) -> Tensor:
    moved = index_N + shift
    if bool(((moved < 0) | (moved >= lengths)).any()):
        raise OpsdError(
            f"shift of {shift} moves a loss position out of its sequence",
            "a shifted position must stay inside its own pass",
            "use a smaller shift",
        )
    return moved


def view_passes(rows: Sequence[dict[str, Tensor]], shift: int = 0) -> list[Pass]:
    """The passes of every row's teacher view that score at least one loss position.

    Args:
        shift: tokens by which every scored position is moved inside its pass; anything but 0 is a negative control.

    Raises:
        OpsdError: ``shift`` leaves a pass.
    """
    out = []
    for r, row in enumerate(rows):
        ends = row["opsd_view_len"].cumsum(0)
        owner = torch.searchsorted(ends, row["opsd_view_pos"], right=True)
        for p, ids in enumerate(row["opsd_view_ids"].split(row["opsd_view_len"].tolist())):
            slots = (owner == p).nonzero()[:, 0]
            if len(slots):
                index = row["opsd_view_pos"][slots] - (ends[p] - len(ids))
                out.append(Pass(r, slots, ids, _check_shift(index, ends[p] * 0 + len(ids), shift)))
    return out


def own_passes(rows: Sequence[dict[str, Tensor]], shift: int = 0) -> list[Pass]:
    """One pass over each row's own ids (the student's view): the anchor and the identity teacher. ``shift`` as above."""
    out = []
    for r, row in enumerate(rows):
        n = row["opsd_position"].numel()
        if n:
            length = torch.tensor(row["input_ids"].numel(), device=row["input_ids"].device)
            index = _check_shift(row["opsd_position"], length, shift)
            out.append(Pass(r, torch.arange(n), row["input_ids"], index))
    return out


def by_row(passes: Sequence[Pass], rows: int) -> list[list[Pass]]:
    """The passes of each of ``rows`` rows."""
    out: list[list[Pass]] = [[] for _ in range(rows)]
    for p in passes:
        out[p.row].append(p)
    return out


def group_passes(passes: Sequence[Pass], max_tokens: float, max_sequences: float) -> list[list[Pass]]:
    """Fills forwards in order; a pass above ``max_tokens`` gets a forward of its own."""
    groups: list[list[Pass]] = []
    tokens = 0
    for p in passes:
        size = p.ids_T.numel()
        if not groups or tokens + size > max_tokens or len(groups[-1]) >= max_sequences:
            groups.append([])
            tokens = 0
        groups[-1].append(p)
        tokens += size
    return groups


def layout_index(lengths: Sequence[int], positions: Sequence[Tensor], packed: bool) -> Tensor:
    """Positions of several sequences, flat in the layout that the model sees.

    Args:
        lengths: tokens of each sequence.
        positions: int64[N_r] for each sequence, relative to its start.
        packed: sequences one after another (1, sum T); otherwise right-padded to the longest (B, max T), flattened.

    Returns:
        int64[sum N_r]
    """
    starts, width = [], max(lengths)
    for r in range(len(lengths)):
        starts.append(sum(lengths[:r]) if packed else r * width)
    return torch.cat([p + s for p, s in zip(positions, starts, strict=True)])


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Ragged rows (the first dimension differs) as one jagged nested tensor, the form of verl's fields."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def flat(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """A jagged field's rows, one after another."""
    return torch.cat(list(batch[name].unbind()))


def signal_of(batch: Mapping[str, Tensor], name: str, counts: Sequence[int], head_id: str) -> Signal:
    """The exact signal of a micro-batch's loss positions from its field of hidden states; see :func:`signal_rows`."""
    return Signal(hidden_NH=torch.cat(signal_rows(batch, name, counts)), head_id=head_id)


def signal_rows(batch: Mapping[str, Tensor], name: str, counts: Sequence[int]) -> list[Tensor]:
    """A field of signals, [N_r, width] a row.

    Args:
        counts: loss positions of each row.

    Raises:
        OpsdError: the field is missing or has another number of entries.
    """
    if name not in batch:
        raise OpsdError(
            f"micro-batch without {name}",
            "rows are scored once, before the optimizer steps",
            "train through OpsdTrainingWorker.train_mini_batch, or put the scored hidden states into the batch",
        )
    rows = batch[name].unbind()
    if [len(r) for r in rows] != list(counts):
        raise OpsdError(
            f"{name} with {[len(r) for r in rows]} entries for {list(counts)} loss positions",
            "a signal has one hidden state for each loss position of its row",
            "score the rows that are trained on",
        )
    return list(rows)


def teacher_of_rows(batch: Mapping[str, Tensor], counts: Sequence[int], teachers: int) -> int:
    """Number of the one teacher whose signals a micro-batch's rows bring, from the field ``opsd_teacher``; 0 where there is one teacher.

    Raises:
        OpsdError: rows of several teachers, a number that no teacher has, or no field.
    """
    if teachers == 1:
        return 0
    numbers = [int(n[0]) for n in batch["opsd_teacher"].unbind()] if "opsd_teacher" in batch else []
    found = {n for n, count in zip(numbers, counts, strict=False) if count} or {0}
    if len(numbers) != len(counts) or len(found) > 1 or not 0 <= min(found) < teachers:
        raise OpsdError(
            f"a micro-batch whose rows are of the teachers {numbers} among {teachers}",
            "every row names its teacher, and rows that share a forward have the same one",
            "train one row a micro-batch, and give each row opsd_teacher",
        )
    return found.pop()
