"""Each patch of a pair alone on both suites: who did the pair's work. Stored beside the episodes, one file an episode.

<run>/alone/<episode>.json   {"agent1": {"1": true, "2": false}, "agent2": {...}}: agent -> feature id -> passed
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import InfraFault
from verl_opsd.paths import cache_dir
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.records import Episode

#: Agent -> feature id -> whether the agent's patch alone passes the feature's suite.
Alone = Mapping[str, Mapping[int, bool]]


def who_did_it(episode: Episode, alone: Alone | None) -> str:
    """Who did a scored pair's work (``shapes.WORK``).

    ``handoff``: both patches alone pass both suites (one was copied), or one does and builds on the other, which passes its own feature.
    ``one_did_both``: one patch passes both and the other nothing. ``split``: neither passes both, and each passes its own feature.
    ``partial``: some feature passes with some patch alone. ``none``: none does.
    """
    if alone is None:
        return "ungraded"
    own = {a.agent_id: alone[a.agent_id][a.feature_id] for a in episode.agents}
    both = [agent for agent, passed in alone.items() if all(passed.values())]
    if len(both) == 2:
        return "handoff"
    if both:
        (other,) = set(alone) - set(both)
        if own[other]:
            return "handoff"
        return "partial" if any(alone[other].values()) else "one_did_both"
    if all(own.values()):
        return "split"
    return "partial" if any(p for passed in alone.values() for p in passed.values()) else "none"


def _path(run: Path, episode_id: str) -> Path:
    return run / "alone" / f"{urllib.parse.quote(episode_id, safe='')}.json"


def read_alone(run: Path, episode_id: str) -> Alone | None:
    """What was stored for an episode; None where its patches were not graded alone."""
    path = _path(run, episode_id)
    if not path.is_file():
        return None
    return {agent: {int(f): bool(p) for f, p in passed.items()} for agent, passed in json.loads(path.read_text()).items()}


def grade_alone(
    run: RunDir, episodes: Iterable[Episode], dataset: Path, *, backend: str, allow_unsafe: bool, timeout_s: float, workers: int
) -> dict[str, str]:
    """Grades both patches of every scored episode alone, where that was not done, and stores the results.

    An empty patch passes nothing and is not run: the suites fail on the untouched base tree (qualification).

    Args:
        dataset: folder in CooperBench's layout with the episodes' tasks, which are prepared.
        timeout_s: of each test run. workers: gradings at once.

    Returns:
        episode id -> fault kind, of those that an infrastructure fault left ungraded.
    """
    wanted = [e for e in episodes if e.scored and not _path(run.path, e.episode_id).is_file()]
    faults: dict[str, str] = {}

    def one(episode: Episode) -> None:
        try:
            found = _grade(episode, dataset, backend, allow_unsafe, timeout_s)
        except InfraFault as fault:
            faults[episode.episode_id] = fault.kind
        else:
            write_json(_path(run.path, episode.episode_id), found)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, wanted))
    return faults


def _grade(episode: Episode, dataset: Path, backend: str, allow_unsafe: bool, timeout_s: float) -> dict[str, dict[str, bool]]:
    from verl_opsd.cooperbench.grading import grade_patch, without_tests
    from verl_opsd.cooperbench.prepare import load_prepared

    pair = PairTask(dataset, episode.repo, episode.task_id, episode.features, episode.split)
    prepared = load_prepared(cache_dir(), episode.repo, episode.task_id)

    def passes(feature: int, patch: str) -> bool:
        if not patch:
            return False
        settings = {"backend": backend, "allow_unsafe": allow_unsafe, "timeout_s": timeout_s}
        return grade_patch(pair, feature, prepared, patch, **settings).passed  # type: ignore[arg-type]

    out: dict[str, dict[str, bool]] = {}
    for agent in episode.agents:
        patch = without_tests(agent.patch) if agent.patch.strip() else ""
        out[agent.agent_id] = {str(f): passes(f, patch) for f in episode.features}
    return out
