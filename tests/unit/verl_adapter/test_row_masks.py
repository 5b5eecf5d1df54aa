"""Turn, segment and token-class masks of training rows, from their keys; and the positions that the anchor covers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from opsd_section import SECTION

from verl_opsd.config import OpsdConfig
from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.models.tiny import ensure_tiny
from verl_opsd.paths import cache_dir
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade, Sampling, TurnRecord

PAIR = load_subset("pocket_train", POCKET_DIR)[0]
#: (turn, kind, tokens of the reply) of agent1; turn 3 is a summary.
TURNS = [(0, "policy", 4), (1, "malformed", 3), (2, "policy", 2), (3, "summarizer", 5), (4, "policy", 1)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(ensure_tiny(cache_dir() / "models")))


def row(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **loss: Any) -> dict[str, torch.Tensor]:
    """The row of the one branch, under a loss."""
    from verl_opsd.verl_adapter.episode_rows import episode_outputs

    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    between = tokenizer.encode("<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    turns, start = [], 0
    for turn, kind, size in TURNS:
        new = np.array(prompt if turn == 0 else between, np.int32)
        reply = np.array(tokenizer.encode("abcdefgh", add_special_tokens=False)[:size], np.int32)
        assert len(reply) == size
        common = (new, reply, np.full(size, -1.0, np.float32), "stop", kind, Sampling(1.0, 1.0, -1, 96), 0, "h", 0.0, 1.0)
        turns.append(TurnRecord("e", "agent1", turn, 0, start, *common))
        start += len(new) + size
    grade = Grade("clean", None, {}, (FeatureGrade(1, False, 0, 1, 1), FeatureGrade(2, False, 0, 1, 1)))
    agents = tuple(AgentOutcome(f"agent{i}", i, "Submitted", 1, "", 0, True) for i in (1, 2))
    made = Episode("e", PAIR.repo, PAIR.task_id, PAIR.features, "train", "h", "scored", tuple(turns), agents, grade, {}, 0)
    (output,) = episode_outputs(OpsdConfig.parse(SECTION | {"loss": loss}), PAIR, made, tokenizer)
    return dict(output.opsd_row) | {"response_mask": torch.tensor(output.response_mask)}


CASES = {
    "default": ({}, [1] * 10),
    "kinds": ({"turn_kinds": ["policy"]}, [1] * 4 + [0] * 3 + [1] * 3),
    "malformed alone": ({"turn_kinds": ["malformed"]}, [0] * 4 + [1] * 3 + [0] * 3),
    "turns": ({"turns": [[1, 3]]}, [0] * 4 + [1] * 5 + [0]),
    "several ranges": ({"turns": [[0, 1], [4, 9]]}, [1] * 4 + [0] * 5 + [1]),
    "kinds and turns": ({"turn_kinds": ["policy"], "turns": [[1, 3]]}, [0] * 7 + [1] * 2 + [0]),
    "classes": ({"class_weights": {"other": 0.5}}, [0.5] * 10),
}


@pytest.mark.parametrize("case", CASES)
def test_masks_by_hand_and_an_anchor_at_every_policy_position(case: str, tokenizer, monkeypatch, tmp_path) -> None:
    loss, want = CASES[case]
    got = row(tokenizer, monkeypatch, tmp_path, anchor=0.5, **loss)
    assert got["opsd_turn"].tolist() == [0] * 4 + [1] * 3 + [2] * 2 + [4]  # the summary is context
    assert got["opsd_coef"].tolist() == want
    assert got["opsd_anchor"].tolist() == [1.0] * 10
    assert int(got["response_mask"].sum()) == 10


def test_segments_are_of_the_branchs_tokens(tokenizer, monkeypatch, tmp_path) -> None:
    whole = row(tokenizer, monkeypatch, tmp_path)
    scored = (whole["opsd_position"] + 1).tolist()  # where the reply's tokens stand
    spans = [[scored[1], scored[3]], [scored[5], scored[5] + 1]]
    got = row(tokenizer, monkeypatch, tmp_path, segments=spans, turn_kinds=["policy"])
    assert got["opsd_coef"].tolist() == [0, 1, 1] + [0] * 7  # the second span lies in the malformed turn
    got = row(tokenizer, monkeypatch, tmp_path, segments=spans)
    assert got["opsd_coef"].tolist() == [0, 1, 1, 0, 0, 1, 0, 0, 0, 0] and got["opsd_anchor"].tolist() == [0.0] * 10


def test_the_anchor_may_be_kept_to_the_positions_of_the_loss(tokenizer, monkeypatch, tmp_path) -> None:
    loss = {"anchor": 0.5, "anchor_positions": "loss", "turns": [[1, 3]], "class_weights": {"other": 0.25}}
    got = row(tokenizer, monkeypatch, tmp_path, **loss)
    assert got["opsd_coef"].tolist() == [0] * 4 + [0.25] * 5 + [0]
    assert got["opsd_anchor"].tolist() == [0] * 4 + [1] * 5 + [0]  # each weighs 1: the class weight is the divergence's


def test_a_masked_turn_leaves_the_denominator_and_not_the_anchors(tokenizer, monkeypatch, tmp_path) -> None:
    from verl_opsd.verl_adapter.reduce import with_coefficients

    loss = {"turns": [[0, 1]], "anchor": 0.5, "reduction": "token"}
    made = row(tokenizer, monkeypatch, tmp_path, **loss)
    (got,) = with_coefficients([made], ["e_0"], [0], OpsdConfig.parse(SECTION | {"loss": loss}).loss)
    assert got["opsd_coef"].tolist() == [0.25] * 4 + [0] * 6
    assert got["opsd_anchor"].tolist() == pytest.approx([0.05] * 10)
