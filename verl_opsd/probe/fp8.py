"""What an FP8 teacher would cost in nats on recorded states, beside the signal that its brief gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_opsd.privilege import ChatMarkers, Placement
from verl_opsd.probe.measure import Head, divergence
from verl_opsd.probe.states import Branch, BriefChoice, context_ids, own_passes, passes_of_view, view_of
from verl_opsd.teachers import fp8
from verl_opsd.teachers.cache import model_digest
from verl_opsd.teachers.device import DeviceTeacher


def measure_fp8(
    branches: Sequence[Branch],
    teacher: DeviceTeacher,
    tokenizer: Any,
    choice: BriefChoice,
    placement: Placement,
    path: str,
    tasks: str,
    corpus: str,
) -> fp8.Measurement:
    """Scores every branch with the brief, exactly and in FP8, and without it. The teacher runs in FP8 afterwards.

    Args:
        path: the teacher's. tasks, corpus: see ``fp8.Measured``.

    Raises:
        OpsdError: a model or device that can't be put into FP8 (``teachers.fp8.convert``).
    """
    markers = ChatMarkers.from_tokenizer(tokenizer)
    exact, signal, views = [], [], []
    for b in branches:
        passes = passes_of_view(view_of(b, context_ids(b, "brief", choice, tokenizer), placement, choice, markers))
        briefed = Head.of(teacher, passes)
        signal.append(divergence(Head.of(teacher, own_passes(b.trajectory)), briefed)[0])
        exact.append(briefed.hidden_NH)
        views.append(passes)
    teacher.to_fp8()
    rounded = [Head.of(teacher, passes).hidden_NH for passes in views]
    device = teacher.weight_VH.device
    return fp8.Measurement(
        model_digest(path),
        str(teacher.dtype).removeprefix("torch."),
        choice.name,
        fp8.views_of(placement, choice.user_turn, choice.max_view_tokens, choice.window_context),
        tasks,
        corpus,
        path,
        sum(map(len, exact)),
        fp8.error(torch.cat(exact).to(device), torch.cat(rounded).to(device), teacher.weight_VH),
        fp8.statistics(torch.cat([torch.from_numpy(s) for s in signal])),
    )
