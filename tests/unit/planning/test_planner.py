"""The planner against what was measured, its layouts, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from transformers import Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

from verl_opsd.cli import main
from verl_opsd.cli import plan as command
from verl_opsd.errors import OpsdError
from verl_opsd.models.checkpointing import Plan, plan
from verl_opsd.planning import memory, planner
from verl_opsd.planning.planner import Layout
from verl_opsd.planning.shape import ModelShape

STUDENT, TEACHER = command.shape_of("qwen3.5-9b"), command.shape_of("qwen3.5-27b")
H200 = planner.DEVICES["H200"]


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "pair.txt"
#: "  32768 student  2.97  11047  0.61  141.3  143.5 GB predicted, 17 of 32 layers keep their activations; ..."
EARLIER = "earlier code"  # in the note of a row that was not measured again
ROW = re.compile(r"^ *(\d+) (student|teacher|pair, side by side) +([\d.]+) +\d+ +[\d.]+ +([\d.]+)  (.*)$", re.MULTILINE)


def measured() -> list[tuple[int, str, float, float, str]]:
    """Context, side, seconds, peak in GB and note of every measured row of this project's own models in bf16. A row with two processes
    gives two."""
    rows = []
    for context, side, seconds, peak, note in ROW.findall(RESULTS.read_text()):
        alone = re.search(r"teacher alone ([\d.]+) s, peak ([\d.]+) GB", note)
        if alone:
            rows.append((int(context), "student of two", float(seconds), float(peak), note))
            rows.append((int(context), "teacher of two", float(alone[1]), float(alone[2]), note))
        else:
            rows.append((int(context), side, float(seconds), float(peak), note))
    return rows


ROWS = measured()


def test_every_row_of_the_benchmark_is_looked_at() -> None:
    contexts = [16384, 32768, 65536, 131072]
    two = {(f"{side} of two", n) for side in ("student", "teacher") for n in (32768, 131072)}
    assert {(side, n) for n, side, *_ in ROWS} == {(side, n) for side in ("student", "teacher") for n in contexts} | two
    today = [(side, n) for n, side, *_, note in ROWS if EARLIER not in note]
    assert sorted(today) == [("student", n) for n in (32768, 32768, 65536, 131072)] + [
        ("teacher", n) for n in (32768, 32768, 65536)
    ]


@pytest.mark.parametrize(("context", "side", "seconds", "peak", "note"), ROWS, ids=[f"{r[1]}-{r[0]}" for r in ROWS])
def test_predictions_are_near_what_an_h200_measured(context: int, side: str, seconds: float, peak: float, note: str) -> None:
    """Peaks within 10%, times within 20%, from the shapes, the number of kept layers, and nothing else of the run. On one device both
    models are there; the teacher's view is 1,000 tokens longer, and a student beside a teacher's process holds the teacher's vocabulary."""
    student, teacher = memory.student_bytes(STUDENT, 32), memory.teacher_bytes(TEACHER)
    if side.startswith("teacher"):
        found = teacher + memory.score_bytes(TEACHER, context + 1000, memory.PART) + (student if side == "teacher" else 0)
        time = planner.forward_seconds(TEACHER, H200, context + 1000, TEACHER.kinds)
    else:
        kept = re.search(r"(\d+) of 32 layers keep", note)
        assert kept is not None
        chosen = plan(STUDENT, context, int(kept[1]), "on the host" in note)
        beside = teacher if side == "student" else 2 * 248320 * 5120
        found = student + beside + memory.step_bytes(STUDENT, context, chosen)
        if EARLIER in note:
            # A kept layer also kept what its backward now makes again; the last one is at work at the peak.
            found += context * sum(
                STUDENT.remade_bytes(k) for k, keep in zip(STUDENT.kinds[:-1], chosen.keep, strict=False) if keep
            )
        time = planner.step_seconds(STUDENT, H200, context, chosen)
    assert found / 1e9 == pytest.approx(peak, rel=0.1)
    assert time == pytest.approx(seconds, rel=0.2)


def test_an_fp8_teacher_takes_a_byte_a_weight() -> None:
    """The row "teacher, FP8" at 32,768: 53.8 GB with the student beside it."""
    teacher = memory.teacher_bytes(TEACHER, fp8=True) + memory.score_bytes(TEACHER, 33768, memory.PART)
    assert (memory.student_bytes(STUDENT, 32) + teacher) / 1e9 == pytest.approx(53.8, rel=0.1)


