"""The episodes of the page: their conversations in compressed blocks, and the index that the script makes its table of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from verl_opsd.cooperbench.dataset import POCKET_DIR
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.outcomes import merge_of
from verl_opsd.evaluation.page.conversations import Decoder, blocks, conversation
from verl_opsd.evaluation.page.gather import RunData, tokenizer_of
from verl_opsd.evaluation.page.redact import Secrets, secrets_of
from verl_opsd.tokens.records import Episode

#: Bytes of the file that conversations may fill it up to.
BUDGET = 20_000_000
_NOTHING = Secrets(frozenset(), frozenset())


@dataclass(frozen=True)
class Options:
    """What the page shows.

    Attributes:
        reveal: show hidden tests and answers. dataset: folder that the tasks are looked up in; None: the one that the run names.
        budget: bytes of the whole file. tokenizer: of the student, where the caller has it at hand.
    """

    reveal: bool = False
    dataset: Path | None = None
    budget: int = BUDGET
    tokenizer: Any = None


def conversations(runs: Sequence[RunData], options: Options) -> tuple[dict[int, dict[str, Any]], dict[int, str], list[str]]:
    """Place in the index -> conversation; place -> why there is none; what the reader is to be told."""
    talks: dict[int, dict[str, Any]] = {}
    why_not: dict[int, str] = {}
    notes: list[str] = []
    at = 0
    for r in runs:
        tokenizer, missing = (options.tokenizer, "") if options.tokenizer is not None else tokenizer_of(r.meta)
        decoder = None if tokenizer is None else Decoder(tokenizer)
        who = f"{r.name}: " if len(runs) > 1 else ""
        if missing and any(e.turns for e in r.episodes):
            notes.append(f"{who}Replies are shown as the harness read them, without colours: {missing}.")
        if r.divergences_missing:
            notes.append(f"{who}Tokens are not coloured: {r.divergences_missing.splitlines()[0]}")
        dataset = options.dataset or dataset_of(r)
        for e in r.episodes:
            try:
                secrets = _NOTHING if options.reveal else secrets_of(dataset / e.repo / f"task{e.task_id}", e.features)
            except OpsdError as error:
                why_not[at] = (
                    f"Left out: {str(error).splitlines()[0]}, so hidden tests can't be looked for in it (--dataset, --reveal)."
                )
            else:
                talks[at] = conversation(e, r.divergences, decoder, secrets, options.reveal)
            at += 1
    if why_not:
        notes.append(
            f"{len(why_not)} conversations are left out, as their task is not on this machine and hidden tests can't be looked for: name it with --dataset, or show everything with --reveal."
        )
    return talks, why_not, notes


def dataset_of(run: RunData) -> Path:
    """The dataset that a run names."""
    named = run.opsd.tasks.dataset
    return POCKET_DIR if named == "pocket" else Path(named).expanduser()


def packed(talks: Mapping[int, dict[str, Any]], room: int) -> tuple[str, dict[int, str], list[int]]:
    """The common block, place -> block of the conversations that fit into ``room`` bytes, and the places of those that don't:
    evaluation goes first, each split in order."""
    order = sorted(talks, key=lambda i: (not str(talks[i]["id"]).startswith("eval"), i))
    common, found = blocks(talks[i] for i in order)
    sizes = np.cumsum([len(b) + 60 for b in found])
    count = int((sizes + len(common) <= room).sum())
    return common, dict(zip(order[:count], found[:count], strict=True)), order[count:]


def index(
    episodes: Sequence[tuple[RunData, Episode]], block: Mapping[int, int], why_not: Mapping[int, str], runs: Sequence[RunData]
) -> Markup:
    rows = []
    for i, (r, e) in enumerate(episodes):
        passed = None if e.grade is None else f"{sum(f.passed for f in e.grade.features)}/2"
        pair = f"{e.repo}/task{e.task_id}/f{e.features[0]}_f{e.features[1]}"
        minutes = round((e.t_end - e.t_start) / 60, 1) if e.t_end else None
        merge = None if e.grade is None else merge_of(e.grade).replace("_", " ")
        state, why = r.states.get(e.episode_id, ("unrecorded", "the evidence does not know it"))
        invalid = [m.reason for m in r.marks if m.covers(e.model_version)]
        note = "; ".join(
            [f"invalidated: {x}" for x in invalid]
            + ([f"{'altered' if state == 'altered' else 'unverifiable'}: {why}"] if state != "whole" else [])
        )
        steps = sum(a.steps for a in e.agents)
        messages = sum(a.sent_messages for a in e.agents)
        outcome = e.outcome.replace("infra:", "void: ")
        about = (
            f"{pair} · {outcome}"
            + (f" · {passed} features · merge {merge}" if e.grade else "")
            + f" · version {e.model_version}"
        )
        rows.append(
            {
                "id": e.episode_id if len(runs) == 1 else f"{r.name} {e.episode_id}",
                "cells": [e.split, e.model_version, pair, outcome, passed, merge, steps, messages, minutes],
                "note": note,
                "bad": bool(invalid),
                "about": about + (f" · {note}" if note else ""),
                "block": block.get(i),
                "left_out": why_not.get(
                    i, "Left out: the file would be larger than its budget (opsd report RUN_DIR --max-mb)."
                ),
            }
        )
    every = [v for r in runs for v in r.divergences.values()]
    known = np.concatenate(every or [np.zeros(0, np.float32)])
    known = known[np.isfinite(known)]
    full = float(np.quantile(known, 0.99)) if len(known) else 0.0
    left = [True, False, True, True, False, True, False, False, False]
    return _json({"rows": rows, "left": left, "full": full if full > 0 else 1e-6})


def _json(value: Any) -> Markup:
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))
