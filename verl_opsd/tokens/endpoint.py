"""An engine behind a URL: token ids to a server that speaks vLLM's completions API, token ids and log-probabilities back.

Nothing is tokenized here or there. The server must echo the prompt's ids and give the reply's (``return_token_ids``).
"""

from __future__ import annotations

from typing import Any

import httpx

from verl_opsd.errors import InfraFault
from verl_opsd.tokens.gateway import Generation
from verl_opsd.tokens.records import Sampling


class EndpointEngine:
    """:class:`verl_opsd.tokens.gateway.Engine` over ``{url}/v1/completions``. A cancelled call closes its connection, upon which
    the server drops the request.

    Args:
        url: of the server, without ``/v1``. model: the name that it serves the policy under.
        version: of the served weights; their owner sets it when they change.
    """

    def __init__(self, url: str, model: str, *, api_key: str = "", timeout_s: float = 1800.0, version: int = 0):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model, self.version = model, version
        self._http = httpx.AsyncClient(base_url=f"{url.rstrip('/')}/v1", headers=headers, timeout=timeout_s)

    async def generate(self, prompt_ids: list[int], *, session: str, turn: int, sampling: Sampling) -> Generation:
        """One reply.

        Raises:
            InfraFault: ``engine_bad_reply``: other prompt ids than were sent, or no ids of the reply.
            httpx.HTTPError: the server does not answer, or refuses.
        """
        choice = await self.complete(
            prompt_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return Generation(choice["token_ids"], logprobs, str(choice.get("finish_reason")), self.version)

    async def complete(self, prompt_ids: list[int], **options: Any) -> dict[str, Any]:
        """The first choice of one completion, whose ids are checked. ``options``: fields of the request."""
        body = {"model": self.model, "prompt": prompt_ids, "logprobs": 0, "return_token_ids": True, **options}
        answer = (await self._http.post("/completions", json=body)).raise_for_status().json()
        choice = answer["choices"][0]
        echoed = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if echoed != prompt_ids or not choice.get("token_ids"):
            given = "no prompt ids" if echoed is None else f"{len(echoed)} prompt ids"
            raise InfraFault(
                "engine_bad_reply",
                f"{self.model}: {given} for {len(prompt_ids)} that were sent, {len(choice.get('token_ids') or [])} reply ids",
                "a server echoes exactly the prompt's ids and gives the reply's",
                "serve with vLLM 0.10.2 or later, which knows return_token_ids",
            )
        return choice

    async def get(self, path: str) -> dict[str, Any]:
        """A resource below ``/v1``."""
        return (await self._http.get(path)).raise_for_status().json()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts to a path below ``/v1``."""
        return (await self._http.post(path, json=body)).raise_for_status().json()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()
