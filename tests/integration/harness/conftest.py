"""A pocket task, an event loop with threads for agents, and sessions that play given replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import verl_opsd
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.harness import run_pair
from verl_opsd.cooperbench.prepare import prepare
from verl_opsd.cooperbench.types import PairRun, PairTask, PreparedTask
from verl_opsd.tokens.gateway import Reply

POCKET = Path(verl_opsd.__file__).parent / "cooperbench" / "pocket"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PR = 'git add -A && git commit -qm work && git push -q && gh pr create --title "work" --body "work"'


def calls(*commands: str) -> dict[str, Any]:
    """An assistant message that runs commands, one tool call each."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": c})}}
            for i, c in enumerate(commands)
        ],
    }


Step = str | dict[str, Any] | BaseException | Callable[[], Any]


@dataclass
class Script:
    """A session that answers with its steps in order: a command, a message, an error to raise, or an async function
    whose result is one of these. ``seen`` keeps the messages of each call. Past the end it submits."""

    steps: Iterable[Step]
    seen: list[list[dict[str, Any]]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    prompt_tokens: int = 10

    def __post_init__(self) -> None:
        self._steps = iter(self.steps)

    async def chat(self, messages, tools=None, *, kind="policy"):
        self.seen.append([dict(m) for m in messages])
        self.kinds.append(kind)
        step = next(self._steps, SUBMIT)
        if callable(step):
            step = await step()
        if isinstance(step, BaseException):
            raise step
        message = calls(step) if isinstance(step, str) else step
        return Reply(message, len(self.kinds) - 1, self.prompt_tokens, 1)

    def mark(self, turn: int, kind: str) -> None:
        self.kinds[turn] = kind

    def observations(self) -> list[str]:
        """All tool results that the model has read, in order."""
        return [m["content"] for m in self.seen[-1] if m["role"] == "tool"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    return prepare(POCKET / "pocket_textkit_task" / "task0", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def pair() -> PairTask:
    return PairTask(POCKET, "pocket_textkit_task", 0, (1, 2))


@pytest.fixture
def play(prepared: PreparedTask, pair: PairTask, tmp_path: Path) -> Callable[..., PairRun]:
    """Runs one pair with two scripts and checks that nothing is left of it."""

    def run(first: Script, second: Script, *, contract: Mapping[str, Any] | None = None, **options: Any) -> PairRun:
        settings = {"step_limit": 20, "command_timeout_s": 30.0, "wall_limit_s": 60.0, **(contract or {})}

        async def go() -> PairRun:
            with ThreadPoolExecutor(2) as executor:
                return await run_pair(
                    options.pop("pair", pair),
                    options.pop("prepared", prepared),
                    {"agent1": first, "agent2": second},
                    EvalContract(**settings),
                    work_dir=tmp_path / "work",
                    loop=asyncio.get_running_loop(),
                    executor=executor,
                    episode_id=options.pop("episode_id", "episode-0"),
                    **options,
                )

        try:
            return asyncio.run(go())
        finally:
            left = list((tmp_path / "work").iterdir()) if (tmp_path / "work").exists() else []
            assert left == [] or options.get("keep")

    return run
