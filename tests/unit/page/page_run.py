"""A run directory for tests of the page: episodes of the shipped pairs with conversations, grades, telemetry, gates, in any number."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from chat_tokenizer import chat_tokenizer
from opsd_section import SECTION

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.branches import build_trajectories, loss_positions
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade, Sampling, TurnRecord
from verl_opsd.tokens.store import EpisodeStore

CONTRACT = EvalContract(context_length=12288)
STARTED = 1_760_000_000.0
COMMANDS = (
    (
        "ls -la && cat src/ledger/accounts.py",
        "total 12\n-rw-r--r-- 1 agent agent 1204 accounts.py\nclass Account:\n    def __init__(self, name): ...\n",
    ),
    ("grep -rn 'def transfer' src | head", "src/ledger/accounts.py:31:def transfer(a, b, amount):\n"),
    ("cat > src/ledger/fees.py <<'EOF'\ndef fee(amount, rate=0.01):\n    return round(amount * rate, 2)\nEOF", ""),
    ("python -m pytest -q tests", "....\n4 passed in 0.11s\n"),
    ("git fetch origin && git diff origin/agent2 --stat", " src/ledger/accounts.py | 14 ++++++++------\n"),
    ("git merge --no-commit --no-ff origin/agent2", "CONFLICT (content): Merge conflict in src/ledger/accounts.py\n"),
    ("git push origin HEAD", "To origin\n * [new branch] HEAD -> agent1\n"),
)
MESSAGES = (
    "I'll take transfer() and its fees; you take the parser. Leave src/ledger/accounts.py lines 30 to 60 to me.",
    "Do you touch accounts.py as well? I rename `amount` there.",
    "Merged origin/agent2 without conflict, tests pass, pushed.",
)


@functools.cache
def _ids(text: str) -> tuple[int, ...]:
    return tuple(chat_tokenizer().encode(text, add_special_tokens=False))


def make_run(
    folder: Path,
    rounds: int = 3,
    episodes: int = 6,
    evaluated: int = 8,
    turns: int = 6,
    seed: int = 0,
    skill: float = 0.4,
    record: bool = True,
    thought: str = "",
    odd_bytes: bool = False,
    opsd: dict[str, Any] | None = None,
) -> RunDir:
    """A run of ``rounds`` rounds with ``episodes`` training pairs each, and ``evaluated`` pairs before and after. ``skill``: chance that a
    feature passes after training. ``thought``: said at every turn. ``odd_bytes``: patches with bytes that are no text."""
    rng, run = random.Random(seed), RunDir(folder)
    student = folder.parent / "student"
    if not student.is_dir():
        chat_tokenizer().save_pretrained(student)
    config = OpsdConfig.parse(SECTION | (opsd or {}))
    write_json(run.path / "contract.json", CONTRACT.as_dict())
    meta = {
        "argv": ["main_ppo", "+recipe=opd"], "started": STARTED, "python": "3.11.7", "versions": {"verl": "0.9.1", "torch": "2.13.0"},
        "devices": ["cpu x 2"], "harness": {"name": "cooperbench", "version": "0.0.29", "tree_hash": "ab" * 32}, "student": str(student),
        "opsd": dataclasses.asdict(config),
    }  # fmt: skip
    write_json(run.path / "meta.json", meta)
    run.evidence("identity", 3.1e-9, 1e-6, True, "mean nats over 412 loss positions, max 2.1e-08")
    run.evidence("identity_shifted", 0.41, 1e-3, True, "negative control: teacher positions moved by one token")
    run.evidence("brief_effect", 0.0131, 1e-6, True, "mean nats, teacher with brief against without")
    store = EpisodeStore(run.episodes)
    pairs = {s: load_subset(f"pocket_{s}", POCKET_DIR, split=s) for s in ("train", "eval")}

    def keep(e: Episode) -> Episode:
        if odd_bytes:
            odd = b"+\xff\xc3\n".decode("utf-8", "surrogateescape")
            e = dataclasses.replace(e, agents=tuple(dataclasses.replace(a, patch=a.patch + odd) for a in e.agents))
        if record:
            run.store_episode(store, e)
        else:
            store.write(e)
        return e

    for version in (0, rounds):
        for i in range(evaluated):
            chance = skill if version else 0.25
            keep(
                _episode(
                    f"eval-{version:05d}-{i:05d}-0",
                    pairs["eval"][i % len(pairs["eval"])],
                    "eval",
                    version,
                    chance,
                    turns,
                    rng,
                    thought,
                )
            )
    for r in range(1, rounds + 1):
        made = [
            keep(
                _episode(
                    f"train-{r:05d}-{i:05d}-0",
                    pairs["train"][i % len(pairs["train"])],
                    "train",
                    r - 1,
                    0.3,
                    turns,
                    rng,
                    thought,
                )
            )
            for i in range(episodes)
        ]
        _telemetry(run, r, [e for e in made if e.scored], rng)
        run.evidence("publish_kl", 2e-9 * r, 1e-6, True, f"server 0, version {r}")
        for stage, out in (
            ("collect", {}),
            ("train", {"loss": 0.09 / r, "loss_tokens": 1000, "sequence_tokens": 3900}),
            ("publish", {}),
        ):
            with run.stage(r, stage, started=STARTED + 60 * r, ended=STARTED + 60 * r + 20) as outputs:
                outputs.update(out)
    return run


def _episode(
    name: str, pair: Any, split: str, version: int, chance: float, turns: int, rng: random.Random, thought: str
) -> Episode:
    fault = rng.random() < 0.06
    messages, records = {}, []
    for agent, peer in (("agent1", "agent2"), ("agent2", "agent1")):
        messages[agent], found = _talk(name, agent, peer, pair, version, turns, rng, thought)
        records += found
    passed = [rng.random() < chance for _ in pair.features]
    merge = rng.choices(["clean", "conflicts", "identical"], [7, 2, 1])[0]
    empty = rng.random() < 0.15
    features = tuple(
        FeatureGrade(
            f,
            p and merge == "clean",
            5 if p else 2,
            0 if p else rng.randint(1, 4),
            0 if p else 1,
            f"hidden test output of feature {f}",
        )
        for f, p in zip(pair.features, passed, strict=True)
    )
    status = {"agent1": "applied", "agent2": "skipped" if empty else "applied"}
    patches = [
        "diff --git a/src/a.py b/src/a.py\n+x = 1\n" * rng.randint(1, 40),
        "" if empty else "diff --git a/src/b.py b/src/b.py\n+y = 2\n" * rng.randint(1, 60),
    ]
    agents = tuple(
        AgentOutcome(f"agent{i + 1}", f, "Submitted", turns, p, 2, True)
        for i, (f, p) in enumerate(zip(pair.features, patches, strict=True))
    )
    grade = None if fault else Grade(merge, "naive", status, (features[0], features[1]), 1.5)
    outcome = "infra:engine_died" if fault else "scored"
    return Episode(
        name, pair.repo, pair.task_id, pair.features, split, CONTRACT.hash, outcome, tuple(records), agents, grade, {}, version,
        "", STARTED, STARTED + rng.randint(60, 400), messages,
    )  # fmt: skip


def _talk(
    name: str, agent: str, peer: str, pair: Any, version: int, turns: int, rng: random.Random, thought: str
) -> tuple[list[dict[str, Any]], list[TurnRecord]]:
    task = pair.feature_text(pair.features[0 if agent == "agent1" else 1])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are {agent}, a programmer. Work with {peer}."},
        {"role": "user", "content": task},
    ]
    new = _ids(
        f"<|im_start|>system\n{messages[0]['content']}<|im_end|>\n<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"
    )
    start, records, clock = 0, [], STARTED
    for turn in range(turns):
        command, output = rng.choice(COMMANDS)
        if rng.random() < 0.3:
            command, output = f"send_message {peer} <<'MSG'\n{rng.choice(MESSAGES)}\nMSG", f"Message sent to {peer}"
        if turn == turns - 1:
            command, output = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", ""
        words = (
            f"{thought}Step {turn}: I look at the ledger, then write my part ({rng.choice('abcdefgh')}{rng.randint(0, 999)})."
        )
        arguments = json.dumps({"command": command})
        reply = (
            f'<think>\n{words}\n</think>\n\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        )
        said = _ids(reply)
        clock += rng.uniform(2, 9)
        logprobs = -np.abs(np.random.default_rng(rng.randint(0, 2**31)).normal(0.4, 0.3, len(said))).astype(np.float32)
        records.append(
            TurnRecord(
                name, agent, turn, 0, start, np.array(new, np.int32), np.array(said, np.int32), logprobs, "stop", "policy",
                Sampling(1.0, 1.0, -1, 512), version, CONTRACT.hash, clock - 2, clock,
            )
        )  # fmt: skip
        start += len(new) + len(said)
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        action = {"tool_name": "bash", "tool_call_id": call["id"], "command": command}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": words,
                "tool_calls": [call],
                "extra": {"turn": turn, "timestamp": clock, "actions": [action]},
            }
        )
        if turn == turns - 1:
            break
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": output,
                "extra": {"raw_output": output, "returncode": 0, "timestamp": clock + 0.3},
            }
        )
        new = _ids(f"<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
        if rng.random() < 0.25:
            heard = f"[Message from {peer} — 1 new]: {rng.choice(MESSAGES)}"
            messages.append({"role": "user", "content": heard, "extra": {"timestamp": clock + 0.4}})
            new = (*new, *_ids(f"<|im_start|>user\n{heard}<|im_end|>\n<|im_start|>assistant\n"))
    messages.append({"role": "exit", "content": "Submitted", "extra": {"exit_status": "Submitted"}})
    return messages, records


def rows_of(episodes: list[Episode]) -> list[Any]:
    """The trajectories that become rows."""
    return [
        t for e in episodes for a in ("agent1", "agent2") for t in build_trajectories([r for r in e.turns if r.agent_id == a])
    ]


def _telemetry(run: RunDir, number: int, episodes: list[Episode], rng: random.Random) -> None:
    rows = rows_of(episodes)
    rng.shuffle(rows)
    numbers = np.random.default_rng(rng.randint(0, 2**31))
    columns: dict[str, list[Any]] = {}
    for i, t in enumerate(rows):
        p = loss_positions(t.loss_mask)
        n = len(p)
        d = numbers.lognormal(-4.5 - 0.35 * number, 1.6, n)
        mine = {
            "position": p, "turn": t.turn_index[p + 1], "class": numbers.integers(0, 5, n), "divergence": d, "student_logprob": t.logprobs[p + 1],
            "teacher_logprob": t.logprobs[p + 1] - d, "coef": np.ones(n), "weight": np.ones(n), "anchor": numbers.lognormal(-7 + 0.4 * number, 1, n),
            "entropy": numbers.uniform(0, 1, n), "agree": numbers.random(n) < 0.9 + 0.02 * number, "coverage_student": np.ones(n),
            "coverage_teacher": np.ones(n), "step": np.full(n, number), "turn_position": np.arange(n) % 60,
            "row": np.full(n, i),
        }  # fmt: skip
        for k, v in mine.items():
            columns.setdefault(k, []).append(v)
    path = run.path / "telemetry" / f"{number:05d}.npz"
    path.parent.mkdir(exist_ok=True)
    size = sum(map(len, columns["coef"]))
    names = np.array([f"{t.episode_id}/{t.agent_id}/{t.branch}" for t in rows])
    np.savez(
        path, carried=np.int64(size), row_names=names, **{k: np.concatenate(v).astype(np.float32) for k, v in columns.items()}
    )
