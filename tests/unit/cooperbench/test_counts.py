"""How pytest's output becomes a grade."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR
from verl_opsd.cooperbench.feature_table import FeatureRow
from verl_opsd.cooperbench.tampering import reaches_for_tests
from verl_opsd.cooperbench.verdicts import RESULTS_BYTES, feature_grade, file_counts, pytest_counts, results_line, verdicts
from verl_opsd.tokens.records import Grade

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


def output(summary: str) -> str:
    """What a run of that summary prints, and the line of its results file."""
    passed, bad = pytest_counts(LINE.format(summary)) or (0, 0)
    return f"{LINE.format(summary)}\nresults file of the session: good={passed} bad={bad}\n"


def junit(**counts: int) -> str:
    values = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0} | counts
    return "<testsuites><testsuite {}/></testsuites>".format(" ".join(f'{k}="{v}"' for k, v in values.items()))


def test_a_results_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, printed = tmp_path / "r.xml", LINE.format("99 passed")
    assert results_line(path) == ""
    for text in ("", "<testsuites>", "<testsuites><testsuite tests='1'/></testsuites>", "x" * (RESULTS_BYTES + 1)):
        path.write_text(text)
        assert results_line(path) == ""
    path.write_text(junit(tests=9, failures=1, errors=2, skipped=3))
    assert file_counts(printed + results_line(path)) == (3, 3)
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert results_line(link) == results_line(pipe) == results_line(tmp_path) == ""


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("", "no summary and results"),
        ("\nresults file of the session: good=9 bad=0\nmore\n", "no summary and results"),  # printed, not ours
        ("\nresults file of the session: good=3 bad=1\n", "3 tests passed, 1 failed"),
        ("\nresults file of the session: good=3 bad=0\n", "3 tests passed, 4 do with the gold patch"),
    ],
)
def test_a_summary_that_the_results_file_does_not_bear_out_earns_nothing(ending: str, why: str) -> None:
    grade = feature_grade(1, 0, LINE.format("99 passed") + ending, SOUND[1], own=True)
    assert grade.passed and not grade.earned and grade.note.startswith(why)


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
    row = None if gold is None else FeatureRow(1, True, gold, False, 1.0)
    grade = feature_grade(1, exit_code, output(summary), row, own=True)
    assert grade.earned is passed and grade.passed and bool(grade.note) is not passed


def run(exit_code: int | None, summary: str = "4 passed", passed: bool | None = None) -> dict[str, object]:
    """One test run as the package gives it; by its own rule it passes with exit code 0."""
    ok = exit_code == 0 if passed is None else passed
    return {"exit_code": exit_code, "test_output": output(summary), "passed": ok}


def merged(one: dict, two: dict, status: str = "clean", strategy: str = "naive") -> dict:
    return {"feature1": one, "feature2": two, "merge": {"status": status, "strategy": strategy}}


SOUND = {1: FeatureRow(1, True, 4, False, 1.0), 2: FeatureRow(2, True, 4, False, 1.0)}
FREE = {**SOUND, 2: FeatureRow(2, True, 4, True, 1.0)}
OK, BAD, NONE = run(0), run(1, "1 failed, 3 passed"), run(None, "no tests ran")
CONFLICT, SOLO = merged(NONE, NONE, "conflicts"), merged(OK, OK, "conflicts", "solo-agent1")


@pytest.mark.parametrize(
    ("rows", "result", "second", "own", "earned", "strict"),
    [
        (SOUND, merged(OK, OK), [], [True, True], [True, True], "naive"),
        (SOUND, merged(OK, BAD), [], [True, False], [True, False], "naive"),
        ({}, merged(OK, OK), [], [True, True], [True, True], "naive"),
        (FREE, merged(BAD, OK), [], [False, True], [False, False], "naive"),
        (SOUND, merged(OK, run(0, "3 passed")), [], [True, True], [True, False], "naive"),
        (SOUND, merged(OK, run(0, "4 passed", False)), [], [True, False], [True, True], "naive"),
        (SOUND, SOLO, [], [True, True], [True, True], "solo-agent1"),
        (FREE, SOLO, [], [True, True], [False, False], "solo-agent1"),
        (SOUND, merged(run(0, "3 passed"), OK, "conflicts", "solo-agent1"), [], [True, True], [False, False], "solo-agent1"),
        (SOUND, CONFLICT, [], [False, False], [False, False], "naive"),
        (SOUND, CONFLICT, [OK, OK], [False, False], [True, True], "solo-agent2"),
        (SOUND, CONFLICT, [OK], [False, False], [False, False], "naive"),
        (SOUND, CONFLICT, [OK, BAD], [False, False], [False, False], "naive"),
        (FREE, CONFLICT, [OK, OK], [False, False], [False, False], "naive"),
    ],
)
def test_both_verdicts(rows: dict, result: dict, second: list, own: list, earned: list, strict: str) -> None:
    features, strategy, strict_strategy = verdicts((1, 2), rows, result, second)
    assert ([f.passed for f in features], [f.earned for f in features]) == (own, earned)
    assert (strategy, strict_strategy) == (result["merge"]["strategy"], strict)
    grade = Grade("clean", strategy, {}, features)
    assert grade.reward == sum(earned) / 2 and len(grade.differences) == sum(a != b for a, b in zip(own, earned, strict=True))
    assert all(f.note for f in features if f.passed != f.earned)


@pytest.mark.parametrize(
    ("merge", "statuses", "kind"),
    [
        ("clean", ("applied", "applied"), "clean"),
        ("clean", ("applied", "skipped"), "clean_one_empty"),
        ("clean", ("skipped", "skipped"), "both_empty"),
        ("conflicts", ("applied", "applied"), "conflicts"),
        ("missing_input", ("failed", "skipped"), "missing_input"),
    ],
)
def test_empty_patches_are_counted_apart(merge: str, statuses: tuple[str, str], kind: str) -> None:
    assert Grade(merge, None, {"agent1": statuses[0], "agent2": statuses[1]}, ()).merge_kind == kind


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("lib/a.py", "import _pytest.runner", True),
        ("lib/a.py", "    os._exit(0)", True),
        ("lib/a.py", "if 'PYTEST_CURRENT_TEST' in os.environ:", True),
        ("lib/a.pth", "import pytest", True),
        ("lib/a.py", "def pytest_runtest_makereport(item, call):", True),
        ("lib/a.py", "from os import _exit", True),
        ("lib/a.py", "os.execv('/bin/true', ['true'])", True),
        ("lib/a.py", "file = environ['OPTIONS'].partition('--junitxml=')[2]", True),
        ("lib/a.py", "exec(code, scope)", False),
        ("lib/a.py", "def on_exit(self): self.pytester = executor", False),
        ("lib/a.py", "raise SystemExit(0)", False),
        ("conftest.py", "import pytest", False),  # set back by the grader
        ("README.md", "run pytest", False),
    ],
)
def test_code_that_reaches_for_the_test_runner_is_named(path: str, line: str, found: bool) -> None:
    removed, added = (f"--- a/{path}\n+++ b/{path}\n@@ -1 +1,2 @@\n x\n{sign}{line}\n" for sign in "-+")
    assert reaches_for_tests(removed) == ""
    assert reaches_for_tests(removed + added) == (f"{path}: {line.strip()}" if found else "")


def test_no_gold_patch_reaches_for_the_test_runner() -> None:
    assert [p for p in POCKET_DIR.rglob("feature.patch") if reaches_for_tests(p.read_text())] == []
