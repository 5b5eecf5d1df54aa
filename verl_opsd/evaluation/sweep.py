"""The jobs of a Hydra multirun as one table: what was swept, what each job scored, and a plot of it.

<sweep>/multirun.yaml   <sweep>/<number>/  a run directory each, with .hydra/overrides.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.page.plots import interval
from verl_opsd.evaluation.shapes import Standing
from verl_opsd.evaluation.standings import model_info, rows_of_run, standing
from verl_opsd.evidence.chain import lines
from verl_opsd.rundir import RunDir, read_json
from verl_opsd.tokens.store import EpisodeStore


@dataclass(frozen=True)
class Job:
    """One job. ``swept``: key -> value of the overrides in which the jobs differ; ``standing``: None while nothing was evaluated."""

    number: int
    swept: dict[str, str]
    standing: Standing | None


@dataclass(frozen=True)
class Sweep:
    """All jobs, in order. ``varies``: the field of the contract that was declared to differ; None: all ran under one contract."""

    path: str
    varies: str | None
    jobs: tuple[Job, ...]


def read_sweep(folder: Path) -> Sweep:
    """The jobs of a multirun; the standing of each is of its last evaluated version of the policy.

    Raises:
        OpsdError: no multirun, a job whose overrides can't be read, or jobs whose contracts differ in a field that was not declared.
    """
    numbers = (
        sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and (p / ".hydra").is_dir())
        if folder.is_dir()
        else []
    )
    if not (folder / "multirun.yaml").is_file() or not numbers:
        raise OpsdError(
            f"{folder} holds no multirun",
            "a sweep's directory has multirun.yaml and a folder a job",
            "name hydra.sweep.dir of the sweep",
        )
    given = {n: _overrides(folder / str(n)) for n in numbers}
    keys = list(dict.fromkeys(k for o in given.values() for k in o))
    swept = [k for k in keys if len({o.get(k) for o in given.values()}) > 1]
    runs = {n: RunDir(folder / str(n)) for n in numbers}
    varies = _declared([r for r in runs.values() if (r.path / "contract.json").is_file()])
    jobs = tuple(Job(n, {k: given[n].get(k, "") for k in swept}, _standing(runs[n], given[n], swept)) for n in numbers)
    return Sweep(str(folder), varies, jobs)


def _overrides(job: Path) -> dict[str, str]:
    path = job / ".hydra" / "overrides.yaml"
    try:
        listed = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        listed = f"{type(error).__name__}: {error}"
    if not isinstance(listed, list) or not all(isinstance(o, str) for o in listed):
        raise OpsdError(
            f"{path}: {listed}", "it lists a job's overrides, as Hydra wrote them", "restore it, or take the job out"
        )
    return dict(o.lstrip("+").split("=", 1) for o in listed if "=" in o)


def _declared(runs: Sequence[RunDir]) -> str | None:
    fields: set[str | None] = set()
    for run in runs:
        meta: dict[str, Any] = read_json(run.path / "meta.json") if (run.path / "meta.json").is_file() else {}
        fields.add((meta.get("opsd") or {}).get("varies"))
    varies = next(iter(fields), None)
    if len(fields) > 1:
        raise OpsdError(f"jobs that declare {sorted(map(str, fields))}", "one sweep varies one field", "set opsd.varies once")
    for run in runs[1:]:
        runs[0].contract().require_same(run.contract(), f"job {run.path.name}", varies, mine=f"job {runs[0].path.name}")
    return varies


def _standing(run: RunDir, overrides: dict[str, str], swept: Sequence[str]) -> Standing | None:
    episodes = list(EpisodeStore(run.episodes).episodes()) if run.episodes.is_dir() else []
    rows = [row for row in rows_of_run(episodes, lines(run.path)) if row[0] == "eval"]
    if not rows:
        return None
    ((_, version, kept),) = rows
    name = " ".join(f"{k}={overrides.get(k, '')}" for k in swept) or run.path.name
    return standing(name, kept, model_info(run.path, kept, "eval", version))


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>sweep</title><style>
body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#1c1d1f;background:#fdfdfb}table{border-collapse:collapse}
td,th{padding:.3rem .7rem;text-align:left;border-bottom:1px solid #d8d9dc}.axis{stroke:#9aa0a6;fill:none}.band{stroke:#33518a;stroke-width:3}
.dot{fill:#33518a}.invalid{text-decoration:line-through}.invalid small{display:inline-block}@media (prefers-color-scheme:dark){body{color:#e3e4e6;background:#16181b}td,th{border-color:#34383e}
.band{stroke:#84a8e8}.dot{fill:#84a8e8}}</style>
<h1>Sweep</h1><p>{{ sweep.path }}; contract: {{ "one" if sweep.varies is none else sweep.varies ~ " varies" }}. Rates with 95% intervals.</p>
<table><tr><th>job</th>{% for k in keys %}<th>{{ k }}</th>{% endfor %}<th>scored</th><th>void</th><th colspan="2">features</th>
<th colspan="2">pairs</th><th>submitted</th><th>steps</th><th>minutes a pair</th></tr>
{% for j in sweep.jobs %}<tr{% if j.standing and j.standing.invalidated %} class="invalid"{% endif %}><td>{{ j.number }}{% if j.standing %}{% for x in j.standing.invalidated + j.standing.doubts %}<br><small>{{ x }}</small>{% endfor %}{% endif %}</td>{% for k in keys %}<td>{{ j.swept[k] }}</td>{% endfor %}
{% if j.standing is none %}<td colspan="9">not evaluated</td>{% else %}{% set s = j.standing %}
<td>{{ s.scored }} of {{ s.ran }}</td><td>{{ s.void.values() | sum }}</td>
{% for r in (s.features, s.pairs) %}<td>{{ r.passed }}/{{ r.total }}</td><td>{{ plot(r.value, r.low, r.high, r.passed ~ " of " ~ r.total) }}</td>{% endfor %}
<td>{{ s.submitted.passed }}/{{ s.submitted.total }}</td><td>{{ s.median_steps }}</td><td>{{ s.minutes_per_pair | round(1) if s.minutes_per_pair is not none }}</td>
{% endif %}</tr>{% endfor %}</table></html>
"""


def page(sweep: Sweep) -> str:
    """One self-contained page: the table with a plot of each rate."""
    keys = list(sweep.jobs[0].swept)
    return (
        Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE).render(sweep=sweep, keys=keys, plot=interval)
    )
