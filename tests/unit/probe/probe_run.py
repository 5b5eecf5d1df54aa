"""A run directory for tests of the probe: two short episodes of two turns an agent, on shipped pairs, with a tiny student."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from verl_opsd.config import OpsdConfig
from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.cooperbench.pair_briefs import briefs_of
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade, Sampling, TurnRecord
from verl_opsd.tokens.store import EpisodeStore

REPLIES = (
    "<think>\nI look.\n</think>\n\n<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>",
    "Done with it.",
)  # fmt: skip


def make_run(folder: Path, student: Path, brief: str = "peer_spec", actor_brief: str = "none") -> Path:
    """Writes ``meta.json`` and ``episodes/``; ``actor_brief`` stands in the agents' own prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(student)
    opsd = OpsdConfig.parse(
        {
            "recipe": "opd",
            "scale": "local",
            "mode": "online",
            "tasks": {"dataset": "pocket", "train": "pocket_train", "eval": "pocket_eval"},
            "brief": {"name": brief},
            "teacher": {},
            "loss": {},
            "actor_brief": {"name": actor_brief, "where": "train" if actor_brief != "none" else "eval"},
            "contract": {"context_length": 12288},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps({"student": str(student), "opsd": dataclasses.asdict(opsd)}))
    store = EpisodeStore(folder / "episodes")
    for n, pair in enumerate(load_subset("pocket_train", POCKET_DIR)[3:5]):
        read = briefs_of(pair, actor_brief)
        name = f"train-00001-0000{n}-0"
        turns = tuple(t for agent in ("agent1", "agent2") for t in _turns(name, agent, tokenizer, read[agent].ids(tokenizer)))
        grade = Grade("clean", None, {}, (FeatureGrade(1, False, 0, 1, 1), FeatureGrade(2, False, 0, 1, 1)))
        agents = tuple(AgentOutcome(f"agent{i + 1}", f, "Submitted", 2, "", 0, True) for i, f in enumerate(pair.features))
        store.write(
            Episode(
                name,
                pair.repo,
                pair.task_id,
                pair.features,
                "train",
                "h",
                "scored",
                turns,
                agents,
                grade,
                {agent: brief.kind for agent, brief in read.items()},
                0,
            )
        )
    return folder


def _turns(episode: str, agent: str, tokenizer: Any, hint: list[int]) -> list[TurnRecord]:
    messages = [{"role": "system", "content": f"You are {agent}."}, {"role": "user", "content": "Do your task."}]
    ids: list[int] = []
    out = []
    for turn, reply in enumerate(REPLIES):
        rendered = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        new = rendered[len(ids) :]
        if turn == 0:
            end = new.index(tokenizer.eos_token_id)
            new = [*new[:end], *hint, *new[end:]]
        assert rendered[: len(ids)] == ids
        said = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        out.append(
            TurnRecord(
                episode, agent, turn, 0, len(ids) + len(hint) * (turn > 0), np.array(new, np.int32), np.array(said, np.int32),
                np.zeros(len(said), np.float32), "stop", "policy", Sampling(1.0, 1.0, -1, 96), 0, "h", 0.0, 1.0,
            )
        )  # fmt: skip
        ids = rendered + said
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "a.py"}]
    return out
