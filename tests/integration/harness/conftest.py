"""A pocket task, and a way to play one pair with two scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted_pair import Script

import verl_opsd
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.harness import run_pair
from verl_opsd.cooperbench.prepare import prepare
from verl_opsd.cooperbench.types import PairRun, PairTask, PreparedTask

POCKET = Path(verl_opsd.__file__).parent / "cooperbench" / "pocket"


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
