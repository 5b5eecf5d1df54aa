"""The gateway's second face: OpenAI-compatible chat completions over HTTP, for harnesses that this project does not control.

Same sessions, same records as in process. Loopback only; each session has an address and a secret of its own. A call either
becomes a whole turn or leaves nothing: a client that goes away, a timeout and a dead engine all end the engine's call.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens.boundary import Message
from verl_opsd.tokens.gateway import ContextOverflow, Gateway, Reply, Session, SessionBusy, Tools
from verl_opsd.tokens.openai import ChatRequest, chunks, completion, error_body, models
from verl_opsd.tokens.records import TurnKind

#: Connections that may wait to be accepted; the kernel's own limit may be lower.
BACKLOG = 1024
CLIENT_GONE = 499


@dataclass(frozen=True)
class HttpLimits:
    """Attributes:
    active: calls that are with the engine at once.
    queued: calls that wait for that; one more is answered 429 with Retry-After.
    timeout_s: seconds that one call may take, its waiting included; then 504, and the engine's call is cancelled.
    body_bytes: size of a request.
    """

    active: int = 64
    queued: int = 1024
    timeout_s: float = 1800.0
    body_bytes: int = 64 << 20


@dataclass(frozen=True)
class Habits:
    """What plain chat completions do not say about a harness.

    Attributes:
        kind: the kind of a call, from its messages and tools.
        malformed: whether the harness will refuse this reply and drop it from its history.
    """

    kind: Callable[[list[dict[str, Any]], Tools], TurnKind] = lambda messages, tools: "policy"
    malformed: Callable[[Message], bool] = lambda message: False


@dataclass
class Access:
    """One open session: where its harness finds it, and what happened. A harness retries by itself, so its owner asks
    ``faults`` whether an outcome is the model's at all."""

    session: Session
    url: str
    secret: str
    habits: Habits
    faults: list[InfraFault] = field(default_factory=list)


