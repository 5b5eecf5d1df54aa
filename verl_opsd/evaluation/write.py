"""Writes ``report.json`` and ``report.html`` of a run, or of several runs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.memory import uncollected
from verl_opsd.evaluation.page.episodes import Options
from verl_opsd.evaluation.page.gather import RunData, gather, read_episodes, read_meta
from verl_opsd.evaluation.page.measure import Page, as_json, measure
from verl_opsd.evaluation.page.render import render
from verl_opsd.evaluation.report import build_report
from verl_opsd.evaluation.sources import require_one_contract
from verl_opsd.evaluation.standings import Checked
from verl_opsd.evidence.chain import lines, verify
from verl_opsd.evidence.claims import claims
from verl_opsd.evidence.copies import warning
from verl_opsd.evidence.graded import check_episodes
from verl_opsd.evidence.predictions import record
from verl_opsd.rundir import RunDir, write_json


@uncollected()
def write_report(run: RunDir, opsd: OpsdConfig, options: Options | None = None) -> dict[str, Any]:
    """Builds the report, judges the run's predictions, and writes ``report.json`` and ``report.html``.

    The table stands in ``report.json`` before the page is begun: whatever goes wrong with the page, a gate ``report`` says so, the error
    is raised, and what was measured is there.
    """
    episodes = read_episodes(run)
    checked = _checked(run)
    report = build_report(run, opsd, episodes, checked)
    write_json(run.report, report)
    try:
        data = gather(run, run.path.resolve().name, report, episodes, checked[1])
        page = measure([data])
        record(run.path, page.judged[data.name])
        data.log, data.findings = verify(run.path)
        report |= _more(page, data)
        write_json(run.report, report)
        _write_text(run.path / "report.html", render(page, options or Options()))
    except Exception as error:
        run.evidence("report", None, None, False, f"{type(error).__name__}: {error}"[:500])
        raise
    return report


@uncollected()
def write_comparison(
    paths: Sequence[Path],
    target: Path,
    options: Options,
    teacher: Path | None = None,
    reruns: Sequence[Path] = (),
    varies: str | None = None,
) -> Path:
    """Writes ``comparison.html`` and ``comparison.json`` of several runs to ``target``; the first run is the baseline.

    Args:
        teacher: run among ``paths`` in which the teacher acted; the action mix is shown with its drift from the first towards it.
        reruns: runs among ``paths`` that are the baseline's weights again: the noise floor.
        varies: the one field of the contract in which the runs may differ.

    Raises:
        OpsdError: fewer than two runs, one of them twice; a teacher or a re-run that is not among them, or is the first; or other
            contracts than the first run's.
    """
    runs = [RunDir(p) for p in paths]
    names = [r.path.resolve() for r in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise OpsdError(f"--compare {' '.join(map(str, paths))}", "a comparison has two different runs or more", "name them")
    for option, path in (*([("--teacher", teacher)] if teacher is not None else []), *(("--reruns", p) for p in reruns)):
        if path.resolve() not in names[1:]:
            rule = f"{option} names compared runs, and not the baseline"
            raise OpsdError(f"{option} {path}", rule, "add it to --compare, after the baseline")
    require_one_contract([str(p) for p in paths], varies)
    short = dict(zip(names, _short(names), strict=True))
    data = []
    for run, name in zip(runs, short.values(), strict=True):
        _, opsd = read_meta(run)
        episodes = read_episodes(run)
        checked = _checked(run)
        data.append(gather(run, name, build_report(run, opsd, episodes, checked), episodes, checked[1]))
    page = measure(data, None if teacher is None else short[teacher.resolve()], [short[p.resolve()] for p in reruns])
    said = {
        "runs": {d.name: str(d.run.path) for d in data},
        "standings": [asdict(s) for s in page.found],
        "comparisons": [asdict(c) for c in page.compared],
        "by_run": {d.name: _more(page, d) for d in data},
    }
    write_json(target / "comparison.json", said)
    _write_text(target / "comparison.html", render(page, options))
    return target / "comparison.html"


def _checked(run: RunDir) -> Checked:
    log = lines(run.path)
    return log, check_episodes(run.path, log)


def _more(page: Page, data: RunData) -> dict[str, Any]:
    """What the page adds to a run's report, as plain values."""
    return {
        "numbers": as_json(page.numbers[data.name]),
        "predictions": {
            name: [
                {
                    "metric": j.prediction.metric,
                    "verdict": j.verdict,
                    "value": None if j.number is None else j.number.value,
                    "why": j.why,
                }
                for j in rows
            ]
            for name, rows in page.judged[data.name].items()
        },
        "claims": [asdict(c) for c in claims(data.log)],
        "evidence": {
            "lines": len(data.log),
            "last_hash": data.log[-1]["hash"] if data.log else None,
            "findings": [str(f) for f in data.findings],
            "episodes": dict(Counter(state for state, _ in data.states.values())),
            "invalidated": [asdict(m) for m in data.marks],
            "not_copied": warning(data.log, data.run.path),
        },
    }


def _short(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    for parts in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-parts:]) for p in paths]
        if len(set(names)) == len(names):
            break
    return names


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(text.encode(errors="backslashreplace"))
    temporary.replace(path)
