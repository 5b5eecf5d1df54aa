"""Episodes as the harness' own log tree, so that its own tools read them, and its logs as a store of 'legacy contract' episodes.

    <logs>/<run>/config.json
    <logs>/<run>/coop/<repo>/<task id>/f<A>_f<B>/  result.json  conversation.json  eval.json  agent<FEATURE>.patch
                                                  agent<FEATURE>_traj.json

A second episode of the same pair goes into ``<run>-2``, and so on. ``conversation.json`` holds the messages that were delivered, in
order of time; the harness' own file is in the order of the agents and can repeat what a text only quotes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.events import stream
from verl_opsd.evaluation.behaviour.log_tree import read_log_tree
from verl_opsd.rundir import write_json
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore

#: Prefix of the contract hash of episodes whose contract nobody recorded.
LEGACY = "legacy:"


def write_log_tree(
    episodes: Iterable[Episode], logs: Path, run: str, contract: EvalContract | None, grades: bool = True
) -> tuple[list[Path], Counter[str]]:
    """Writes each pair's folder.

    Args:
        contract: of the episodes; its fields go into ``config.json``.
        grades: also write ``eval.json``; without it the harness' own ``eval`` grades the patches.

    Returns:
        The folders, and how many episodes were left out, by outcome: those that a fault ended before their agents had handed in.

    Raises:
        OpsdError: a folder exists, or a repository's name does not end with ``_task``, without which the harness does not see it.
    """
    folders: list[Path] = []
    left_out: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for e in episodes:
        if len(e.agents) != 2:
            left_out[e.outcome] += 1
            continue
        if not e.repo.endswith("_task"):
            raise OpsdError(
                f"repository {e.repo}", "the harness reads folders whose names end with _task", "rename the repository"
            )
        seen[e.pair_key] += 1
        name = run if seen[e.pair_key] == 1 else f"{run}-{seen[e.pair_key]}"
        folder = logs / name / "coop" / e.repo / str(e.task_id) / f"f{e.features[0]}_f{e.features[1]}"
        if folder.exists():
            raise OpsdError(f"{folder} exists", "logs are never overwritten", "choose another folder or --name")
        folder.mkdir(parents=True)
        _write_pair(folder, name, e, grades)
        config: dict[str, Any] = {
            "run_name": name,
            "agent_framework": "verl_opsd",
            "model": f"version {e.model_version}",
            "setting": "coop",
        }
        config |= {"contract_hash": e.contract_hash, "contract": None if contract is None else contract.as_dict()}
        write_json(logs / name / "config.json", config)
        folders.append(folder)
    return folders, left_out


def _write_pair(folder: Path, run: str, e: Episode, grades: bool) -> None:
    agents: dict[str, Any] = {}
    for a in e.agents:
        whole = {"agent_id": a.agent_id, "repo": e.repo, "task_id": e.task_id, "feature_id": a.feature_id, "status": a.status}
        write_json(folder / f"agent{a.feature_id}_traj.json", {**whole, "steps": a.steps, "messages": e.messages[a.agent_id]})
        (folder / f"agent{a.feature_id}.patch").write_bytes(a.patch.encode("utf-8", "surrogateescape"))
        entry = {"feature_id": a.feature_id, "status": a.status, "steps": a.steps, "cost": 0.0, "error": a.error}
        entry |= {"input_tokens": a.prompt_tokens or 0, "output_tokens": a.completion_tokens or 0}
        agents[a.agent_id] = entry | {"patch_lines": len(a.patch.splitlines())}
    started, ended = (datetime.fromtimestamp(t, timezone.utc).isoformat() for t in (e.t_start, e.t_end))
    pair = {"repo": e.repo, "task_id": e.task_id, "features": list(e.features), "setting": "coop"}
    times = {"started_at": started, "ended_at": ended, "duration_seconds": e.t_end - e.t_start}
    result = {**pair, **times, "run_id": e.episode_id, "run_name": run, "agent_framework": "verl_opsd", "agents": agents}
    result |= {"model": f"version {e.model_version}", "total_cost": 0.0, "total_steps": sum(a.steps for a in e.agents)}
    result |= {"messages_sent": sum(a.sent_messages for a in e.agents), "contract_hash": e.contract_hash}
    write_json(folder / "result.json", result | {"near_benchmark": e.near_benchmark, "brief_kinds": e.brief_kinds})
    feature = {a.agent_id: a.feature_id for a in e.agents}
    sent = [
        {"from": s.sender, "to": s.to, "message": s.text, "timestamp": s.t, "feature_id": feature[s.sender]}
        for s in stream(e).delivered
    ]
    write_json(folder / "conversation.json", sent)
    if grades and e.grade is not None:
        graded: dict[str, Any] = {**pair, "apply_status": e.grade.apply_status, "error": None, "evaluated_at": ended}
        graded |= {"merge": {"status": e.grade.merge, "strategy": e.grade.strategy, "diff": ""}}
        for n, f in enumerate(e.grade.features, 1):
            counts = {"tests_passed": f.tests_passed, "tests_failed": f.tests_failed, "test_output": f.output}
            graded[f"feature{n}"] = {"feature_id": f.feature_id, "passed": f.passed, "exit_code": f.exit_code, **counts}
        write_json(folder / "eval.json", graded | {"both_passed": all(f.passed for f in e.grade.features)})


def import_log_tree(logs: Path, store_dir: Path, token_ids: bool = True) -> list[str]:
    """Stores the episodes of the harness' logs of one run; returns their ids.

    Nobody recorded the contract that they ran under, so their contract hash is :data:`LEGACY` and the hash of the run's
    ``config.json``: they are never mixed with episodes of a contract, nor with those of another run.

    Args:
        token_ids: also turns, of the ids that the harness captured.

    Raises:
        OpsdError: no logs, or those of runs with different ``config.json``; see also :func:`read_log_tree`.
    """
    configs = sorted(logs.rglob("config.json"))
    hashes = {hashlib.sha256(p.read_bytes()).hexdigest() for p in configs}
    if len(hashes) > 1:
        raise OpsdError(
            f"{logs} holds logs of {len(hashes)} runs: {', '.join(str(p.parent.name) for p in configs)}",
            "a store holds episodes of one contract, and nobody knows whether these runs share theirs",
            "import each run's folder into a store of its own",
        )
    contract_hash = LEGACY + (hashes.pop() if hashes else hashlib.sha256(str(logs.resolve()).encode()).hexdigest())
    episodes = [
        replace(e, contract_hash=contract_hash, turns=tuple(replace(t, contract_hash=contract_hash) for t in e.turns))
        for e in read_log_tree(logs, token_ids)
    ]
    if not episodes:
        raise OpsdError(f"{logs} holds no result.json", "the harness' logs hold one for each pair", "name the run's folder")
    store = EpisodeStore(store_dir)
    for e in episodes:
        store.write(e)
    return [e.episode_id for e in episodes]


def contract_of(store: EpisodeStore, run: Path) -> EvalContract | None:
    """The contract of a run directory's episodes; None where it was not recorded (:data:`LEGACY`)."""
    path = run / "contract.json"
    if (store.contract_hash or "").startswith(LEGACY) or not path.is_file():
        return None
    return EvalContract.from_dict(json.loads(path.read_text()))
