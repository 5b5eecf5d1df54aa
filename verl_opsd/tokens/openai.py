"""OpenAI's chat completions as data: requests checked at the edge, replies and stream chunks as plain objects.

A field that would change what the model does, and that the contract decides, must agree with it; a field that nothing here
reads is refused. Nothing is ignored but what clients keep for themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.gateway import Reply
from verl_opsd.tokens.records import Sampling

#: Keys of a message that a prompt can hold; and what clients add to replies that they send back, by the values that mean nothing.
_PROMPT_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_CLIENT_KEYS = frozenset({"provider_specific_fields", "annotations", "refusal", "audio", "function_call", "images"})

#: Name by which a session lists what it serves; a request may name it otherwise.
MODEL = "policy"


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk holds the token counts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class ChatRequest(BaseModel):
    """One request. ``model`` and ``user`` are names that decide nothing; ``return_token_ids`` is vLLM's: the exact ids of
    prompt and reply come back."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    n: Literal[1] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    return_token_ids: bool = False
    user: str | None = None

    @classmethod
    def parse(cls, body: bytes, sampling: Sampling) -> ChatRequest:
        """A checked request with messages as the gateway compares them.

        Raises:
            OpsdError: not a request, a field that nothing reads, or sampling that is not the contract's.
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:5])
            raise OpsdError(
                f"a chat completion request with {wrong}",
                f"the fields are {', '.join(cls.model_fields)}; a field that decides nothing here is not ignored",
                "leave the field out, or correct its value",
            ) from error
        asked = {
            "temperature": (request.temperature, sampling.temperature),
            "top_p": (request.top_p, sampling.top_p),
            "top_k": (request.top_k, sampling.top_k),
            "max_tokens": (request.max_tokens, sampling.max_tokens),
            "max_completion_tokens": (request.max_completion_tokens, sampling.max_tokens),
        }
        for name, (value, contract) in asked.items():
            if value is not None and value != contract:
                raise OpsdError(
                    f"{name}={value} in a request",
                    f"the contract decides how a reply is sampled, and says {contract}",
                    f"leave {name} out, or run under a contract that says {value}",
                )
        request.messages = [plain_message(m) for m in request.messages]
        request.tools = request.tools or None
        return request


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what clients keep for themselves, and its text as one string: a reply that a client sends back
    equals the reply that it got.

    Raises:
        OpsdError: a key with a value that a prompt can't hold (reasoning of its own, images).
    """
    plain: dict[str, Any] = {}
    for key, value in message.items():
        if key in _PROMPT_KEYS:
            plain[key] = value
        elif value and key not in _CLIENT_KEYS:
            raise OpsdError(
                f"a message with {key}={json.dumps(value)[:100]}",
                f"the prompt is made of {', '.join(sorted(_PROMPT_KEYS))}; what else a message holds would be lost",
                "put the text into content",
            )
    content = message.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        plain["content"] = "".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    if calls:
        if not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
            raise OpsdError(
                f"a message with tool_calls={json.dumps(calls)[:100]}",
                "a call is {id, type, function: {name, arguments}}, its arguments a JSON text",
                "send the calls of a reply back as they came",
            )
        plain["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {k: call["function"].get(k) for k in ("name", "arguments")},
            }
            for call in calls
        ]
    return plain


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and set(part) == {"type", "text"} and isinstance(part["text"], str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))


def completion(
    request: ChatRequest, reply: Reply, name: str, created: int, ids: tuple[list[int], list[int]] | None
) -> dict[str, Any]:
    """The answer to a request that does not stream. ``ids``: of prompt and reply, where they were asked for."""
    answer = _envelope(request, name, created, "chat.completion")
    choice: dict[str, Any] = {"index": 0, "message": reply.message, "finish_reason": _finish(reply)}
    answer |= {"choices": [choice], "usage": _usage(reply)}
    if ids is not None:
        answer["prompt_token_ids"], choice["token_ids"] = ids
    return answer


def chunks(
    request: ChatRequest, reply: Reply, name: str, created: int, ids: tuple[list[int], list[int]] | None
) -> Iterator[str]:
    """The same answer as server-sent events. The engine gives whole replies, so content and calls are one chunk each."""
    first: dict[str, Any] = {"role": "assistant", "content": reply.message.get("content") or ""}
    deltas: list[tuple[dict[str, Any], str | None]] = [(first, None)]
    for index, call in enumerate(reply.message.get("tool_calls", ())):
        deltas.append(({"tool_calls": [{"index": index, **call}]}, None))
    deltas.append(({}, _finish(reply)))
    for number, (delta, finish) in enumerate(deltas):
        chunk = _envelope(request, name, created, "chat.completion.chunk")
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if ids is not None and number == 0:
            chunk["prompt_token_ids"], choice["token_ids"] = ids
        yield _event(chunk | {"choices": [choice]})
    if request.stream_options and request.stream_options.include_usage:
        yield _event(_envelope(request, name, created, "chat.completion.chunk") | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def models(context_length: int) -> dict[str, Any]:
    """The list of models: one, whose name decides nothing; ``max_model_len`` is vLLM's, in tokens."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl-opsd", "max_model_len": context_length}
    return {"object": "list", "data": [one]}


def error_body(message: str, kind: str, code: str) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _envelope(request: ChatRequest, name: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": created, "model": request.model}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _finish(reply: Reply) -> str:
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return "length" if reply.stop_reason == "length" else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens, "total_tokens": total}
