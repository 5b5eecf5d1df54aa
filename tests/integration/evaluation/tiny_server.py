"""``python tiny_server.py STUDENT PORT_FILE FIELD=VALUE...``: a student in the embedded engine, behind the gateway's HTTP face, as one endpoint.

The gateway gives each session an address of its own; here a conversation is told by its first messages, as its only address is ``/v1``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import numpy as np
from fastapi import Request, Response
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_opsd.cli.evaluate import named_contract
from verl_opsd.cooperbench.habits import mini_swe_habits
from verl_opsd.tokens.gateway import Gateway, Generation
from verl_opsd.tokens.http import Access, GatewayServer
from verl_opsd.tokens.records import Sampling
from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder, model_type_of
from verl_opsd.verl_adapter.rollout import engine_core, kv
from verl_opsd.verl_adapter.rollout.engine_thread import EngineThread
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams


class Embedded:
    """The gateway's engine over an engine's thread."""

    def __init__(self, core: engine_core.EngineCore):
        self._thread, self._calls = EngineThread(core), 0

    async def generate(self, prompt_ids: list[int], *, session: str, turn: int, sampling: Sampling) -> Generation:
        self._calls += 1
        how = SamplingParams(sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k)
        request = engine_core.Request(str(self._calls), np.array(prompt_ids, np.int32), how, session, turn)
        reply = await asyncio.wrap_future(self._thread.generate(request))
        return Generation(reply.token_ids, reply.logprobs, reply.stop_reason, 0)


async def serve(student: Path, port_file: Path, fields: list[str]) -> None:
    contract, tokenizer = named_contract("local", fields), AutoTokenizer.from_pretrained(student)
    model = AutoModelForCausalLM.from_pretrained(student, attn_implementation=kv.ATTENTION).eval().requires_grad_(False)
    engine = Embedded(engine_core.EngineCore(model, {tokenizer.eos_token_id}, contract.context_length))
    parser = VerlReplyParser(tokenizer, contract.tool_parser)
    gateway = Gateway(engine, VerlTokenBuilder(tokenizer, model_type_of(student)), parser, contract)
    conversations: dict[str, Access] = {}
    async with GatewayServer(gateway) as server, httpx.AsyncClient(trust_env=False, timeout=120) as client:

        @server.app.get("/v1/models")
        async def models() -> dict[str, object]:
            return {"data": [{"id": "tiny", "max_model_len": contract.context_length}]}

        @server.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            first = str((await request.json())["messages"][:2])
            if first not in conversations:
                conversations[first] = server.open("endpoint", f"agent{len(conversations)}", mini_swe_habits())
            access = conversations[first]
            headers = {"Authorization": f"Bearer {access.secret}"}
            answer = await client.post(f"{access.url}/chat/completions", content=await request.body(), headers=headers)
            return Response(answer.content, answer.status_code, media_type="application/json")

        port_file.with_suffix(".tmp").write_text(str(server._port))
        port_file.with_suffix(".tmp").rename(port_file)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