#: The experiments' own table: devices of student and teacher, largest context, the teacher's peak in GB (None: not told apart).
SHARDING = ((Layout(1, 0), 8192, None), (Layout(2, 1), 16384, 57.0), (Layout(3, 1), 24576, 59.0))


def test_verdicts_of_the_experiments_sharding_table() -> None:
    """What ran there fits here, in the same layouts and on devices that hold its largest peak (108 GB); more devices hold longer contexts,
    and the teacher's device, the only one whose content is the same here, has the peak that was measured."""
    device = dataclasses.replace(H200, bytes_=116e9)
    largest = []
    for layout, context, peak in SHARDING:
        found = planner.estimate(STUDENT, TEACHER, layout, device, context, 32, 0, memory.PART)
        if peak is not None:
            assert sum(found.teacher_bytes.values()) / 1e9 == pytest.approx(peak, rel=0.1)

        def fits(n: int, layout: Layout = layout) -> bool:
            try:
                planner.estimate(STUDENT, TEACHER, layout, device, n, 32, 0, memory.PART)
            except OpsdError:
                return False
            return True

        largest.append(planner.largest(fits))
        assert largest[-1] >= context
    assert largest[0] < largest[1] <= largest[2]


def test_more_kept_layers_are_faster_and_larger() -> None:
    few, many = plan(STUDENT, 32768, 4), plan(STUDENT, 32768, 20)
    assert planner.step_seconds(STUDENT, H200, 32768, many) < planner.step_seconds(STUDENT, H200, 32768, few)
    assert memory.step_bytes(STUDENT, 32768, many) > memory.step_bytes(STUDENT, 32768, few)


def test_layouts() -> None:
    assert planner.layouts(1) == [Layout(1, 0)]
    assert planner.layouts(2) == [Layout(1, 1)]
    assert planner.layouts(5) == [Layout(4, 1), Layout(3, 2), Layout(2, 3), Layout(1, 4)]
    assert Layout(2, 6).copies() == [Layout(2, 6, n) for n in (1, 2, 3, 6)] and Layout(1, 0).copies() == [Layout(1, 0)]
    with pytest.raises(OpsdError, match="0 devices"):
        planner.layouts(0)


def test_parts_of_a_pass_are_as_few_as_fit_and_of_one_size() -> None:
    # 33,768 = 16,896 + 16,872; 33,024 is 129 tiles: 65 and 64 of them; 66,536 = 3 * 16,640 + 16,616; 18,433 = 9,472 + 8,961.
    for tokens, size in (
        (33768, 16896),
        (33024, 16640),
        (66536, 16640),
        (18433, 9472),
        (18432, 18432),
        (17384, 17408),
        (100, 256),
    ):
        assert memory.part_tokens(tokens) == size
    assert [memory.part_tokens(n, 100) for n in (1, 100, 101, 250)] == [
        100
    ] * 4  # below a tile parts are as large as they may be
    for tokens in range(1, 400000, 1111):
        size = memory.part_tokens(tokens)
        parts = math.ceil(tokens / size)
        assert size <= memory.PART and parts == math.ceil(
            tokens / memory.PART
        )  # never more than the planner counts, and no part more
        assert (
            parts == 1 or tokens - (parts - 1) * size > memory.PART / 4
        )  # 18,432 / 2 at least, less what the others are rounded up


def test_the_target_layout_holds_every_state_on_two_h200() -> None:
    found = planner.estimate(STUDENT, TEACHER, Layout(1, 1), H200, 131072, 32, 4096, memory.PART)
    room = memory.usable(H200.bytes_)
    assert sum(found.student_bytes.values()) <= room and sum(found.teacher_bytes.values()) <= room
    assert found.tokens_a_second == pytest.approx(131072 / max(found.student_seconds, found.teacher_seconds))


def test_sharding_and_more_teachers() -> None:
    one, four = (planner.estimate(STUDENT, TEACHER, Layout(n, 1), H200, 32768, 32, 0, memory.PART) for n in (1, 4))
    assert four.tokens_a_second < 4 * one.tokens_a_second  # one teacher is the slower side
    assert four.tokens_a_second == pytest.approx(32768 / four.teacher_seconds)
    small = dataclasses.replace(H200, bytes_=50e9)
    with pytest.raises(OpsdError, match="teacher of 54 GB"):
        planner.estimate(STUDENT, TEACHER, Layout(1, 1), small, 8192, 32, 0, memory.PART)
    with pytest.raises(
        OpsdError, match=r"student of 9\.0 B parameters over 1 of H200"
    ):  # 143 GB of masters, gradients and moments
        planner.estimate(STUDENT, TEACHER, Layout(1, 1), dataclasses.replace(H200, bytes_=85e9), 1024, 0, 0, memory.PART)
    with pytest.raises(OpsdError, match="a step on 262144 tokens"):
        planner.estimate(STUDENT, TEACHER, Layout(1, 1), dataclasses.replace(H200, bytes_=76.5e9), 262144, 32, 0, 1024)


