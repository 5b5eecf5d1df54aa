"""Episodes per minute of the environment alone: a policy that answers at once, 1, 4 and 16 pairs at the same time.

    python benchmarks/episodes.py [--at-once 1 4 16] [--graders N] [--think 0]

Both agents of a pair read a file, apply their feature's gold patch, run tests, open a pull request and submit: eight turns through the
real gateway, sandboxes, harness, remote and grader, on pocket tasks. ``--think`` is what a reply takes, in seconds. Below each rate
stands where a pair's time goes (seconds of wall time, agents at the same time; ``agents`` holds ``commands`` and ``gateway`` of both;
``grade`` includes waiting for a grading process), and the processor time of the Python process that drives all pairs, which is what can
become a bottleneck: agents' commands, graders and hidden tests are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import functools
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import RESULTS, machine

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.dataset import load_subset
from verl_opsd.cooperbench.episode import run_episode
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.identity import load_harness
from verl_opsd.cooperbench.prepare import load_prepared, prepare
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.models.tiny import make_tokenizer
from verl_opsd.paths import cache_dir
from verl_opsd.tokens import Gateway, Generation
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder

PHASES = ("open", "agents", "close", "grade", "commands", "gateway", "queue")
PR = 'git add -A && git commit -qm work && git push -q && gh pr create --title "work" --body "work"'
CONTRACT = EvalContract(step_limit=20, max_tokens=4096, context_length=65536, concurrency=64)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Clock:
    """Seconds by phase, over all pairs and threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, phase: str, seconds: float) -> None:
        with self._lock:
            self.seconds[phase] += seconds

    def around(self, phase: str, function: Callable) -> Callable:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(phase, time.monotonic() - begin)

        return timed

    def awaiting(self, phase: str, function: Callable) -> Callable:
        """The coroutine function, timed."""

        async def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            try:
                return await function(*args, **kwargs)
            finally:
                self.add(phase, time.monotonic() - begin)

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times the pair's phases and its agents' commands."""
        from verl_opsd.cooperbench.environment import SandboxEnvironment
        from verl_opsd.cooperbench.pair import PairPlace

        places = ((PairPlace, "open", "open"), (PairPlace, "open_agent", "open"), (PairPlace, "run_agent", "agents"))
        places += ((PairPlace, "close", "close"), (SandboxEnvironment, "execute", "commands"))  # type: ignore[assignment]
        real = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, phase in places:
            setattr(owner, name, self.around(phase, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in real:
                setattr(owner, name, function)


class Solver:
    """Plays one agent's commands as tool calls, token by token as a model would write them."""

    def __init__(self, tokenizer: Any, pair: PairTask, think_s: float):
        self._think_s = think_s
        self._replies = {}
        for agent, feature in zip(("agent1", "agent2"), pair.features, strict=True):
            patch = (pair.task_dir / f"feature{feature}" / "feature.patch").read_text()
            commands = ["ls -R | head -50", "git log --oneline", f"git apply <<'EOF'\n{patch}EOF", "git diff --stat"]
            commands += ["python -m pytest -q -p no:cacheprovider 2>&1 | tail -3", "git status --short", PR, SUBMIT]
            calls = [json.dumps({"name": "bash", "arguments": {"command": c}}) for c in commands]
            self._replies[agent] = [tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>") for call in calls]

    async def generate(self, prompt_ids: list[int], *, session: str, turn: int, sampling: Any) -> Generation:
        await asyncio.sleep(self._think_s)
        ids = self._replies[session.split("/")[1]][turn]
        return Generation(list(ids), [-1.0] * len(ids), "stop", 0)


async def one(pair: PairTask, number: int, clock: Clock, pools: tuple, tokenizer: Any, think_s: float, work: Path) -> float:
    """One episode with its grade; its reward."""
    slots, agents, grading = pools
    queued = time.monotonic()
    async with slots:
        clock.add("queue", time.monotonic() - queued)
        solver = Solver(tokenizer, pair, think_s)
        gateway = Gateway(solver, VerlTokenBuilder(tokenizer, "qwen3"), VerlReplyParser(tokenizer, "hermes"), CONTRACT)
        sessions = {a: gateway.session(f"episode{number}", a) for a in ("agent1", "agent2")}
        for session in sessions.values():
            session.chat = clock.awaiting("gateway", session.chat)  # type: ignore[method-assign]
        prepared = load_prepared(cache_dir(), pair.repo, pair.task_id)
        name = f"episode{number}"
        episode, fault = await run_episode(
            pair, prepared, sessions, CONTRACT, episode_id=name, work_dir=work, agents=agents, grading=grading
        )
        assert fault is None and episode.grade is not None, fault
        return episode.grade.reward


async def at_once(
    width: int, graders: int | None, pairs: list[PairTask], tokenizer: Any, think_s: float, work: Path
) -> list[str]:
    """Lines of the table for one number of pairs at once."""
    count, clock = max(4, 2 * width) if width < 16 else width, Clock()
    grading = GradingPool(graders or GradingPool.size(width))
    chosen = [pairs[i % len(pairs)] for i in range(count)]
    warm = [grading.grade(p, load_prepared(cache_dir(), p.repo, p.task_id), ["", ""], CONTRACT) for p in chosen]
    await asyncio.gather(*warm)  # every process has imported the harness
    grading.grade = clock.awaiting("grade", grading.grade)  # type: ignore[method-assign]
    with ThreadPoolExecutor(2 * width) as agents, contextlib.closing(grading), clock.watching():
        pools = (asyncio.Semaphore(width), agents, grading)
        begin, cpu = time.monotonic(), time.process_time()
        rewards = await asyncio.gather(*(one(p, i, clock, pools, tokenizer, think_s, work) for i, p in enumerate(chosen)))
        seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    where = "  ".join(f"{phase} {clock.seconds[phase] / count:.2f}" for phase in PHASES)
    return [
        f"{width:>3} at once: {60 * count / seconds:6.1f} episodes a minute ({count} episodes, {seconds:.0f} s, {sum(rewards):.1f} points)",
        f"     seconds a pair: {where}; this process' processor {cpu / count:.2f}",
    ]


async def main() -> None:
    """Prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--graders", type=int, help="grading processes; as in a run, when left out")
    parser.add_argument("--think", type=float, default=0.0)
    args = parser.parse_args()
    load_harness()
    pairs = load_subset("pocket_train", split="train")
    for task_dir in sorted({p.task_dir for p in pairs}):
        prepare(task_dir, None, cache_dir())
    tokenizer = make_tokenizer()
    lines = [f"{datetime.date.today()}, {machine()}: python benchmarks/episodes.py, a reply takes {args.think:g} s", ""]
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as work:
        for width in args.at_once:
            new = await at_once(width, args.graders, pairs, tokenizer, args.think, Path(work))
            print("\n".join(new), flush=True)
            lines += new
    (RESULTS / "episodes.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
