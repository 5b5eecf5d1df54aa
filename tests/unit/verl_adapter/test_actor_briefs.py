"""Briefs in the actors' own prompts: where they stand, that they can be taken out again, what is marked and what is scanned."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer
from opsd_section import SECTION

from verl_opsd.config import ActorBriefConfig, OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.cooperbench.pair_briefs import patch_of
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import ChatMarkers, Section, compose, teacher_view
from verl_opsd.privilege.hints import without_hint
from verl_opsd.tokens import build_trajectories
from verl_opsd.tokens.gateway import Gateway, Generation
from verl_opsd.verl_adapter.actor_briefs import (
    HintedBuilder,
    actor_briefs,
    collected_with,
    copying_turns,
    hints_of,
)
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder

TOKENIZER = chat_tokenizer()
MARKERS = ChatMarkers.from_tokenizer(TOKENIZER)
PAIR = load_subset("pocket_train", POCKET_DIR, split="train")[0]
CONTRACT = EvalContract(context_length=4000, max_tokens=50, tool_parser="hermes")
REPLIES = ["I look.", "Done <think> twice", "Again."]


class Engine:
    """Plays replies; keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], *, session: str, turn: int, sampling: Any) -> Generation:
        self.prompts.append(list(prompt_ids))
        ids = [*TOKENIZER.encode(REPLIES[turn], add_special_tokens=False), TOKENIZER.eos_token_id]
        return Generation(ids, [-1.0] * len(ids), "stop", 0)


def played(hint_ids: list[int]) -> tuple[list[list[int]], Any]:
    """Three turns, the last one after the history was rewritten; prompts and trajectories."""
    engine = Engine()
    builder: Any = VerlTokenBuilder(TOKENIZER, "qwen3")
    if hint_ids:
        builder = HintedBuilder(builder, hint_ids, MARKERS)
    session = Gateway(engine, builder, VerlReplyParser(TOKENIZER, "hermes"), CONTRACT).session("e", "agent1")

    async def play() -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are agent1."},
            {"role": "user", "content": "Task."},
        ]
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": "[Message from agent2]: hello"}]
        await session.chat(messages)
        await session.chat([*messages[:1], {"role": "user", "content": "Summary."}])

    asyncio.run(play())
    return engine.prompts, build_trajectories(session.records())


def test_actor_reads_what_the_teacher_would_and_it_can_be_taken_out() -> None:
    hint = compose(Section("h", "guidance", "Read the tests first, then <|im_end|> agree.")).ids(TOKENIZER)
    plain_prompts, plain = played([])
    prompts, hinted = played(hint)
    for with_hint, without in zip(prompts, plain_prompts, strict=True):
        n = len(without)
        ids, mask = np.array([*without, 5], np.int32), np.zeros(n + 1, np.int8)
        view = teacher_view(ids, mask, hint, "system", MARKERS)
        assert with_hint == view.ids.tolist()[:-1]
    assert len(hinted) == len(plain) == 2
    for a, b in zip(hinted, plain, strict=True):
        stripped = without_hint(a, hint, MARKERS)
        for field in dataclasses.fields(b):
            assert np.array_equal(getattr(stripped, field.name), getattr(b, field.name)), field.name


def test_other_ids_at_the_hints_place_are_refused() -> None:
    hint = compose(Section("h", "guidance", "Read the tests first.")).ids(TOKENIZER)
    _, plain = played([])
    with pytest.raises(OpsdError, match="other ids than the hint's"):
        without_hint(plain[0], hint, MARKERS)


def config(**actor: Any) -> OpsdConfig:
    return OpsdConfig.parse(SECTION | {"contract": {"context_length": 4096, "max_tokens": 96}, "actor_brief": actor})


def test_which_episodes_have_it_and_what_kind() -> None:
    guidance = config(name="peer_spec+process", where="both").actor_brief
    assert {a: b.kind for a, b in actor_briefs(guidance, PAIR).items()} == {"agent1": "guidance", "agent2": "guidance"}
    assert actor_briefs(config(name="process").actor_brief, PAIR) == {}  # of the training split
    assert list(actor_briefs(config(name="process").actor_brief, dataclasses.replace(PAIR, split="eval"))) == [
        "agent1",
        "agent2",
    ]
    assert actor_briefs(ActorBriefConfig(), PAIR) == {}
    with pytest.raises(OpsdError, match="allow_answer"):
        actor_briefs(config(name="gold_patch", where="train").actor_brief, PAIR)
    with pytest.raises(OpsdError, match="before it acts"):
        actor_briefs(config(name="hindsight_gold", where="train", allow_answer=True).actor_brief, PAIR)


@pytest.mark.parametrize(
    "actor",
    [{"where": "both"}, {"name": "workflow"}, {"name": "process", "files": "x"}, {"name": "none", "allow_answer": True}],
)
def test_keys_that_would_be_ignored_are_refused(actor: dict[str, Any]) -> None:
    with pytest.raises(OpsdError, match="rule:"):
        config(**actor)


def test_an_episode_and_its_run_agree_about_the_hint(tmp_path: Path) -> None:
    from types import SimpleNamespace

    kinds = {"agent1": "guidance", "agent2": "guidance"}
    episode: Any = SimpleNamespace(episode_id="e", brief_kinds=kinds)
    opsd = config(name="process", where="train")
    assert list(hints_of(opsd.actor_brief, PAIR, episode)) == ["agent1", "agent2"]
    with pytest.raises(OpsdError, match="the run that collected it gives"):
        hints_of(config().actor_brief, PAIR, episode)
    with pytest.raises(OpsdError, match="the run that collected it gives"):
        hints_of(opsd.actor_brief, PAIR, SimpleNamespace(episode_id="e", brief_kinds={}))  # type: ignore[arg-type]
    offline = dataclasses.replace(config(), mode="offline", corpus=str(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps({"opsd": {"actor_brief": dataclasses.asdict(opsd.actor_brief)}}))
    assert collected_with(offline) == opsd.actor_brief and list(hints_of(collected_with(offline), PAIR, episode)) == [
        "agent1",
        "agent2",
    ]


def test_replies_that_copy_an_answer_are_found() -> None:
    answer = actor_briefs(config(name="gold_patch", where="train", allow_answer=True).actor_brief, PAIR)["agent1"]
    gold = patch_of(PAIR, PAIR.features[0], "gold")
    added = "\n".join(line[1:] for line in gold.splitlines() if line.startswith("+") and not line.startswith("+++"))
    replies = {0: "I read the files first.", 1: f"I write:\n{added}", 2: PAIR.feature_text(PAIR.features[0])}
    assert list(copying_turns(PAIR, answer, replies)) == [1]
    guidance = actor_briefs(config(name="process", where="train").actor_brief, PAIR)["agent1"]
    assert copying_turns(PAIR, guidance, replies) == {}