#: benchmarks/results/sft.txt: steps of the 9B with every layer checkpointed, adapters on one device, all parameters over two.
SFT = Path(__file__).parents[3] / "benchmarks" / "results" / "sft.txt"
STEPS = [
    (int(context), mode == "full", int(devices), float(seconds), float(peak))
    for mode, devices, rows in re.findall(r"^9b (lora|full), (\d) x .*\n((?:\|.*\n)+)", SFT.read_text(), re.MULTILINE)
    for context, seconds, peak in re.findall(
        r"^\| (\d+) \| engine \| [\d.]+ \| ([\d.]+) \| \d+ \| ([\d.]+) \|", rows, re.MULTILINE
    )
]


def test_every_step_of_a_warm_start_is_looked_at() -> None:
    assert [row[:3] for row in STEPS] == [(32768, False, 1), (65536, False, 1), (32768, True, 2)]


@pytest.mark.parametrize(("context", "full", "devices", "seconds", "peak"), STEPS)
def test_predictions_are_near_the_steps_of_a_warm_start(
    context: int, full: bool, devices: int, seconds: float, peak: float
) -> None:
    none = Plan((False,) * 32)
    found = memory.student_bytes(STUDENT, 0 if full else 32) / devices + planner.gathered_bytes(STUDENT, devices)
    assert (found + memory.step_bytes(STUDENT, context, none)) / 1e9 == pytest.approx(peak, rel=0.1)
    assert planner.step_seconds(STUDENT, H200, context, none, all_weights=full) == pytest.approx(seconds, rel=0.2)


def test_parts_of_an_estimate_by_hand() -> None:
    """The 9B and the 27B at 32,768 tokens on devices of 80 GB, as their configurations have them; bytes."""
    # Of a layer: gated MLP; linear attention's four projections and convolution, or attention's four (queries have gates).
    nine_mlp, nine_linear, nine_full = (
        3 * 4096 * 12288,
        4096 * (8192 + 4096 + 64 + 4096) + 8192 * 4,
        4096 * (8192 + 2048 + 4096),
    )
    nine = 32 * nine_mlp + 24 * nine_linear + 8 * nine_full + 2 * 248320 * 4096
    adapters = 32 * (32 * 3 * (4096 + 12288) + 8 * ((4096 + 8192) + 2 * (4096 + 1024) + (4096 + 4096)))
    big_mlp, big_linear, big_full = (
        3 * 5120 * 17408,
        5120 * (10240 + 6144 + 96 + 6144) + 10240 * 4,
        5120 * (12288 + 2048 + 6144),
    )
    big = 64 * big_mlp + 48 * big_linear + 16 * big_full + 2 * 248320 * 5120
    device = planner.Device("80 GB", 80e9)
    found = planner.estimate(STUDENT, TEACHER, Layout(2, 2, 2), device, 32768, 32, 4096, memory.PART)
    assert found.student_bytes["weights"] == (2 * nine + 16 * adapters) / 2
    assert found.student_bytes["gathered"] == 2 * (2 * (nine_mlp + nine_linear) + 2 * 248320 * 4096)
    assert found.student_bytes["teacher's vocabulary"] == 2 * 248320 * 5120
    assert found.teacher_bytes["teacher's weights"] == 2 * big / 2
    assert found.teacher_bytes["teacher's gathered"] == 2 * (2 * (big_mlp + big_linear) + 2 * 248320 * 5120)
    # A copy over two devices scores whole: of a token in a linear layer two hidden states, their sum and norm, what goes into the convolution
    # and out of it, five times the values' width, and a state a chunk of 64.
    token = 2 * (4 * 5120 + 2 * 10240 + 5 * 6144 + 48 * 128 * 128 // 64)
    assert found.teacher_bytes["at work"] == 36864 * token
    whole = planner.estimate(STUDENT, TEACHER, Layout(2, 2), device, 32768, 32, 4096, memory.PART)
    # A copy on one device: parts of 18,432; carried are keys and values of 4 heads of 256 in 16 layers, of one of them twice.
    assert whole.teacher_bytes["at work"] == 18432 * token + 36864 * 2 * 2 * 1024 * 17
    every = planner.estimate(STUDENT, TEACHER, Layout(4, 4), device, 32768, 0, 4096, memory.PART)
    assert every.student_bytes["weights"] == 16 * nine / 4
    for e in (found, whole, every):
        assert sum(e.student_bytes.values()) <= memory.usable(80e9) and sum(e.teacher_bytes.values()) <= memory.usable(80e9)


SMALL = ModelShape.of(
    Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, vocab_size=150000, tie_word_embeddings=True)
)
HYBRID = dataclasses.replace(STUDENT, kinds=STUDENT.kinds[:8], tied=True)


