"""Predictions: gates as data, written and hashed before the run, judged fail-closed after it.

    name: anchor
    predictions:
      - metric: eval.action.write          # key of the report's table of numbers
        comparison: ">="                   # >=, >, <= or <
        threshold: 0.10
        denominator: {of: executed commands, at_least: 500}
        baseline: {value: 0.118, of: 4102, source: base 9B}
        against: value                     # or baseline: value - baseline is compared
        works_if: "about 10% or more"      # for people; the comparison decides

A number that the report does not have fails, as does one with another denominator than was written down. Too few of them is
``void`` where infrastructure faults explain all that is missing, and fails otherwise.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import append, lines
from verl_opsd.evidence.graded import EPISODE

#: Names of the lines: a file was written down; one of its predictions was judged (followed by ``file/metric``).
PREDICTED, JUDGED = "predicted", "prediction:"
COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}

Verdict = Literal["pass", "fail", "void"]


@dataclass(frozen=True)
class Number:
    """A number of a report.

    Attributes:
        value: None where it has no denominator.
        n: its denominator; of: what that counts.
        lost: how many of the denominator infrastructure faults took away.
        low, high: ends of its 95% interval, where it has one.
        episodes: ids of the episodes behind it.
    """

    value: float | None
    n: int
    of: str
    lost: int = 0
    low: float | None = None
    high: float | None = None
    episodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """What a prediction starts from. ``of``: its denominator, where it is a share or a mean."""

    value: float
    source: str
    of: int | None = None


@dataclass(frozen=True)
class Prediction:
    """One row; see the module's docstring. ``at_least``: fewest of ``of`` that the number must stand on."""

    metric: str
    comparison: str
    threshold: float
    of: str
    at_least: int
    baseline: Baseline | None = None
    against: Literal["value", "baseline"] = "value"
    works_if: str = ""


@dataclass(frozen=True)
class Judged:
    """A prediction after the run. ``compared``: what was held against the threshold; None where there was nothing."""

    prediction: Prediction
    verdict: Verdict
    number: Number | None
    compared: float | None
    why: str


def read(path: Path) -> tuple[str, tuple[Prediction, ...]]:
    """Name and predictions of a file.

    Raises:
        OpsdError: a key is missing, unknown or of another type; the comparison is none; ``against: baseline`` without one; two
            rows for one metric and comparison.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OpsdError(f"{path}: {error}", "predictions are a YAML file", "see docs/evidence.md") from error
    top = _keys(path, "file", data, {"name", "predictions"}, set())
    if not isinstance(top["predictions"], list) or not top["predictions"]:
        raise OpsdError(f"{path}: predictions={top['predictions']!r}", "a list with one row or more", "write what is expected")
    rows = tuple(_row(path, i, row) for i, row in enumerate(top["predictions"]))
    twice = {
        (r.metric, r.comparison) for r in rows if sum((r.metric, r.comparison) == (q.metric, q.comparison) for q in rows) > 1
    }
    if twice:
        raise OpsdError(f"{path}: {sorted(twice)} twice", "one row for a metric and comparison", "remove one")
    return str(top["name"]), rows


def write_down(run: Path, path: Path) -> str:
    """Copies a file of predictions into ``run`` and appends its hash and rows to the log, before anything was measured. Returns the hash.

    Raises:
        OpsdError: episodes are on record already, the file is not valid, or other predictions of its name were written down.
    """
    name, rows = read(path)
    log = lines(run)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    before = [x["value"]["sha256"] for x in log if x["gate"] == PREDICTED and x["value"]["name"] == name]
    if before == [digest]:  # a run that is started again
        return digest
    if before:
        raise OpsdError(
            f"{path}: predictions {name!r} with SHA-256 {before[0][:12]} are written down in {run}",
            "a prediction is never replaced",
            "give the new ones another name: both are judged",
        )
    if graded := sum(x["gate"] == EPISODE for x in log):
        raise OpsdError(
            f"{path}: {graded} episodes are graded in {run}",
            "a prediction is written before what it predicts",
            "start a new run with opsd.predictions, or write the finding down as a claim (opsd evidence claim)",
        )
    place = run / "predictions" / f"{digest}.yaml"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    append(run, PREDICTED, {"name": name, "sha256": digest, "rows": len(rows)}, None, "recorded", path.name)
    return digest


def judge(run: Path, numbers: Mapping[str, Number]) -> dict[str, list[Judged]]:
    """Every prediction of the run's log, by the name of its file. A file that was changed or is gone fails as a whole."""
    out: dict[str, list[Judged]] = {}
    for line in lines(run):
        if line["gate"] != PREDICTED:
            continue
        name, digest = line["value"]["name"], line["value"]["sha256"]
        place = run / "predictions" / f"{digest}.yaml"
        whole = place.is_file() and hashlib.sha256(place.read_bytes()).hexdigest() == digest
        if whole:
            out[name] = [judge_one(p, numbers) for p in read(place)[1]]
        else:
            nothing = Prediction("(unknown)", ">=", math.nan, "", 0)
            what = "changed since it was written down" if place.is_file() else "gone"
            out[name] = [Judged(nothing, "fail", None, None, f"{place.name} is {what}")]
    return out


