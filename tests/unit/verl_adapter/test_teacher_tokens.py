"""Both sides of a distillation agree about vocabulary, ends of a turn and generation prefix; what differs is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.verl_adapter.requirements import tokenizer_of
from verl_opsd.verl_adapter.teacher_checks import check_tokens, frame


def edit_template(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert old in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
        tokenizer.save_pretrained(folder)

    return edit


def another_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)


def another_entry(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|brief|>"])
    tokenizer.save_pretrained(folder)


def stops(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))


def broken_stops(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (another_entry, r"1 entries: '<\|brief\|>': None / \d+"),
        (another_end, r"end token \d+ / \d+"),
        (stops, r"other tokens that end a turn \(generation_config\) than the student: .* / \[0, 1\]"),
        (broken_stops, r"teacher/generation_config\.json"),
        (
            edit_template("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"),
            r"other generation prefix than the student: .*<think>",
        ),
    ],
    ids=["vocabulary", "end token", "stop tokens", "broken stop tokens", "generation prefix"],
)
def test_what_differs_is_named(tmp_path: Path, edit: Callable[[Path], None], named: str) -> None:
    student, teacher = (make_tiny(tmp_path / name, seed=1, hidden_size=32) for name in ("student", "teacher"))
    check_tokens(str(student), str(teacher))
    if edit is stops:
        (student / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    edit(teacher)
    tokenizer_of.cache_clear()  # the checks of one process read a tokenizer once
    with pytest.raises(OpsdError, match=named):
        check_tokens(str(student), str(teacher))


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages[0].content }}"])
def test_a_teacher_without_a_template_for_a_plain_exchange_is_refused(tmp_path: Path, template: str | None) -> None:
    student, teacher = (make_tiny(tmp_path / name, seed=1, hidden_size=32) for name in ("student", "teacher"))
    (teacher / "chat_template.jinja").unlink()
    if template is not None:
        (teacher / "chat_template.jinja").write_text(template)
    tokenizer_of.cache_clear()
    with pytest.raises(OpsdError, match=r"opsd\.teacher: the chat template of .*teacher renders no exchange"):
        check_tokens(str(student), str(teacher))


def test_frame_of_the_project_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m", seed=1, hidden_size=32))
    prefix, after = frame(tokenizer)
    assert tokenizer.decode(prefix) == "<|im_start|>assistant\n" and tokenizer.decode(after) == "<|im_end|>\n"
