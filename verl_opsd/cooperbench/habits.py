"""What the package's own agent, run unmodified over HTTP, does not say in its requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cooperbench.agents.mini_swe_agent_v2.exceptions import FormatError
from cooperbench.agents.mini_swe_agent_v2.models.utils.actions_toolcall import parse_toolcall_actions

from verl_opsd.tokens.boundary import Message
from verl_opsd.tokens.gateway import Tools
from verl_opsd.tokens.http import Habits
from verl_opsd.tokens.records import TurnKind

#: How the harness frames a history that is to be summarised.
TRANSCRIPT = "--- BEGIN TRANSCRIPT ---"


def mini_swe_habits() -> Habits:
    """Of ``mini_swe_agent_v2``: a summary is asked for without tools, and a reply that its parser refuses is dropped."""
    return Habits(kind=_kind, malformed=_malformed)


def _kind(messages: list[dict[str, Any]], tools: Tools) -> TurnKind:
    alone = not tools and len(messages) == 1
    return "summarizer" if alone and TRANSCRIPT in str(messages[0].get("content")) else "policy"


def _malformed(message: Message) -> bool:
    calls = [SimpleNamespace(id=c["id"], function=SimpleNamespace(**c["function"])) for c in message.get("tool_calls", ())]
    try:
        parse_toolcall_actions(calls, format_error_template="{{ error }}")
    except FormatError:
        return True
    return False
