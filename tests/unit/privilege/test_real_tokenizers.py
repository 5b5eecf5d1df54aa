"""Teacher views of random conversations with real tokenizers: the embedded students', and a template of Qwen3's behaviour.

Conversations have a system message or none, tools, reasoning, several tool results in a row, peer messages, cut-off replies and
compaction. Each prompt is rendered whole by the template, so templates that strip reasoning fork branches by themselves. The view is
read back as text by an own, line-wise reader, not by the code under test.
"""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_opsd.errors import OpsdError
from verl_opsd.models.smollm import smollm_path
from verl_opsd.models.tiny import WARM, ensure_tiny
from verl_opsd.paths import cache_dir
from verl_opsd.privilege import ChatMarkers, chat_blocks, peer_spec, splice, teacher_view
from verl_opsd.tokens import Sampling, TurnRecord, build_trajectories

ROOT = Path(__file__).parents[2]
BRIEF = peer_spec("agent1", "agent2", "Render `<|im_start|>` and </think> as text.\n\nÜber-Task, 第二.")
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
NAMES = ["tiny", "warm", "smollm", "tiny-qwen3", "smollm-qwen3", "tiny-no_thinking"]
TEXTS = ["ls -la", "def f(x):\n    return x", "Hi, ü 第", "<tool_response>", "a  b\n\n", "x" * 40, "\n\nstart", "<think>"]


@functools.cache
def tokenizer_of(name: str):
    """(tokenizer, its markers, the brief's ids); skips where the model is not on this machine."""
    from transformers import AutoTokenizer

    models = cache_dir() / "models"
    paths = {"smollm": lambda: smollm_path(models), "tiny": lambda: ensure_tiny(models), "warm": lambda: WARM}
    path = paths[name.split("-")[0]]()
    if not path.is_dir():
        pytest.skip(f"{path} is not there: a run with scale=smollm makes it")
    tokenizer = AutoTokenizer.from_pretrained(path)
    if "-" in name:
        tokenizer.chat_template = (ROOT / "qwen3_template.jinja").read_text()
    return tokenizer, ChatMarkers.from_tokenizer(tokenizer), BRIEF.ids(tokenizer)


