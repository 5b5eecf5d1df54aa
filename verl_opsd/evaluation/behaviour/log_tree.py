"""Episodes from the harness' own log folders, so that runs of other tools are measured like ours.

    <run>/coop/<repo>/<task>/f<A>_f<B>/  result.json  eval.json  agent<FEATURE>.patch  agent<FEATURE>_traj.json
                                         agent<N>_full_traj.json (only after compaction)

Aggregates are made from these files; the harness' own summaries leave errors out of denominators and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_opsd.cooperbench.history import join_segments
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.behaviour.token_capture import captured_turns
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade, TurnRecord


def is_log_tree(folder: Path) -> bool:
    """Whether a folder holds a pair's ``result.json`` at any depth."""
    return next(folder.rglob("result.json"), None) is not None


def read_log_tree(folder: Path, token_ids: bool = False) -> Iterator[Episode]:
    """Episodes of a folder of logs, sorted by path. Without a usable ``eval.json`` the outcome is ``infra:not_graded`` or
    ``infra:grader_died``.

    Args:
        token_ids: also turns, of the ids that the harness captured.

    Raises:
        OpsdError: a file that is not what the harness writes, or captured ids that don't fit each other.
    """
    for path in sorted(folder.rglob("result.json")):
        try:
            yield _episode(path.parent, json.loads(path.read_text()), token_ids)
        except (KeyError, TypeError, ValueError, FileNotFoundError) as e:
            raise OpsdError(
                f"{path.parent}: {type(e).__name__}: {e}",
                "a pair's folder holds result.json and each agent's trajectory as the harness writes them",
                "take the folder out, or complete it",
            ) from e


def _episode(folder: Path, result: dict[str, Any], token_ids: bool) -> Episode:
    repo, task_id = str(result["repo"]), int(result["task_id"])
    a, b = sorted(map(int, result["features"]))
    messages = {agent: _messages(folder, agent, entry["feature_id"]) for agent, entry in sorted(result["agents"].items())}
    outcome, grade = _grade(folder / "eval.json", (a, b))
    episode_id = f"{result['run_name']}/{repo}/task{task_id}/f{a}_f{b}/{result['run_id']}"
    turns: tuple[TurnRecord, ...] = ()
    for agent in messages if token_ids else ():
        turns += captured_turns(episode_id, agent, messages[agent], max(0, len(_segments(folder, agent)) - 1))
    return Episode(
        episode_id=episode_id,
        repo=repo,
        task_id=task_id,
        features=(a, b),
        split="eval",
        contract_hash="",
        outcome=outcome,
        turns=turns,
        agents=tuple(_agent(folder, agent, result["agents"][agent], messages[agent]) for agent in sorted(result["agents"])),
        grade=grade,
        brief_kinds=result.get("brief_kinds", {}),  # of an export of ours; the harness itself has no briefs
        near_benchmark=result.get("near_benchmark", ""),
        model_version=-1,
        t_start=datetime.fromisoformat(result["started_at"]).timestamp(),
        t_end=datetime.fromisoformat(result["started_at"]).timestamp() + float(result["duration_seconds"]),
        messages=messages,
    )


def _messages(folder: Path, agent: str, feature: int) -> list[dict[str, Any]]:
    if segments := _segments(folder, agent):
        return join_segments(segments)
    return list(json.loads((folder / f"agent{feature}_traj.json").read_text())["messages"])


def _segments(folder: Path, agent: str) -> list[dict[str, Any]]:
    """What compaction cut the agent's history into; empty where it did not."""
    full = folder / f"{agent}_full_traj.json"
    return [s for s in json.loads(full.read_text())["segments"] if s.get("kind") == "solver"] if full.is_file() else []


def _agent(folder: Path, agent: str, entry: dict[str, Any], messages: list[dict[str, Any]]) -> AgentOutcome:
    feature = int(entry["feature_id"])
    patch = folder / f"agent{feature}.patch"
    seen = [
        str((m.get("extra") or {}).get("raw_output") or m.get("content") or "") for m in messages if m.get("role") == "tool"
    ]
    return AgentOutcome(
        agent_id=agent,
        feature_id=feature,
        status=str(entry["status"]),
        steps=int(entry["steps"]),
        patch=patch.read_bytes().decode("utf-8", "surrogateescape") if patch.is_file() else "",
        sent_messages=sum(text.count("Message sent to ") for text in seen),
        opened_pr=any(f"opened PR for {agent}" in text for text in seen),
        error=entry.get("error"),
        prompt_tokens=entry.get("input_tokens") or None,  # the package leaves 0
        completion_tokens=entry.get("output_tokens") or None,
    )


def _grade(path: Path, features: tuple[int, int]) -> tuple[str, Grade | None]:
    if not path.is_file():
        return "infra:not_graded", None
    found = json.loads(path.read_text())
    if found.get("error"):
        return "infra:grader_died", None
    grades = []
    for n, feature in enumerate(features, 1):
        f = found[f"feature{n}"]
        passed, failed = int(f.get("tests_passed") or 0), int(f.get("tests_failed") or 0)
        grades.append(FeatureGrade(feature, bool(f["passed"]), passed, failed, f.get("exit_code")))
    merge = found["merge"]
    return "scored", Grade(merge["status"], merge.get("strategy"), dict(found["apply_status"]), (grades[0], grades[1]))
