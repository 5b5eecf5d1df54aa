"""The planner against what was measured, its layouts, and the command."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from verl_opsd.cli import main
from verl_opsd.cli import plan as command
from verl_opsd.errors import OpsdError
from verl_opsd.models.checkpointing import plan
from verl_opsd.planning import memory, planner
from verl_opsd.planning.planner import Layout
from verl_opsd.teachers import device as device_teacher

STUDENT, TEACHER = command.shape_of("qwen3.5-9b"), command.shape_of("qwen3.5-27b")
H200 = planner.DEVICES["H200"]


def test_predictions_are_near_what_an_h200_measured() -> None:
    """benchmarks/results/pair.txt: 32,768 tokens, the teacher's view 1,000 longer. Peaks within 10%, times within 20%."""
    seven = plan(STUDENT, 32768, 7)
    head = 2 * STUDENT.vocab * TEACHER.hidden
    student = memory.student_bytes(STUDENT, 32) + head + memory.step_bytes(STUDENT, 32768, seven)
    teacher = memory.teacher_bytes(TEACHER) + memory.score_bytes(TEACHER, 33768, planner.PART)
    assert student == pytest.approx(66.6e9, rel=0.1) and teacher == pytest.approx(59.1e9, rel=0.1)
    assert planner.step_seconds(STUDENT, H200, 32768, seven) == pytest.approx(3.76, rel=0.2)
    assert planner.forward_seconds(TEACHER, H200, 33768, TEACHER.kinds) == pytest.approx(3.59, rel=0.2)


def test_more_kept_layers_are_faster_and_larger() -> None:
    few, many = plan(STUDENT, 32768, 4), plan(STUDENT, 32768, 20)
    assert planner.step_seconds(STUDENT, H200, 32768, many) < planner.step_seconds(STUDENT, H200, 32768, few)
    assert memory.step_bytes(STUDENT, 32768, many) > memory.step_bytes(STUDENT, 32768, few)


def test_layouts() -> None:
    assert planner.layouts(1) == [Layout(1, 0)]
    assert planner.layouts(2) == [Layout(1, 1)]
    assert planner.layouts(5) == [Layout(4, 1), Layout(3, 2)]
    with pytest.raises(OpsdError, match="0 devices"):
        planner.layouts(0)
    assert planner.PART == device_teacher.PART


def test_the_target_layout_holds_every_state_on_two_h200() -> None:
    found = planner.estimate(STUDENT, TEACHER, Layout(1, 1), H200, 131072, 32, 4096, planner.PART)
    room = memory.usable(H200.bytes_)
    assert sum(found.student_bytes.values()) <= room and sum(found.teacher_bytes.values()) <= room
    assert found.tokens_a_second == pytest.approx(131072 / max(found.student_seconds, found.teacher_seconds))


def test_sharding_and_more_teachers() -> None:
    one, four = (planner.estimate(STUDENT, TEACHER, Layout(n, 1), H200, 32768, 32, 0, planner.PART) for n in (1, 4))
    assert four.tokens_a_second < 4 * one.tokens_a_second  # one teacher is the slower side
    assert four.tokens_a_second == pytest.approx(32768 / four.teacher_seconds)
    small = dataclasses.replace(H200, bytes_=50e9)
    with pytest.raises(OpsdError, match="teacher of 54 GB"):
        planner.estimate(STUDENT, TEACHER, Layout(1, 1), small, 8192, 32, 0, planner.PART)
    with pytest.raises(OpsdError, match="more devices"):
        planner.estimate(STUDENT, TEACHER, Layout(1, 1), dataclasses.replace(H200, bytes_=85e9), 262144, 32, 0, 4096)


@pytest.mark.parametrize("limit", [0, 1024, 5000, 10**9])
def test_largest_context(limit: int) -> None:
    want = min(limit // 1024 * 1024, 262144)
    assert planner.largest(lambda n: n <= limit) == want


def test_share_of_states() -> None:
    # The experiments' own table: contexts and the share of their states that they could use.
    assert [planner.share_of_states(n, None) for n in (8192, 16384, 24576, 131072)] == [0.13, 0.48, 0.82, 1.0]
    assert planner.share_of_states(12288, None) == pytest.approx((0.13 + 0.48) / 2)
    assert planner.share_of_states(10, [5, 10, 11, 400]) == 0.5


def run(*words: str) -> tuple[int, str]:
    args = main.parser().parse_args(["plan", *words])
    assert isinstance(args, argparse.Namespace)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    return command.plan(args, console), console.export_text()


def test_command_picks_a_layout(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("100\n200000\n300000\n400000\n")
    code, text = run("--gpus", "2", "--context", "131072", "--lengths", str(lengths))
    assert code == 0 and "take: student over 1, teacher on 1" in text and "50%" in text and "weights 53.8 GB" in text
    code, text = run("--gpus", "1", "--context", "32768")
    assert code == 0 and "take: both on one device" in text and "weights 72.6 GB" in text


def test_command_says_what_does_not_fit(tmp_path: Path) -> None:
    code, text = run("--gpus", "1", "--context", "32768", "--device", "H100")
    assert code == 1 and "does not fit" in text and "take:" not in text
    (tmp_path / "words").write_text("many\n")
    for name, match in (("words", "whole numbers"), ("absent", "whole numbers")):
        with pytest.raises(OpsdError, match=match):
            run("--gpus", "1", "--context", "8192", "--lengths", str(tmp_path / name))
    (tmp_path / "none").write_text("")
    with pytest.raises(OpsdError, match="is empty"):
        run("--gpus", "1", "--context", "8192", "--lengths", str(tmp_path / "none"))
