"""What may pass the inference boundary: messages that a prompt can hold, replies that are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from verl_opsd.errors import InfraFault, OpsdError

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def canonical(message: Message) -> dict[str, Any]:
    """The parts of a message that a prompt can hold: no ``extra``, no None, content always text.

    Raises:
        OpsdError: a role that is not the model's (``exit``), or content that is not text.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise OpsdError(
            f"a message of role {role!r}",
            f"a model reads messages of the roles {', '.join(ROLES)}",
            "drop the harness's own messages (role exit) before the call",
        )
    if not isinstance(content, str | None):
        raise OpsdError(
            f"a {role} message with content of type {type(content).__name__}",
            "content is text",
            "give the message's text as one string",
        )
    rest = {k: v for k, v in message.items() if v is not None and k != "extra" and (k != "tool_calls" or v)}
    return {**rest, "role": role, "content": content or ""}


def check_reply(ids: Sequence[int], logprobs: Sequence[float], max_tokens: int, where: str) -> None:
    """Refuses a reply of an engine that is not exact.

    Raises:
        InfraFault: ``engine_bad_reply``: no ids, more than asked for, or an id without a finite log-probability.
    """
    problem = ""
    if not ids:
        problem = "no token ids"
    elif len(ids) != len(logprobs):
        problem = f"{len(ids)} ids with {len(logprobs)} log-probabilities"
    elif len(ids) > max_tokens:
        problem = f"{len(ids)} ids where at most {max_tokens} were asked for"
    elif any(isinstance(t, bool) or not isinstance(t, Integral) or t < 0 for t in ids):
        problem = "token ids that are not non-negative integers"
    elif not all(math.isfinite(x) for x in logprobs):
        problem = f"log-probability {next(x for x in logprobs if not math.isfinite(x))}"
    if problem:
        raise InfraFault(
            "engine_bad_reply",
            f"{where}: the engine gave {problem}",
            "a reply has at least one id and a finite log-probability for each",
            "check the engine's log-probability settings and its weights",
        )
