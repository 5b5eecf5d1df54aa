"""The harness' model over the gateway: messages in, one recorded turn, an assistant message with parsed actions out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from cooperbench.agents.mini_swe_agent_v2.exceptions import FormatError
from cooperbench.agents.mini_swe_agent_v2.models.litellm_model import LitellmModel
from cooperbench.agents.mini_swe_agent_v2.models.utils.actions_toolcall import BASH_TOOL, parse_toolcall_actions
from jinja2 import StrictUndefined, Template

from verl_opsd.cooperbench.stopping import RunGuard
from verl_opsd.cooperbench.types import ChatSession
from verl_opsd.tokens.gateway import Reply, Tools
from verl_opsd.tokens.records import TurnKind

Message = dict[str, Any]


class GatewayModel(LitellmModel):
    """Model protocol of the harness, used from an agent's worker thread.

    Args:
        session: the agent's session.
        loop: running event loop that the session belongs to.
        guard: stop signal and limits.
        templates: the ``model`` block of the harness' configuration.

    Attributes:
        prompt_tokens, completion_tokens: of all calls that were answered, whatever became of the reply: the harness drops
            malformed replies from its history, and later summaries too.
    """

    def __init__(self, session: ChatSession, *, loop: asyncio.AbstractEventLoop, guard: RunGuard, templates: Mapping[str, Any]):
        super().__init__(model_name="gateway", **templates)
        self._session, self._loop, self._guard = session, loop, guard
        self.prompt_tokens = self.completion_tokens = 0

    def query(self, messages: list[Message], **kwargs: Any) -> Message:
        """One policy turn.

        Raises:
            FormatError: (harness) the reply holds no valid tool call; its turn is marked ``malformed``.
            ContextOverflow, InfraFault, PairStopped, WallLimitReached: as the session and the guard raise them.
        """
        reply = self._chat(self._prepare_messages_for_api(messages), [BASH_TOOL], "policy")
        try:
            actions = self._parse_calls(reply.message.get("tool_calls") or [])
        except FormatError:
            self._mark(reply.turn, "malformed")
            raise
        return {**reply.message, "extra": self._extra(reply, actions=actions)}

    def summarize_context(self, messages: list[Message], summary_prompt: str) -> Message:
        """Summary of a history, asked for as the harness asks for it; a turn of kind ``summarizer``."""
        transcript = self._serialize_transcript_for_summary(self._prepare_messages_for_api(messages))
        content = f"{summary_prompt}\n\n--- BEGIN TRANSCRIPT ---\n{transcript}\n--- END TRANSCRIPT ---"
        reply = self._chat([{"role": "user", "content": content}], None, "summarizer")
        summary = reply.message.get("content") or ""
        return {"role": "assistant", "content": summary, "extra": self._extra(reply, summary=True)}

    def _prepare_messages_for_api(self, messages: list[Message]) -> list[Message]:
        # After a nudge the harness leaves its own `exit` message in the history; no chat template knows that role.
        return super()._prepare_messages_for_api([m for m in messages if m.get("role") != "exit"])

    def _chat(self, messages: list[Message], tools: Tools, kind: TurnKind) -> Reply:
        self._guard.check()
        call = self._session.chat(messages, tools, kind=kind)
        reply: Reply = self._guard.result(asyncio.run_coroutine_threadsafe(call, self._loop))
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        return reply

    def _mark(self, turn: int, kind: TurnKind) -> None:
        async def mark() -> None:
            self._session.mark(turn, kind)

        self._guard.result(asyncio.run_coroutine_threadsafe(mark(), self._loop))

    def _extra(self, reply: Reply, **more: Any) -> dict[str, Any]:
        response = {"usage": {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}}
        return {**more, "response": response, "turn": reply.turn, "cost": 0.0, "timestamp": time.time()}

    def _parse_calls(self, tool_calls: Sequence[Message]) -> list[Message]:
        calls = [SimpleNamespace(id=c["id"], function=SimpleNamespace(**c["function"])) for c in tool_calls]
        for call in calls:
            self._require_strings(call.function.arguments)
        actions = parse_toolcall_actions(calls, format_error_template=self.config.format_error_template)
        for action, call in zip(actions, calls, strict=True):
            action |= {"tool_name": call.function.name, "tool_call_id": call.id}  # arguments may not rename a call
        return actions

    def _require_strings(self, arguments: str) -> None:
        """The harness assumes that arguments are an object of strings and breaks where they are not."""
        try:
            values = json.loads(arguments)
        except ValueError:
            return  # the harness' own parser reports this
        error = ""
        if not isinstance(values, dict):
            error = "Tool call arguments must be a JSON object."
        else:
            wrong = [k for k in ("command", "recipient", "content") if not isinstance(values.get(k, ""), str)]
            if wrong:
                error = f"Argument '{wrong[0]}' must be a string."
        if error:
            content = Template(self.config.format_error_template, undefined=StrictUndefined).render(error=error)
            raise FormatError({"role": "user", "content": content, "extra": {"interrupt_type": "FormatError"}})
