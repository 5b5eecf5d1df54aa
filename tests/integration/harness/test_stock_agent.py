"""The package's own `mini_swe_agent_v2`, unmodified, through litellm against the HTTP gateway: same records as in process."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from docker_stand_in import DockerStandIn
from scripted_pair import PR, SUBMIT, ScriptedEngine
from test_harness_pair import ONE

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.identity import load_harness
from verl_opsd.cooperbench.sandbox.host import require_host
from verl_opsd.cooperbench.stopping import RunGuard, StopSignal
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.gateway import Generation
from verl_opsd.tokens.http import GatewayServer

CONTRACT = EvalContract(max_tokens=1000, context_length=60_000)
SOLVE = ["no call", "ls", "printf '\\xb3\\n'", "echo one > one.txt", PR, SUBMIT]
CASES = {
    "solve": (SOLVE, {}, 0),
    "compaction": (["ls", "echo b", "no call", "echo c", *SOLVE[3:]], {"compaction_token_trigger": 1}, 0),
    "engine restarts": (SOLVE[3:], {}, 1),
}


class Player(ScriptedEngine):
    """Plays its replies in order, and a summary where one is asked for; dies a number of times at its second turn."""

    def __init__(self, replies: list[str], failures: int):
        super().__init__(replies)
        self.failures, self.played = failures, 0

    async def generate(self, prompt_ids, *, session, turn, sampling):
        if turn == 1 and self.failures:
            self.failures -= 1
            raise ConnectionError("restarting")
        if b"BEGIN TRANSCRIPT" in bytes(prompt_ids):
            return Generation(list(b"a summary"), [-1.0] * 9, "stop", 0)
        self.played += 1
        return await super().generate(prompt_ids, session=session, turn=self.played - 1, sampling=sampling)


@pytest.fixture
def stock(prepared, tmp_path, monkeypatch):
    """Runs the package's runner with a model's settings; a container is a sandbox."""
    try:
        require_host()
    except OpsdError as error:
        pytest.skip(f"no bubblewrap sandbox on this host: {error}")
    load_harness()
    from cooperbench.agents.mini_swe_agent_v2.adapter import MiniSweAgentV2Runner

    with DockerStandIn(tmp_path / "docker", prepared.base) as docker:
        monkeypatch.setenv("PATH", docker.path, prepend=":")

        def run(agent: dict, model_kwargs: dict):
            limits = {"step_limit": 9, **agent}
            config = {"backend": "docker", "agent": limits, "model": {"model_kwargs": model_kwargs}}
            runner = MiniSweAgentV2Runner()
            return runner.run("Write one.txt.", "image", agent_id="agent1", model_name="openai/student", config=config)

        yield run
        assert {call[0] for call in docker.calls} >= {"run", "exec"}


def over_http(stock, engine, agent):
    async def go():
        from verl_opsd.cooperbench.habits import mini_swe_habits

        async with GatewayServer(engine.gateway(CONTRACT)) as server:
            access = server.open("e", "agent1", mini_swe_habits())
            kwargs = {"api_base": access.url, "api_key": access.secret}
            result = await asyncio.to_thread(stock, agent, kwargs)
            return result, access.session.records(), access.faults

    return asyncio.run(go())


def in_process(stock, engine, agent, monkeypatch):
    """The same agent with the model of the agent loop in the place of litellm's."""
    from cooperbench.agents.mini_swe_agent_v2 import adapter

    from verl_opsd.cooperbench.model import GatewayModel

    async def go():
        session, loop = engine.gateway(CONTRACT).session("e", "agent1"), asyncio.get_running_loop()
        guard = RunGuard(StopSignal(), 120.0, lambda: None)
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(
                adapter, "LitellmModel", lambda model_name, **c: GatewayModel(session, loop=loop, guard=guard, templates=c)
            )
            result = await loop.run_in_executor(pool, stock, agent, {})
        return result, session.records()

    return asyncio.run(go())


def plain(turn) -> dict:
    fields = dataclasses.asdict(turn) | {"t_start": None, "t_end": None}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}


@pytest.mark.parametrize("case", ["solve", "compaction", pytest.param("engine restarts", marks=pytest.mark.slow)])
def test_the_stock_agent_over_http_gives_the_records_of_the_in_process_path(stock, monkeypatch, case):
    replies, agent, failures = CASES[case]
    first, direct = in_process(stock, Player(replies, 0), agent, monkeypatch)
    second, records, faults = over_http(stock, Player(replies, failures), agent)
    assert (second.status, second.error) == (first.status, first.error) == ("Submitted", None)
    assert first.patch == second.patch == ONE
    assert [plain(t) for t in records] == [plain(t) for t in direct]
    kinds = [t.kind for t in records]
    assert kinds.count("malformed") == replies.count("no call")
    # Refused replies and summaries (9 tokens each) are counted like others; a token is a byte here.
    assert sum(len(t.response_ids) for t in records) == sum(map(len, replies)) + 9 * kinds.count("summarizer")
    assert ("summarizer" in kinds) is ("compaction" in {t.fork_reason for t in records}) is (case == "compaction")
    assert [f.kind for f in faults] == ["engine_died"] * failures
    assert [bytes(t.response_ids.tolist()).decode() for t in records][-1] == SUBMIT