def longest(student: ModelShape, teacher: ModelShape, layout: Layout, gb: float, rank: int = 32) -> int:
    def fits(context: int) -> bool:
        device = planner.Device("some", gb * 1e9)
        try:
            planner.fewest_ranks(
                layout, lambda one: planner.estimate(student, teacher, one, device, context, rank, 0, memory.PART)
            )
        except OpsdError:
            return False
        return True

    return planner.largest(fits)


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize(("student", "teacher"), [(HYBRID, HYBRID), (SMALL, HYBRID), (HYBRID, SMALL), (SMALL, SMALL)])
def test_more_devices_and_larger_ones_hold_as_long_contexts(student: ModelShape, teacher: ModelShape, rank: int) -> None:
    sizes = (8, 12, 24, 40)
    found = {
        gb: [max(longest(student, teacher, a, gb, rank) for a in planner.layouts(n)) for n in (1, 2, 4, 8)] for gb in sizes
    }
    for gb in sizes:
        assert found[gb] == sorted(found[gb])
    for smaller, larger in itertools.pairwise(sizes):
        assert all(a <= b for a, b in zip(found[smaller], found[larger], strict=True))


@pytest.mark.parametrize("shape", [STUDENT, TEACHER, SMALL])
def test_a_longer_context_takes_more(shape: ModelShape) -> None:
    contexts = range(1, 100000, 3333)
    for kept in (0, 3, len(shape.kinds)):
        for away in (False, True):
            sizes = [memory.step_bytes(shape, n, plan(shape, n, kept, away)) for n in contexts]
            assert sizes == sorted(sizes)
    for ranks, forked in ((1, False), (1, True), (2, False)):
        sizes = [memory.score_bytes(shape, n, memory.at_once(shape, n, ranks), forked) for n in contexts]
        assert sizes == sorted(sizes)


