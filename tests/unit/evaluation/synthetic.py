"""Histories as the harness records them, from short scripts, and the harness' log folders made of them."""

import json
import random
from datetime import datetime, timezone

from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade

PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -{1},1 +{1},1 @@\n-old\n+new\n"


def turn(text="", *commands, inbox=(), calls="executed"):
    """One model call: (command, output, return code) each; ``inbox``: (sender, text) read before it."""
    return {"text": text, "commands": commands, "inbox": inbox, "executed": calls == "executed"}


def history(turns, submit=False):
    """Messages of an agent; with ``submit`` its last command has no observation and the harness' end mark follows."""
    out = [{"role": "system", "content": "s"}, {"role": "user", "content": "task: message agent2 with send_message agent2 'x'"}]
    for n, t in enumerate(turns):
        out += [{"role": "user", "content": f"[Message from {sender}]: {text}"} for sender, text in t["inbox"]]
        last = submit and n == len(turns) - 1
        calls = [(f"call_{n}_{k}", *c) for k, c in enumerate(t["commands"])]
        actions = [{"tool_name": "bash", "tool_call_id": i, "command": c} for i, c, *_ in calls]
        tool_calls = [
            {"id": i, "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": c})}}
            for i, c, *_ in calls
        ]
        extra = {"actions": actions, "timestamp": 1000.0 + n, "cost": 0.0, "response": {}}
        out.append({"role": "assistant", "content": t["text"], "tool_calls": tool_calls, "extra": extra})
        if t["executed"] and not last:
            for i, _, output, code in calls:
                seen = {"raw_output": output, "returncode": code}
                out.append(
                    {
                        "role": "tool",
                        "tool_call_id": i,
                        "content": json.dumps({"returncode": code, "output": output}),
                        "extra": seen,
                    }
                )
    if submit:
        out.append({"role": "exit", "content": "Submitted", "extra": {"exit_status": "Submitted", "submission": ""}})
    return out


def episode(
    name, turns, *, passed=(False, False), merge="clean", patches=("", ""), statuses=("Submitted", "Submitted"), **more
):
    """A scored episode of two scripts; ``more`` replaces fields of the record."""
    applied = {f"agent{i}": "applied" if p else "skipped" for i, p in enumerate(patches, 1)}
    counts = more.pop("tests", ((3, 0) if passed[0] else (0, 3), (3, 0) if passed[1] else (0, 3)))
    grades = tuple(FeatureGrade(i, ok, *counts[i - 1], 0 if ok else 1) for i, ok in enumerate(passed, 1))
    histories = {f"agent{i}": history(t, submit=statuses[i - 1] == "Submitted") for i, t in enumerate(turns, 1)}
    agents = tuple(
        AgentOutcome(a, i, statuses[i - 1], len(turns[i - 1]), patches[i - 1], 0, f"opened PR for {a}" in str(histories[a]))
        for i, a in enumerate(histories, 1)
    )
    fields = {
        "repo": "r_task",
        "task_id": 1,
        "features": (1, 2),
        "split": "eval",
        "contract_hash": "c",
        "outcome": "scored",
        "turns": (),
        "agents": agents,
        "grade": Grade(merge, "naive", applied, grades),
        "brief_kinds": {},
        "model_version": 0,
        "t_start": 1000.0,
        "t_end": 1120.0,
        "messages": histories,
    }
    return Episode(episode_id=name, **fields | more)


def write_logs(root, run, e):
    """The harness' folder of an episode."""
    folder = root / run / "coop" / e.repo / str(e.task_id) / f"f{e.features[0]}_f{e.features[1]}"
    folder.mkdir(parents=True)
    agents = {}
    for a in e.agents:
        agents[a.agent_id] = {"feature_id": a.feature_id, "status": a.status, "steps": a.steps, "cost": 0.0, "error": None}
        (folder / f"agent{a.feature_id}.patch").write_text(a.patch)
        (folder / f"agent{a.feature_id}_traj.json").write_text(json.dumps({"messages": e.messages[a.agent_id]}))
    started = datetime.fromtimestamp(e.t_start, timezone.utc).isoformat()
    result = {"repo": e.repo, "task_id": e.task_id, "features": list(e.features), "run_id": e.episode_id, "run_name": run}
    result |= {"started_at": started, "duration_seconds": e.t_end - e.t_start, "agents": agents}
    (folder / "result.json").write_text(json.dumps(result))
    if e.grade is not None:
        graded = {
            "apply_status": e.grade.apply_status,
            "merge": {"status": e.grade.merge, "strategy": e.grade.strategy},
            "error": None,
        }
        for n, f in enumerate(e.grade.features, 1):
            graded[f"feature{n}"] = {
                "passed": f.passed,
                "exit_code": f.exit_code,
                "tests_passed": f.tests_passed,
                "tests_failed": f.tests_failed,
            }
        (folder / "eval.json").write_text(json.dumps(graded))
    return folder


def long_episodes():
    """100 pairs of 2,000 commands and 80 messages each."""
    rng = random.Random(0)
    words = [f"word{i}" for i in range(2000)]
    kinds = (
        "cat src/a.py | head -20",
        "pytest -q 2>&1 | tail -5",
        "git status && git diff",
        "sed -i 's/a/b/' src/b.py",
        "ls -la",
    )

    def said(peer):
        text = " ".join(rng.choices(words, k=40))
        return turn("", (f"send_message {peer} <<'MSG'\n{text}\nMSG", f"Message sent to {peer}", 0))

    out = []
    for n in range(100):
        turns = []
        for peer in ("agent2", "agent1"):
            plain = [turn("thinking about agent2", (f"{rng.choice(kinds)} # {i}", "out", 0)) for i in range(960)]
            turns.append(plain + [said(peer) for _ in range(40)])
        out.append(episode(f"e{n}", turns, statuses=("LimitsExceeded", "LimitsExceeded")))
    return out