def judge_one(prediction: Prediction, numbers: Mapping[str, Number]) -> Judged:
    """One prediction against the numbers of a report."""
    p, number = prediction, numbers.get(prediction.metric)
    if number is None:
        return Judged(p, "fail", None, None, "the report has no such number")
    if number.of != p.of:
        return Judged(p, "fail", number, None, f"it is over {number.of}, not over {p.of}")
    if number.n < p.at_least:
        short = f"{number.n} of {p.at_least} {p.of}"
        if number.n + number.lost >= p.at_least:
            return Judged(p, "void", number, None, f"{short}: infrastructure faults took {number.lost}")
        return Judged(
            p, "fail", number, None, short + (f", {number.lost} lost to infrastructure faults" if number.lost else "")
        )
    if number.value is None or not math.isfinite(number.value):
        return Judged(p, "fail", number, None, f"its value is {number.value}")
    compared = number.value - p.baseline.value if p.against == "baseline" and p.baseline else number.value
    holds = COMPARISONS[p.comparison](compared, p.threshold)
    return Judged(p, "pass" if holds else "fail", number, compared, "")


def record(run: Path, judged: Mapping[str, Sequence[Judged]]) -> None:
    """Appends verdicts that the log does not hold yet, or holds otherwise: a report may be written again."""
    last = {x["gate"]: (x["value"], x["verdict"]) for x in lines(run) if x["gate"].startswith(JUDGED)}
    for name, rows in judged.items():
        for j in rows:
            gate = f"{JUDGED}{name}/{j.prediction.metric} {j.prediction.comparison}"
            value = None if j.compared is None else j.compared
            if last.get(gate) != (value, j.verdict):
                threshold = None if math.isnan(j.prediction.threshold) else j.prediction.threshold
                append(run, gate, value, threshold, j.verdict, j.why)


def _row(path: Path, i: int, row: Any) -> Prediction:
    where = f"row {i}"
    needed, more = {"metric", "comparison", "threshold", "denominator"}, {"baseline", "against", "works_if"}
    row = _keys(path, where, row, needed, more)
    denominator = _keys(path, f"{where}.denominator", row["denominator"], {"of", "at_least"}, set())
    baseline = None
    if row.get("baseline") is not None:
        b = _keys(path, f"{where}.baseline", row["baseline"], {"value", "source"}, {"of"})
        baseline = Baseline(_number(path, where, "baseline.value", b["value"]), str(b["source"]), b.get("of"))
    against = row.get("against", "value")
    at_least = denominator["at_least"]
    refuse = {
        f"comparison={row['comparison']!r}": row["comparison"] not in COMPARISONS,
        f"against={against!r}": against not in ("value", "baseline"),
        "against=baseline without a baseline": against == "baseline" and baseline is None,
        f"denominator.at_least={at_least!r}": not isinstance(at_least, int) or isinstance(at_least, bool) or at_least < 1,
    }
    for what, wrong in refuse.items():
        if wrong:
            raise OpsdError(
                f"{path}, {where}: {what}",
                "comparison is >=, >, <= or <; against is value or baseline; at_least is a whole number from 1",
                "see docs/evidence.md",
            )
    threshold = _number(path, where, "threshold", row["threshold"])
    return Prediction(
        metric=str(row["metric"]),
        comparison=row["comparison"],
        threshold=threshold,
        of=str(denominator["of"]),
        at_least=at_least,
        baseline=baseline,
        against=against,
        works_if=str(row.get("works_if", "")),
    )


def _keys(path: Path, where: str, row: Any, needed: set[str], more: set[str]) -> dict[str, Any]:
    if not isinstance(row, dict) or not needed <= row.keys() <= needed | more:
        raise OpsdError(
            f"{path}, {where}: {sorted(row) if isinstance(row, dict) else row!r}",
            f"keys {', '.join(sorted(needed))}" + (f"; may have {', '.join(sorted(more))}" if more else ""),
            "correct the keys; a prediction with a key that nobody reads predicts nothing",
        )
    return row


def _number(path: Path, where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise OpsdError(f"{path}, {where}: {key}={value!r}", "a finite number", "write it as a number (0.10, not 10%)")
    return float(value)
