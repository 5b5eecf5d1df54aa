"""What an evaluation plans, what it has, and how it stands while it runs.

<run>/evaluation.json   planned episode ids, pairs, seeds, the model and what serves it
<run>/faults.jsonl      every attempt that an infrastructure fault ended, with what became of it
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_opsd.cooperbench.types import PairTask
from verl_opsd.evaluation.design import Design
from verl_opsd.evaluation.standings import standing
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore

FILE = "evaluation.json"


def episode_id(index: int) -> str:
    """Id of the episode of the index-th row of a plan; the rows of a pair's seeds follow one another."""
    return f"eval-00000-{index:05d}-0"


def write_plan(run: RunDir, pairs: Sequence[PairTask], seeds: int, model: dict[str, Any], serving: dict[str, str]) -> str:
    """Writes down what is planned, before anything runs.

    Args:
        model: ``path`` and what else is known (``parameters``, ``active_parameters``, ``adapter``, ``prices``).
        serving: what serves it; this host's name is added.

    Returns:
        What the design can show, in words.
    """
    shows = Design(len(pairs), seeds).text()
    values = {
        "planned": [episode_id(i) for i in range(len(pairs) * seeds)],
        "pairs": [p.key for p in pairs],
        "seeds": seeds,
        "serving": serving | {"node": platform.node()},
        "design": shows,
    }
    write_json(run.path / FILE, values | model)
    return shows


def read_plan(run: RunDir) -> dict[str, Any]:
    """What :func:`write_plan` wrote."""
    values: dict[str, Any] = json.loads((run.path / FILE).read_text())
    return values


def missing(run: RunDir, store: EpisodeStore) -> list[int]:
    """Rows of the plan without an episode on record."""
    there = set(store.ids())
    return [i for i, planned in enumerate(read_plan(run)["planned"]) if planned not in there]


def record_fault(run: RunDir, episode: Episode, attempt: int, detail: str) -> None:
    """Records an attempt that a fault ended; a line is one write."""
    line = {
        "time": time.time(),
        "episode": episode.episode_id,
        "attempt": attempt,
        "outcome": episode.outcome,
        "detail": detail,
    }
    with (run.path / "faults.jsonl").open("a") as f:
        f.write(json.dumps(line) + "\n")


@dataclass
class Progress:
    """Standings while an evaluation runs; :meth:`look` prints a line when an episode has been added."""

    store: EpisodeStore
    planned: int
    seen: dict[str, Episode] | None = None

    def look(self) -> str | None:
        """The line that was printed; None where nothing is new. Each episode is read once, and kept without its tokens."""
        ids = self.store.ids()
        if self.seen is not None and len(ids) == len(self.seen):
            return None
        self.seen = self.seen or {}
        for i in ids:
            if i not in self.seen:
                self.seen[i] = replace(self.store.read(i), turns=(), messages={})
        line = running(list(self.seen.values()), self.planned)
        print(f"verl-opsd: {line}", flush=True)
        return line


def running(episodes: Sequence[Episode], planned: int) -> str:
    """Planned, ran, scored, void, and the rates so far, in one line."""
    s = standing("", episodes)
    void = ", ".join(f"{n} {kind}" for kind, n in s.void.items()) or "0"
    rates = ", ".join(
        f"{name} {r.passed}/{r.total}" + ("" if r.value is None else f" {r.value:.0%} ({r.low:.0%} to {r.high:.0%})")
        for name, r in (("features", s.features), ("pairs", s.pairs))
    )
    return f"planned {planned}, ran {s.ran}, scored {s.scored}, void {void}: {rates}"


def set_aside_faults(run: RunDir) -> int:
    """Moves faulty episodes and what was being written out of the way, so that they run again; scored ones stay.

    Returns:
        How many episodes were moved.
    """
    store = EpisodeStore(run.episodes)
    faulty = [i for i in store.ids() if not store.read(i).scored]
    target = run.path / "interrupted" / str(len(list((run.path / "interrupted").glob("*"))))
    for name in faulty:
        place = target / "episodes" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (run.episodes / name).rename(place)
    if faulty:
        kinds = Counter(json_outcome(target / "episodes" / n) for n in faulty)
        run.evidence("resume", len(faulty), None, None, f"faulty episodes moved to {target}: {dict(kinds)}")
    return len(faulty)


def json_outcome(folder: Path) -> str:
    """The outcome of a stored episode's folder."""
    import pyarrow.parquet as pq

    return str(pq.read_table(folder / "episodes.parquet", columns=["outcome"])["outcome"][0].as_py())
