"""The worth-distilling gate: fed the matrix on record it refuses what was distilled in vain."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
from statsmodels.stats.proportion import confint_proportions_2indep

from verl_opsd.cli.main import main
from verl_opsd.errors import OpsdError
from verl_opsd.teachers.worth import Count, TaskOutcome, difference, headroom, headroom_of, noise_of, parse, worth

TABLE = Path(__file__).parent / "seeds_matrix.json"
VALUES = json.loads(TABLE.read_text())


def failed(context: str, values: dict = VALUES) -> list[int]:
    """Numbers of the conditions that fail, in the gate's order."""
    return [i for i, c in enumerate(worth(parse(values), context)) if not c.passed]


@pytest.mark.parametrize(
    ("context", "expected"),
    [("gold_patch", [3]), ("workflow", [2, 3]), ("shared_backlog", [0, 1, 2]), ("menu_measured", [0, 1, 2])],
)
def test_all_teachers_on_record_are_refused(context, expected):
    assert failed(context) == expected


def test_a_teacher_that_is_worth_it_passes_and_each_condition_alone_refuses():
    good = {
        "cells": [
            {"context": "none", "model": "student", "pairs": [2, 10]},
            {"context": "none", "model": "teacher", "pairs": [4, 10]},
            {"context": "x", "model": "student", "pairs": [3, 10]},
            {"context": "x", "model": "teacher", "pairs": [7, 10]},
        ],
        "answer_free": {"x": True},
    }
    assert failed("x", good) == []
    for cell, pairs, expected in (
        (3, [6, 10], [0]),  # two pairs are noise
        (1, [5, 10], [0]),
        (0, [5, 10], [1, 2]),
        (2, [2, 10], [2]),
    ):
        changed = copy.deepcopy(good)
        changed["cells"][cell]["pairs"] = pairs
        assert failed("x", changed) == expected, (cell, pairs)
    assert failed("x", {**good, "answer_free": {}}) == failed("x", {**good, "answer_free": {"x": False}}) == [3]
    for missing, expected in ((0, [1, 2]), (1, [0]), (2, [2]), (3, [0, 1])):
        cells = [c for i, c in enumerate(good["cells"]) if i != missing]
        assert failed("x", {**good, "cells": cells}) == expected  # what was not measured fails


def test_intervals():
    assert [round(x, 3) for x in Count(5, 10).interval] == [0.237, 0.763]  # the 24% to 76% on record
    for a, b in ((Count(9, 10), Count(4, 10)), (Count(56, 70), Count(48, 80)), (Count(0, 10), Count(10, 10))):
        d, low, high = difference(a, b)
        want = confint_proportions_2indep(a.passed, a.total, b.passed, b.total, method="newcomb", compare="diff")
        assert d == a.rate - b.rate and (low, high) == pytest.approx(want, abs=1e-9)
    # Newcombe 1998, table II (a), method 10: 56/70 - 48/80 is 0.0524 to 0.3339
    assert difference(Count(56, 70), Count(48, 80))[1:] == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_headroom_of_the_tasks_on_record():
    found = headroom(parse(VALUES).tasks)
    assert list(found.values()) == [2, 3, 1, 3, 1, 0]


def test_headroom_covers_every_outcome_once():
    for base in range(3):
        for student in range(3):
            for teacher in range(3):
                name = headroom_of(TaskOutcome("t", "c", base, student, teacher))
                assert (name == "harmed by the brief") == (student < base)
                assert (name == "unlocked by context") == (base < 2 == student)
                assert (name == "already solved") == (base == student == 2)
                assert (name == "partial") == (base == 0 and student == 1)
                assert (name == "capability") == (base == student < min(2, teacher))


def test_noise():
    assert noise_of([Count(1, 10), Count(3, 10), Count(2, 10)]) == pytest.approx(0.2)
    with pytest.raises(OpsdError, match="two or more"):
        noise_of([Count(1, 10)])
    without = {k: v for k, v in VALUES.items() if k != "noise"}
    assert parse({**without, "reruns": [[0, 10], [3, 10], [1, 9]]}).noise == pytest.approx(0.3)
    assert noise_of([Count(2, 10), Count(2, 10)]) == 0.2  # equal by chance: two pairs all the same
    assert noise_of([Count(20, 100), Count(21, 100)]) == 0.02
    assert parse(without).noise == 0.2
    with pytest.raises(OpsdError, match="exclude"):
        parse({**VALUES, "reruns": [[0, 10], [1, 10]]})