def test_a_student_that_is_its_own_teacher() -> None:
    """All devices are its own; of a step and of a pass over the whole view the larger one counts, and there is nothing of a teacher's."""
    assert planner.layouts(8, own=True) == [Layout(8, 0)] and str(Layout(8, 0)) == "student over 8, its own teacher"
    found = planner.estimate(STUDENT, None, Layout(8, 0), H200, 65536, 32, 4096, memory.PART)
    assert set(found.student_bytes) == {
        "weights",
        "gathered",
        "teacher's vocabulary",
        "rollout server asleep",
        "a step or pass",
    }
    assert found.student_bytes["teacher's vocabulary"] == 0 and found.teacher_bytes == {}
    assert found.tokens_a_second == pytest.approx(8 * 65536 / (found.student_seconds + found.teacher_seconds))
    # A view that is all brief: the pass is the larger one. Of a token in a linear layer as above, in the 9B's widths.
    tiny = planner.estimate(STUDENT, None, Layout(8, 0), H200, 1024, 32, 200000, memory.PART)
    token = 2 * (4 * 4096 + 2 * (2 * 2048 + 4096) + 5 * 4096 + 32 * 128 * 128 // 64)
    assert tiny.student_bytes["a step or pass"] == 201024 * token
    code, text = run("--gpus", "8", "--context", "65536", "--teacher", "self")
    assert code == 0 and "take: student over 8, its own teacher" in text
    code, text = run("--gpus", "1", "--context", "32768")
    assert code == 0 and "the recipe gives a device teacher devices of its own" in text


def test_a_large_teacher_gets_more_devices_than_the_student() -> None:
    """The student's step is the shorter one when it is small: then most devices score."""
    found = [planner.estimate(SMALL, TEACHER, a, H200, 32768, 32, 0, memory.PART) for a in planner.layouts(4)]
    assert planner.best(found).layout == Layout(1, 3)


def test_a_teacher_over_two_devices_where_one_does_not_hold_it() -> None:
    forty = planner.Device("40 GB", 40e9)

    def at(layout: Layout) -> planner.Estimate:
        return planner.estimate(STUDENT, TEACHER, layout, forty, 8192, 32, 0, memory.PART)

    found = planner.fewest_ranks(Layout(2, 2), at)
    assert found.layout == Layout(2, 2, 2) and str(found.layout) == "student over 2, teacher on 2 (ranks=2)"
    with pytest.raises(OpsdError, match=r"its device holds 37\.3 GB and would take"):
        planner.fewest_ranks(Layout(3, 1), at)


@pytest.mark.parametrize("limit", [0, 1024, 5000, 10**9])
def test_largest_context(limit: int) -> None:
    want = min(limit // 1024 * 1024, 262144)
    assert planner.largest(lambda n: n <= limit) == want


def test_share_of_states() -> None:
    # "Median prompt 16,750", says the text beside the experiments' table, which gives shares at three other contexts only.
    assert planner.share_of_states(16750, None) == pytest.approx(0.5, abs=0.01)
    shares = [planner.share_of_states(n, None) for n in (0, 8192, 16384, 24576, 65536, 131072)]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
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
    assert (
        code == 0 and "take: both on one device" in text and "weights 18.8 GB" in text and "teacher's weights 53.8 GB" in text
    )


def test_command_plans_for_what_it_is_given() -> None:
    code, text = run("--gpus", "4", "--context", "8192", "--device-gb", "40")
    assert code == 0 and "take: student over 2, teacher on 2 (ranks=2)" in text
    code, text = run("--gpus", "1", "--context", "8192", "--lora-rank", "0", "--teacher", "qwen3.5-9b")
    assert (
        code == 1 and "a device of" not in text and "would take" in text
    )  # 143 GB of float32 masters and moments, and a teacher
    code, text = run("--gpus", "8", "--context", "8192", "--lora-rank", "0", "--teacher", "qwen3.5-9b")
    assert code == 0 and "take:" in text
    assert "258048" in text  # the teacher's view has 4,096 tokens more, and both are made for 262,144


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--context", "0"), "--context 0"),
        (("--context", "-5"), "--context -5"),
        (("--gpus", "0"), "--gpus 0"),
        (("--brief", "-1"), "--brief -1"),
        (("--lora-rank", "-1"), "--lora-rank -1"),
        (("--device-gb", "0"), "--device-gb 0"),
        (("--device-gb", "nan"), "--device-gb nan"),
        (("--device", "A100"), "use H200, H100"),
        (("--context", "262145"), "a student of 262144 positions"),
        (("--context", "262144"), "266240 tokens for a teacher of 262144 positions"),
    ],
)
def test_numbers_that_no_run_has_are_refused(words: tuple[str, ...], match: str) -> None:
    with pytest.raises(OpsdError, match=match):
        run("--gpus", "2", "--context", "8192", *words)  # the last of a flag counts


def test_models_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(OpsdError, match="a qwen3_moe model with num_experts"):
        command.shape_of(str(tmp_path))
    Gemma3TextConfig(num_hidden_layers=6).save_pretrained(tmp_path)
    assert command.shape_of(str(tmp_path)).kinds == ("full_attention",) * 6  # five of them see a window


def test_plain_decoders_run_on_transformers_layers(tmp_path: Path) -> None:
    Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    assert not command.shape_of(str(tmp_path)).fused and STUDENT.fused


def test_command_says_what_does_not_fit(tmp_path: Path) -> None:
    code, text = run("--gpus", "1", "--context", "65536", "--device", "H100")
    assert code == 1 and "does not fit" in text and "take:" not in text
    (tmp_path / "words").write_text("many\n")
    for name, match in (("words", "whole numbers"), ("absent", "whole numbers")):
        with pytest.raises(OpsdError, match=match):
            run("--gpus", "1", "--context", "8192", "--lengths", str(tmp_path / name))
    (tmp_path / "negative").write_text("10\n-4\n")
    with pytest.raises(OpsdError, match="at least one token"):
        run("--gpus", "1", "--context", "8192", "--lengths", str(tmp_path / "negative"))
    (tmp_path / "none").write_text("")
    with pytest.raises(OpsdError, match="is empty"):
        run("--gpus", "1", "--context", "8192", "--lengths", str(tmp_path / "none"))


@pytest.mark.parametrize("side", ["--student", "--teacher"])
def test_models_that_are_not_there_are_refused(side, tmp_path, capsys):
    for name in ("/nope", str(tmp_path), "no-such-size"):
        assert main.main(["plan", "--gpus", "8", "--context", "32768", side, name]) == 2
        assert f"error: {side}={name} holds no config.json" in capsys.readouterr().err
