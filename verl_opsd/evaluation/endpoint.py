"""Pairs whose agents are served by an OpenAI-compatible endpoint: messages in, replies out, through the same environment.

No token ids pass here, so nothing of such a run can be trained on; token counts come from the endpoint's own ``usage``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.episode import run_episode
from verl_opsd.cooperbench.grading_pool import GradingPool
from verl_opsd.cooperbench.harness import AGENTS
from verl_opsd.cooperbench.identity import load_harness
from verl_opsd.cooperbench.prepare import load_prepared
from verl_opsd.cooperbench.quarantine import Quarantine
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.evaluation.plan import Progress, episode_id, missing, record_fault
from verl_opsd.paths import cache_dir
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.boundary import Message, canonical
from verl_opsd.tokens.gateway import ContextOverflow, Reply, Tools
from verl_opsd.tokens.records import TurnKind, TurnRecord
from verl_opsd.tokens.store import EpisodeStore

#: Tries of a request that the endpoint did not answer, and the seconds before each further one.
PAUSES_S = (0.0, 2.0, 8.0)
_OVERFLOW = ("context length", "context_length", "maximum context", "too long")


class EndpointSession:
    """One agent's calls (``cooperbench.episode.RecordedSession``)."""

    def __init__(self, client: httpx.AsyncClient, model: str, contract: EvalContract, pauses: Sequence[float] = PAUSES_S):
        self._client, self._model, self._contract, self._pauses = client, model, contract, pauses
        self._turns = 0

    async def chat(self, messages: Sequence[Message], tools: Tools = None, *, kind: TurnKind = "policy") -> Reply:
        """One model call under the contract's sampling.

        Raises:
            ContextOverflow: the endpoint refused the prompt for its length.
            InfraFault: ``endpoint_died`` (no answer, or a server error, three times), ``endpoint_refused``, or
                ``endpoint_bad_reply``: no chat completion, or one that does not say how many tokens it read and wrote.
        """
        c = self._contract
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [canonical(m) for m in messages],
            "temperature": c.temperature,
            "top_p": c.top_p,
            "max_tokens": c.max_tokens,
        }
        if c.top_k != -1:
            body["top_k"] = c.top_k
        if tools:
            body["tools"] = list(tools)
        answer = await self._post(body)
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            reply = {
                k: v for k, v in choice["message"].items() if k in ("role", "content", "tool_calls", "reasoning_content") and v
            }
            read, written = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            finish = str(choice.get("finish_reason") or "stop")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _fault(
                "endpoint_bad_reply", self._client, f"no reply, or one without its token counts: {str(answer)[:500]}"
            ) from error
        self._turns += 1
        return Reply({"role": "assistant", "content": "", **reply}, self._turns - 1, read, written, finish)

    def mark(self, turn: int, kind: TurnKind) -> None:
        """Nothing is recorded here that has a kind."""

    def records(self) -> tuple[TurnRecord, ...]:
        """None: no token ids pass here."""
        return ()

    async def _post(self, body: dict[str, Any]) -> Any:
        why = ""
        for pause in self._pauses:
            await asyncio.sleep(pause)
            try:
                response = await self._client.post("chat/completions", json=body, timeout=self._contract.wall_limit_s)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError as error:
                    raise _fault("endpoint_bad_reply", self._client, f"no JSON: {response.text[:500]!r}") from error
            why = f"status {response.status_code}: {response.text[:500]}"
            if response.status_code == 400 and any(words in response.text.lower() for words in _OVERFLOW):
                raise ContextOverflow(
                    why, "prompt and reply fit into the server's context", "use a contract with a shorter context"
                )
            if response.status_code < 500 and response.status_code not in (408, 429):
                raise _fault("endpoint_refused", self._client, why)
        raise _fault("endpoint_died", self._client, why)


def _fault(kind: str, client: httpx.AsyncClient, why: str) -> InfraFault:
    return InfraFault(kind, f"{client.base_url}: {why}", "an endpoint answers every call", "read its log, and run again")


