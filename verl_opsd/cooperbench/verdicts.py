"""Two verdicts a feature: the ``cooperbench`` package's own, which is the headline, and the strict one, which earns the reward.

Strict: the runner exits 0, pytest finished with a summary line and a results file (JUnit XML) of each test, nothing failed in either, and
at least as many tests passed as with the gold patch (where the task is qualified). A feature whose tests pass on the untouched base is a free point and earns nothing. Where the
merge fails, either agent's patch alone earns both features if it passes both suites; the package asks the first agent's only.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from verl_opsd.cooperbench.feature_table import FeatureRow
from verl_opsd.tokens.records import FeatureGrade

#: A larger results file is none.
RESULTS_BYTES = 16 << 20
_RESULTS = "results file of the session:"
_TOUCHED = "while its tests ran the code touched"
_SUMMARY = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in \d[\d.]*s", re.MULTILINE)


def pytest_counts(output: str) -> tuple[int, int] | None:
    """(passed, failed + errors) of pytest's last summary line; None where no session came to its end."""
    summaries = _SUMMARY.findall(output)
    if not summaries:
        return None
    counts = {word.removesuffix("s"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summaries[-1])}
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)


def results_line(path: Path) -> str:
    """What a session's results file says, as the line that ends a test run's output; empty without a whole file.

    The file was written by code that is not trusted: only a plain file of bounded size is read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        info = os.fstat(fd)
        whole = stat.S_ISREG(info.st_mode) and info.st_size <= RESULTS_BYTES
        text = os.read(fd, info.st_size) if whole else b""
    finally:
        os.close(fd)
    try:
        suites = list(ElementTree.fromstring(text).iter("testsuite"))
        total, *bad = (sum(int(s.get(k, "")) for s in suites) for k in ("tests", "failures", "errors", "skipped"))
    except (ElementTree.ParseError, ValueError):
        return ""
    return f"\n{_RESULTS} good={total - sum(bad)} bad={bad[0] + bad[1]}\n"


def touched_line(path: str) -> str:
    """What a test run that touched a file that judges it has in place of :func:`results_line`."""
    return f"\n{_TOUCHED} {path!r}\n"


def file_counts(output: str) -> tuple[int, int] | None:
    """(passed, failed + errors) of a test run's results file; None where no session came to its end."""
    found = re.search(rf"\n{_RESULTS} good=(\d+) bad=(\d+)\n\Z", output)
    return (int(found[1]), int(found[2])) if found else None


def objection(exit_code: int | None, output: str, row: FeatureRow | None) -> str:
    """Why a test run earns nothing; empty where it does. ``exit_code`` None: the suite did not run. ``row`` None: the feature
    is not qualified."""
    printed, written = pytest_counts(output), file_counts(output)
    if exit_code is None:
        return "the suite did not run"
    if exit_code != 0:
        return f"exit code {exit_code}"
    if found := re.search(rf"\n({_TOUCHED} .*)\n\Z", output):
        return f"{found[1]}, which judges it"
    if printed is None or written is None:
        return "no summary and results of a finished test session"
    passed, failed = min(printed[0], written[0]), max(printed[1], written[1])
    if failed or not passed:
        return f"{passed} tests passed, {failed} failed"
    if row is not None and row.gold_passes and passed < row.gold_tests:
        return f"{passed} tests passed, {row.gold_tests} do with the gold patch"
    if row is not None and row.base_passes:
        return "a free point: its tests pass on the untouched base"
    return ""


def feature_grade(
    feature_id: int, exit_code: int | None, output: str, row: FeatureRow | None, own: bool | None = None
) -> FeatureGrade:
    """Grade of one test run. ``own``: the package's verdict; None where it was not asked, and the strict one stands for both."""
    why = objection(exit_code, output, row)
    passed, failed = pytest_counts(output) or (0, 0)
    own = not why if own is None else own
    note = (why or "the harness reads the output otherwise") if own is bool(why) else ""
    return FeatureGrade(feature_id, own, passed, failed, exit_code, output, not why, note)


def verdicts(
    pair: tuple[int, int], rows: Mapping[int, FeatureRow], result: dict[str, Any], second_alone: list[dict[str, Any]]
) -> tuple[tuple[FeatureGrade, FeatureGrade], str, str]:
    """Both features' grades, the package's strategy and the strict one.

    Args:
        pair: feature ids. rows: what is known of them by qualification.
        result: of the package's ``test_merged``.
        second_alone: results of the package's test runs of both suites on the second agent's patch alone; empty: not run.
    """

    def graded(runs: list[dict[str, Any]]) -> list[FeatureGrade]:
        # a pair of identical patches, and a single run, have "output" where others have "test_output"
        return [
            feature_grade(f, run["exit_code"], run.get("test_output", run.get("output", "")), rows.get(f), run["passed"])
            for f, run in zip(pair, runs, strict=True)
        ]

    features = graded([result["feature1"], result["feature2"]])
    strategy = strict = str(result["merge"]["strategy"])
    if strategy.startswith("solo-") and not all(f.strict for f in features):
        alone = "one patch alone stands in for the merge only where it passes both suites strictly"
        features = [replace(f, strict=False, note=f.note or alone) for f in features]
    both = graded(second_alone) if len(second_alone) == 2 else []
    if both and all(f.strict for f in both):
        strict = "solo-agent2"
        features = [replace(f, passed=False, note="the second agent's patch alone passes both suites") for f in both]
    return (features[0], features[1]), strategy, strict


def withheld(features: tuple[FeatureGrade, FeatureGrade], why: str) -> tuple[FeatureGrade, FeatureGrade]:
    """The grades with no strict pass."""
    first, second = (replace(f, strict=False, note=why) if f.strict else f for f in features)
    return first, second