class Conversation:
    """One agent's turns; branches are opened as the gateway's documentation says: at the first token that differs."""

    def __init__(self, name: str, rng: random.Random):
        self.tokenizer, _, _ = tokenizer_of(name)
        self.options = {"enable_thinking": False} if name.endswith("no_thinking") else {}
        self.rng, self.turns, self.branches = rng, [], []
        self.tools = TOOLS if rng.random() < 0.5 else None
        self.messages = [{"role": "system", "content": "You are agent1."}] if rng.random() < 0.7 else []
        self.messages.append({"role": "user", "content": f"Task: {self.text()}"})

    def text(self) -> str:
        return " ".join(self.rng.choice(TEXTS) for _ in range(self.rng.randint(1, 3)))

    def reply(self, kind: str = "policy") -> None:
        render = functools.partial(self.tokenizer.apply_chat_template, tools=self.tools, tokenize=True, return_dict=False)
        prompt = list(render(self.messages, add_generation_prompt=True, **self.options))
        content = f"<think>\n{self.text()}\n</think>\n\n" if self.rng.random() < 0.5 and not self.options else ""
        content += self.text().replace("<think>", "").replace("<tool_response>", "")
        call = self.rng.random() < 0.6
        call_text = '\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>' if call else ""
        ids = list(self.tokenizer.encode(content + call_text, add_special_tokens=False, split_special_tokens=False))
        cut = self.rng.random() < 0.15
        ids = ids[: max(1, len(ids) // 2)] if cut else [*ids, self.tokenizer.eos_token_id]
        self.record(prompt, ids, kind)
        message = {"role": "assistant", "content": self.tokenizer.decode(ids).removesuffix("<|im_end|>") if cut else content}
        if call and not cut:
            message["tool_calls"] = [{"type": "function", "function": {"name": "bash", "arguments": "{}"}}]
        self.messages.append(message)
        if call and not cut:
            self.messages += [{"role": "tool", "content": self.text()} for _ in range(self.rng.randint(1, 3))]
        else:
            self.messages.append({"role": "user", "content": self.text()})
        if self.rng.random() < 0.4:
            self.messages.append({"role": "user", "content": f"[Message from agent2]: {self.text()}"})

    def compact(self) -> None:
        head = [m for m in self.messages[:2] if m["role"] != "assistant"]
        self.messages = [*head, {"role": "user", "content": f"Summary: {self.text()}"}]

    def record(self, prompt: list[int], ids: list[int], kind: str) -> None:
        lengths = [
            next((i for i, (a, b) in enumerate(zip(x, prompt, strict=False)) if a != b), min(len(x), len(prompt)))
            for x in self.branches
        ]
        parent, fork, reason = -1, 0, "start"
        if lengths and lengths[-1] == len(self.branches[-1]):
            branch, start = len(self.branches) - 1, len(self.branches[-1])
            parent, fork, reason = self.origin
        else:
            branch = len(self.branches)
            if lengths:
                parent = max(range(len(lengths)), key=lambda i: lengths[i])
                fork, reason = lengths[parent], "template_rewrite"
            start = fork
            self.branches.append([])
        self.origin = (parent, fork, reason)
        self.branches[branch] = prompt + ids
        self.turns.append(
            TurnRecord(
                "e", "agent1", len(self.turns), branch, start, np.array(prompt[start:], np.int32), np.array(ids, np.int32),
                np.zeros(len(ids), np.float32), "stop", kind, Sampling(1.0, 1.0, -1, 64), 0, "h", 0.0, 0.0, parent, fork, reason,
            )
        )  # fmt: skip


def trajectories(name: str, seed: int, calls: int):
    conversation = Conversation(name, random.Random(seed))
    for _ in range(calls):
        if conversation.turns and conversation.rng.random() < 0.15:
            conversation.compact()
        conversation.reply()
    return build_trajectories(conversation.turns)


def read_back(text: str) -> list[tuple[str, str]]:
    """(role, content) of the blocks of a ChatML text."""
    return re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", text, re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 6), user_turn=st.sampled_from(["block", "message"]))
def test_views_of_random_conversations(name, seed, calls, user_turn):
    tokenizer, markers, brief = tokenizer_of(name)
    decoded = tokenizer.decode(brief)
    assert decoded == f"\n\n{BRIEF.text}"
    for t in trajectories(name, seed, calls):
        scored = np.flatnonzero(t.loss_mask)
        for placement in ("system", "last_user"):
            has_system = tokenizer.decode(t.input_ids[:8].tolist()).startswith("<|im_start|>system")
            if placement == "system" and not has_system:
                with pytest.raises(OpsdError, match="start with a system message"):
                    teacher_view(t.input_ids, t.loss_mask, brief, placement, markers, user_turn=user_turn)
                continue
            view = teacher_view(t.input_ids, t.loss_mask, brief, placement, markers, user_turn=user_turn)
            # the scored ids are the student's, in order
            assert view.ids[view.position + 1].tolist() == t.input_ids[scored].tolist()
            offset = 0
            for length, (begin, end) in zip(view.lengths.tolist(), view.brief_span.tolist(), strict=True):
                one, at, stop = view.ids[offset : offset + length].tolist(), begin - offset, end - offset
                # without the brief the pass is a prefix of what the student read and wrote
                assert one[at:stop] == brief and one[:at] + one[stop:] == t.input_ids[: length - len(brief)].tolist()
                before, after = tokenizer.decode(one[:at]), tokenizer.decode(one[stop:])
                assert after.startswith("<|im_end|>")
                role, content = read_back(before)[-1]
                assert role == ("system" if placement == "system" else "user")
                if placement == "last_user" and user_turn == "message":
                    assert not content.startswith("<tool_response>\n")
                # no position that this pass scores has a later user turn between the brief and itself
                if placement == "last_user":
                    for p in view.position[(view.position >= offset) & (view.position < offset + length)].tolist():
                        between = read_back(tokenizer.decode(one[stop + 1 : p - offset + 1]))
                        assert not [
                            c
                            for r, c in between
                            if r == "user" and (user_turn == "block" or not c.startswith("<tool_response>"))
                        ]
                # the brief's text stands in the one message and nowhere in a reply
                for role, content in read_back(tokenizer.decode(one)):
                    assert role != "assistant" or BRIEF.text not in content
                offset += length


@pytest.mark.parametrize("name", NAMES)
def test_the_conversations_hold_what_they_should(name):
    """The generator is no test if it never makes the cases: count them."""
    seen: dict[str, int] = {}
    for seed in range(25):
        tokenizer, _, _ = tokenizer_of(name)
        branches = trajectories(name, seed, 5)
        text = "".join(tokenizer.decode(b.input_ids.tolist()) for b in branches)
        for key, found in {
            "system": text.startswith("<|im_start|>system"),
            "none": not text.startswith("<|im_start|>system"),
            "think": "<think>\n" in text,
            "tools": "<tool_call>" in text,
            "results in a row": "</tool_response>\n<tool_response>" in text,
            "peer": "[Message from agent2]" in text,
            "several branches": len(branches) > 1,
        }.items():
            seen[key] = seen.get(key, 0) + found
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize("name", NAMES)
def test_a_splice_inside_reasoning_is_refused(name):
    """The seeds' fault, rebuilt: the brief appended to the prompt, i.e. behind the generation header or inside <think>."""
    tokenizer, markers, brief = tokenizer_of(name)
    options = {"enable_thinking": False} if name.endswith("no_thinking") else {}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options)
    reply = tokenizer.encode("<think>\nI plan it.\n</think>\n\nDone.", add_special_tokens=False)
    ids = np.array([*prompt, *reply, tokenizer.eos_token_id], np.int32)
    blocks = chat_blocks(ids, markers)
    header = int(np.flatnonzero(ids == markers.im_start)[-1])
    for at in range(header + 1, len(ids)):
        with pytest.raises(OpsdError, match="inside the assistant block"):
            splice(ids, at, np.array(brief, np.int32), blocks)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.int8)
    for placement in ("system", "last_user"):
        text = tokenizer.decode(teacher_view(ids, mask, brief, placement, markers).ids.tolist())
        assert text.index(BRIEF.text) < text.index("<|im_end|>\n<|im_start|>assistant")