class Full(Exception):
    """The queue is full; ``retry_after_s`` says when it should have moved."""

    def __init__(self, retry_after_s: int):
        super().__init__(f"all places are taken; come back in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class _Places:
    """``active`` calls at once, ``queued`` more that wait; first come, first served."""

    def __init__(self, limits: HttpLimits):
        self._limits, self._free = limits, asyncio.Semaphore(limits.active)
        self._waiting, self._seconds = 0, 1.0

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        if self._free.locked() and self._waiting >= self._limits.queued:
            raise Full(max(1, math.ceil(self._seconds * self._waiting / self._limits.active)))
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        started = time.monotonic()
        try:
            yield
        finally:
            self._free.release()
            self._seconds += 0.1 * (time.monotonic() - started - self._seconds)


class _Server(uvicorn.Server):
    """Leaves the process' signals to their owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """Serves sessions of one gateway from the running event loop: ``async with GatewayServer(gateway) as server``.

    Args:
        host: an address of this machine's loopback. port: 0 takes a free one.

    Raises:
        OpsdError: another host than loopback: agents' prompts and an engine would be open to the network.
    """

    def __init__(self, gateway: Gateway, *, limits: HttpLimits | None = None, host: str = "127.0.0.1", port: int = 0):
        if not _is_loopback(host):
            raise OpsdError(
                f"a gateway on host {host!r}",
                "the gateway serves loopback addresses only",
                "use 127.0.0.1 or ::1; reach it from elsewhere through a tunnel of your own (ssh -L)",
            )
        self.gateway, self.limits, self._host, self._port = gateway, limits or HttpLimits(), host, port
        self._open: dict[str, Access] = {}
        self._calls: set[asyncio.Task[Response]] = set()
        self._ending = False
        self._places = _Places(self.limits)
        self.app = FastAPI(openapi_url=None)
        self.app.post("/sessions/{session_id}/v1/chat/completions")(self._completions)
        self.app.get("/sessions/{session_id}/v1/models")(self._models)

    async def __aenter__(self) -> GatewayServer:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        self._port = self._socket.getsockname()[1]
        config = uvicorn.Config(self.app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.005)
            if self._task.done():
                self._task.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        for call in self._calls:
            call.cancel()
        self._server.should_exit = True
        await self._task
        self._socket.close()

    def open(self, episode_id: str, agent_id: str, habits: Habits | None = None) -> Access:
        """A new session with an address and a secret of its own."""
        name, host = secrets.token_hex(8), f"[{self._host}]" if ":" in self._host else self._host
        access = Access(
            session=self.gateway.session(episode_id, agent_id),
            url=f"http://{host}:{self._port}/sessions/{name}/v1",
            secret=secrets.token_urlsafe(32),
            habits=habits or Habits(),
        )
        self._open[name] = access
        return access

    def close(self, access: Access) -> None:
        """Takes the session's address away; its records stay with the caller."""
        self._open = {name: other for name, other in self._open.items() if other is not access}

    def _entered(self, session_id: str, request: Request) -> Access | None:
        """The session whose secret the request brings; None: there is no such session, or it is not its secret."""
        access = self._open.get(session_id)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        expected = access.secret if access else secrets.token_urlsafe(32)
        return access if secrets.compare_digest(given.encode(), expected.encode()) else None

    async def _models(self, session_id: str, request: Request) -> Response:
        if self._entered(session_id, request) is None:
            return _no_session()
        return JSONResponse(models(self.gateway.contract.context_length))

    async def _completions(self, session_id: str, request: Request) -> Response:
        access = self._entered(session_id, request)
        if access is None:
            return _no_session()
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.limits.body_bytes:
                return _refusal(413, f"more than {self.limits.body_bytes} bytes", "invalid_request_error", "too_large")
        if self._ending:
            return _refusal(503, "the gateway is ending", "server_error", "ending")
        call = asyncio.create_task(self._answer(access, bytes(body)))
        self._calls.add(call)
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({call, gone}, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            left = gone.done()
        finally:  # also when the server itself ends
            gone.cancel()
            call.cancel()
            await asyncio.wait({call})
            self._calls.discard(call)
        if not call.cancelled():
            return call.result()
        if left:
            return Response(status_code=CLIENT_GONE)
        if self._ending:
            return _refusal(503, "the gateway is ending", "server_error", "ending")
        return _refusal(504, f"no reply within {self.limits.timeout_s:g} s", "timeout", "timeout")

    async def _answer(self, access: Access, body: bytes) -> Response:
        try:
            request = ChatRequest.parse(body, self.gateway.sampling)
            async with self._places.take():
                reply = await self._turn(access, request)
        except Full as full:
            return _refusal(429, str(full), "rate_limit_error", "queue_full", full.retry_after_s)
        except SessionBusy as error:
            return _refusal(409, str(error), "invalid_request_error", "session_busy", 1)
        except ContextOverflow as error:
            limit = self.gateway.contract.context_length  # in the words by which clients know this error
            text = f"This model's maximum context length is {limit} tokens. {error}"
            return _refusal(400, text, "invalid_request_error", "context_length_exceeded")
        except InfraFault as fault:
            access.faults.append(fault)
            return _refusal(502 if fault.kind == "engine_bad_reply" else 503, str(fault), "infra_fault", fault.kind, 1)
        except OpsdError as error:
            return _refusal(400, str(error), "invalid_request_error", "invalid_request")
        name = f"chatcmpl-{access.session.episode_id}-{access.session.agent_id}-{reply.turn}"
        ids = None
        if request.return_token_ids:
            written = access.session.records()[reply.turn].response_ids.tolist()
            ids = (access.session.prompt_ids(reply.turn), written)
        if request.stream:
            events = chunks(request, reply, name, int(time.time()), ids)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(completion(request, reply, name, int(time.time()), ids))

    async def _turn(self, access: Access, request: ChatRequest) -> Reply:
        kind = access.habits.kind(request.messages, request.tools)
        reply = await access.session.chat(request.messages, request.tools, kind=kind)
        if kind == "policy" and access.habits.malformed(reply.message):
            access.session.mark(reply.turn, "malformed")
        return reply


async def _gone(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_session() -> Response:
    return _refusal(401, "no such session, or not its secret", "authentication_error", "invalid_api_key")


def _refusal(status: int, message: str, kind: str, code: str, retry_after_s: int | None = None) -> Response:
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse(error_body(message, kind, code), status_code=status, headers=headers)