@pytest.mark.parametrize(
    "change",
    [
        {"cells": [{"context": "none", "model": "student", "pairs": [3, 2]}]},
        {"cells": [{"context": "none", "model": "student", "pairs": [0, 0]}]},
        {"cells": [{"context": "none", "model": "judge", "pairs": [1, 2]}]},
        {"cells": [VALUES["cells"][0]] * 2},
        {"cells": [{"context": "none", "model": "student"}]},
        {"cells": [{"context": "none", "model": "student", "pairs": [1, 2], "pears": 1}]},
        {"answer_free": {"x": "yes"}},
        {"noise": math.inf},
        {"noise": math.nan},
        {"noise": "0.2"},
        {"noise": None},
        {"answer_free": ["x"]},
        {"cells": "all"},
        {"tasks": 3},
        {"tasks": [{"task": "t", "context": "c", "base": "1", "student": 0, "teacher": 0}]},
        {"reruns": [[1, 10]], "noise": 0.2},
        {"noise": -0.1},
        {"tasks": [{"task": "t", "context": "c", "base": 3, "student": 0, "teacher": 0}]},
        {"tasks": [{"task": "t"}]},
        {"cells": [{"context": "none", "model": "student", "pairs": [True, 2]}]},
        {"cells": [{"context": None, "model": "student", "pairs": [1, 2]}]},
        {"cells": [{"context": "none", "model": "student", "pairs": [1, 2], "invalidated": "why"}]},
        {"tasks": [VALUES["tasks"][0] | {"base": True}]},
        {"tasks": [VALUES["tasks"][0]] * 2},
        {"tasks": [VALUES["tasks"][0], VALUES["tasks"][0] | {"base": 0, "student": 2}]},
        {"tasks": [VALUES["tasks"][0] | {"context": "gold-patch"}]},
        {"noises": 0.1},
    ],
)
def test_tables_that_cannot_be_are_refused(change):
    with pytest.raises(OpsdError):
        parse({**VALUES, **change})


@pytest.mark.parametrize(
    ("passed", "total", "noise", "enough"),
    [
        *(
            (1, 1, 0.2, False),
            (2, 2, 0.0, False),
            (2, 3, 0.2, False),
            (3, 3, 0.2, True),
            (2, 10, 0.0, False),
            (3, 10, 0.0, True),
        ),
        *((20, 100, 0.2, False), (21, 100, 0.2, True), (3, 100, 0.0, True)),
    ],
)
def test_a_gain_of_two_pairs_or_fewer_is_noise_however_few_were_run(passed, total, noise, enough):
    """One of one against none of one is a difference of 1.0, and says nothing."""
    cells = [
        {"context": c, "model": m, "pairs": [passed if c == "x" else 0, total]}
        for c in ("none", "x")
        for m in ("student", "teacher")
    ]
    found = worth(parse({"cells": cells, "answer_free": {"x": True}, "noise": noise}), "x")
    assert [c.passed for c in found] == [enough, enough, True, True]


def test_contexts_that_were_not_measured_are_refused():
    for context in ("none", "unheard_of"):
        with pytest.raises(OpsdError, match="measure it first"):
            worth(parse(VALUES), context)


def test_command(capsys, tmp_path):
    assert main(["teacher-matrix", str(TABLE)]) == 0
    out = capsys.readouterr().out
    assert out.count("refused") == 4 and "worth distilling" not in out
    assert "2 already solved, 3 unlocked by context, 1 partial, 3 capability, 1 harmed by the brief" in out
    for context in ("gold_patch", "workflow", "shared_backlog", "menu_measured"):
        assert main(["teacher-matrix", str(TABLE), "--gate", context]) == 1
    assert main(["teacher-matrix", str(TABLE), "--gate", "none"]) == 2
    argv = ["teacher-matrix", str(TABLE), "--gate", "gold_patch", "--run", str(tmp_path)]
    assert main([*argv, "--override", "because"]) == 2
    assert main([*argv, "--override", "an upper bound is wanted"]) == 0
    (line,) = map(json.loads, (tmp_path / "evidence.jsonl").read_text().splitlines())
    assert (line["gate"], line["verdict"], line["value"], line["threshold"]) == ("worth_distilling", "fail", 3, 4)
    assert "overridden: an upper bound is wanted" in line["detail"]
    assert main(["teacher-matrix", str(TABLE), "--override", "an upper bound is wanted"]) == 2
    broken = tmp_path / "broken.json"
    for cells in ([], [{"context": "none", "model": "student", "pairs": [0, 0]}]):
        broken.write_text(json.dumps({"cells": cells}))
        assert main(["teacher-matrix", str(broken)]) == 2 and "error: " in capsys.readouterr().err
    broken.write_text("[]")
    assert main(["teacher-matrix", str(broken)]) == 2
