"""Cases over a recorded run: its directory is in ``OPSD_TEST_RUN``, its student is the model. See ``run.py``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from ranks import MODELS, RANK, WORLD, one_step
from ranks import build as build_engine
from tiny import batch
from transformers import AutoTokenizer

from verl_opsd.privilege import ChatMarkers, teacher_view
from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.store import EpisodeStore
from verl_opsd.verl_adapter.loss import OpsdLoss

BRIEF = "Your peer adds another feature to the same files."


def _row(ids: np.ndarray, mask: np.ndarray, brief: list[int], markers: ChatMarkers, coef: float) -> dict:
    view = teacher_view(ids, mask.astype(np.int8), brief, "system", markers)
    position = torch.from_numpy(np.flatnonzero(mask) - 1)
    n = len(position)
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "position_ids": torch.arange(len(ids)),
        "loss_mask": torch.ones(len(ids), dtype=torch.int64),
        "opsd_position": position,
        "opsd_coef": torch.full((n,), coef),
        **{f"opsd_{k}": torch.zeros(n) for k in ("anchor", "behaviour", "reward")},
        "opsd_class": torch.zeros(n, dtype=torch.int64),
        "opsd_turn": torch.zeros(n, dtype=torch.int64),
        "opsd_view_ids": torch.from_numpy(np.asarray(view.ids, np.int64)),
        "opsd_view_len": torch.tensor([len(view.ids)]),
        "opsd_view_pos": torch.from_numpy(np.asarray(view.position, np.int64)),
    }


def case_recorded() -> dict:
    """Each turn as a row of its own, up to its last token, against each branch as one row."""
    assert (RANK, WORLD) == (0, 1)
    name = Path(json.loads((Path(os.environ["OPSD_TEST_RUN"]) / "meta.json").read_text())["student"]).name
    tokenizer = AutoTokenizer.from_pretrained(f"{MODELS}/{name}")
    markers, brief = ChatMarkers.from_tokenizer(tokenizer), tokenizer.encode(BRIEF)
    store = EpisodeStore(Path(os.environ["OPSD_TEST_RUN"]) / "episodes")
    episode = max(store.episodes(), key=lambda e: len(e.turns))
    branches = [b for a in ("agent1", "agent2") for b in build_trajectories([t for t in episode.turns if t.agent_id == a])]
    branches = [b for b in branches if b.loss_mask.any()]
    coef = 1.0 / sum(int(b.loss_mask.sum()) for b in branches)
    whole, single = [], []
    for b in branches:
        mask = b.loss_mask != 0
        whole.append(_row(b.input_ids, mask, brief, markers, coef))
        for turn in np.unique(b.turn_index[mask]):
            own = mask & (b.turn_index == turn)
            end = int(np.flatnonzero(own)[-1]) + 1
            single.append(_row(b.input_ids[:end], own[:end], brief, markers, coef))
    engine = build_engine(name)
    loss = OpsdLoss(chunk=64)
    by_branch, by_turn = one_step(engine, batch(whole, micro=1), loss), one_step(engine, batch(single, micro=1), loss)
    kl = torch.tensor(by_branch["divergence"]) - torch.tensor(by_turn["divergence"])
    return {
        "rows": [len(whole), len(single)],
        "positions": len(kl),
        "mean": float(torch.tensor(by_turn["divergence"]).mean()),
        "kl": float(kl.abs().max()),
        "loss": abs(by_branch["loss"] - by_turn["loss"]) / abs(by_turn["loss"]),
        "grad": max(float((by_branch["grads"][k] - g).norm() / g.norm()) for k, g in by_turn["grads"].items()),
    }