async def warm_up(client: httpx.AsyncClient, model: str, contract: EvalContract) -> None:
    """One call with the agents' tool, before any pair: a cold or wrongly configured server is not measured.

    Raises:
        OpsdError: nothing answers, the model is not served, its limit is below the contract's, the call failed, or a tool call came as text.
    """
    load_harness()  # the import below would fetch a price list otherwise
    from cooperbench.agents.mini_swe_agent_v2.models.utils.actions_toolcall import BASH_TOOL

    try:
        listed = await client.get("models", timeout=60)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OpsdError(
            f"{client.base_url}: {type(error).__name__}: {error}",
            "an endpoint is the address of a server that answers, http://HOST:PORT/v1",
            "correct the address, or start the server",
        ) from error
    if listed.status_code != 200:
        raise OpsdError(
            f"{listed.url}: status {listed.status_code}: {listed.text[:200]}",
            "an endpoint lists its models and their limits",
            "correct the address or the key, or read the server's log",
        )
    try:
        served = {m["id"]: m for m in listed.json()["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise OpsdError(
            f"{listed.url}: {listed.text[:200]!r}", "an endpoint lists its models as OpenAI's does", "correct the address"
        ) from error
    if model not in served:
        raise OpsdError(f"{client.base_url} serves {sorted(served)}", f"--model {model} is one of them", "name a served model")
    limit = served[model].get("max_model_len")
    if limit is not None and limit < contract.context_length:
        raise OpsdError(
            f"max_model_len {limit} of {client.base_url}",
            f"the contract's context_length is {contract.context_length}",
            "serve it with a longer context, or choose another contract",
        )
    ask = [{"role": "user", "content": "Use the bash tool to run: echo ready"}]
    try:
        reply = await EndpointSession(client, model, contract).chat(ask, [BASH_TOOL])
    except (InfraFault, ContextOverflow) as error:
        raise OpsdError(f"warm-up: {error.what}", "the endpoint answers before a pair is run", "see its log") from error
    text = reply.message.get("content") or ""
    if not reply.message.get("tool_calls") and ("<tool_call>" in text or "<function=" in text):
        raise OpsdError(
            f"warm-up: a tool call came as text: {text[:200]!r}",
            "the server parses tool calls; otherwise every agent would fail by its format",
            f"start the server with its tool parser ({contract.tool_parser})",
        )


async def run_plan(
    run: RunDir,
    pairs: Sequence[PairTask],
    seeds: int,
    contract: EvalContract,
    session: Callable[[], EndpointSession],
    *,
    retries: int,
    allow_unsafe: bool,
    work_dir: Path,
) -> None:
    """Runs every pair x seed that is not on record, ``contract.concurrency`` at once; faults run again up to ``retries`` times."""
    store = EpisodeStore(run.episodes, contract)
    rows = [p for p in pairs for _ in range(seeds)]
    slots, progress = asyncio.Semaphore(contract.concurrency), Progress(store, len(rows))
    grading, quarantine = GradingPool(GradingPool.size(contract.concurrency)), Quarantine(run.path)
    with ThreadPoolExecutor(2 * contract.concurrency) as agents, contextlib.closing(grading):

        async def one(index: int) -> None:
            pair = rows[index]
            async with slots:
                for attempt in range(retries + 1):
                    episode, fault = await run_episode(
                        pair,
                        load_prepared(cache_dir(), pair.repo, pair.task_id),
                        {agent: session() for agent in AGENTS},
                        contract,
                        episode_id=episode_id(index),
                        work_dir=work_dir,
                        agents=agents,
                        grading=grading,
                        allow_unsafe=allow_unsafe,
                        quarantine=quarantine,
                    )
                    if fault is None:
                        break
                    record_fault(run, episode, attempt, str(fault))
                await asyncio.to_thread(run.store_episode, store, episode)
                progress.look()

        await asyncio.gather(*(one(i) for i in missing(run, store)))
