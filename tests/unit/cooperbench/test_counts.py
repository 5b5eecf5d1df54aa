"""How pytest's output becomes a grade."""

from __future__ import annotations

import pytest

from verl_opsd.cooperbench.grading import feature_grade, pytest_counts

LINE = "============================== {} in 0.04s ==============================\n"


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        (LINE.format("4 passed"), (4, 0)),
        (LINE.format("1 failed, 3 passed, 2 skipped"), (3, 1)),
        (LINE.format("1 failed, 2 passed, 1 warning, 2 errors"), (2, 3)),
        (LINE.format("1 error"), (0, 1)),
        (LINE.format("no tests ran"), None),
        ("4 passed in 0.04s\n", (4, 0)),
        ("=== 220 passed in 61.20s (0:01:01) ===\n", (220, 0)),
        ("99 passed\n" + LINE.format("1 failed, 3 passed"), (3, 1)),
        (LINE.format("0 passed") + LINE.format("5 passed"), (5, 0)),
        ("99 passed\n", None),
        ("", None),
    ],
)
def test_counts_are_those_of_the_last_summary_line(output: str, counts: tuple[int, int] | None) -> None:
    assert pytest_counts(output) == counts


@pytest.mark.parametrize(
    ("exit_code", "summary", "gold", "passed"),
    [
        (0, "4 passed", 4, True),
        (0, "5 passed", 4, True),
        (0, "4 passed", None, True),
        (0, "3 passed, 1 skipped", 4, False),
        (1, "4 passed", 4, False),
        (124, "4 passed", None, False),
        (None, "4 passed", None, False),
        (0, "4 passed, 1 failed", 4, False),
        (0, "4 passed, 1 error", 4, False),
        (0, "4 skipped", None, False),
        (0, "no tests ran", None, False),
    ],
)
def test_a_pass_needs_exit_zero_no_failure_and_the_gold_count(
    exit_code: int | None, summary: str, gold: int | None, passed: bool
) -> None:
    assert feature_grade(1, exit_code, LINE.format(summary), gold).passed is passed
