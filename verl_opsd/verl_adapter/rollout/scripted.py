"""``rollout.name=opsd_scripted``: the embedded server playing given replies, to drive every path of an environment.

The replies are forced through the model token by token, so caches, log-probabilities and records are as real as sampled
ones. The script (``rollout.engine_kwargs.opsd.script``, a JSON file) names the replies of every agent of every pair:

    {"<pair key>": {"agent1": [entry, ...], "agent2": [entry, ...]}}

An entry is one turn: a text, or an object with ``text``, a tool call (``command`` for the tool ``bash``, or ``tool``
and ``arguments``), or both; or ``{"fault": "die"}`` (the server process ends) or ``{"fault": "raise"}``. The session
of a request is ``<pair key>|<episode id>|<agent id>``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.rollout.engine_core import Request
from verl_opsd.verl_adapter.rollout.replica import EmbeddedReplica
from verl_opsd.verl_adapter.rollout.server import EmbeddedServer

Entry = str | dict[str, Any]
_FORMS = "a text, {text?, command}, {text?, tool, arguments}, {fault: die | raise}"


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the project's chat template renders it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


class Script:
    """Replies of all agents of all pairs.

    Raises:
        OpsdError: an entry that is none of the forms.
    """

    def __init__(self, replies: dict[str, dict[str, list[Entry]]]):
        self.replies = replies
        for pair, agents in replies.items():
            for agent, entries in agents.items():
                for turn, entry in enumerate(entries):
                    if not _well_formed(entry):
                        raise OpsdError(
                            f"script entry {entry!r} (pair {pair}, {agent}, turn {turn})",
                            f"an entry is {_FORMS}",
                            "correct the script",
                        )

    @classmethod
    def load(cls, path: str | None) -> Script:
        """Reads the JSON file.

        Raises:
            OpsdError: no path, no such file, not JSON, or a malformed entry.
        """
        way_out = "set rollout.engine_kwargs.opsd.script to a JSON file {pair: {agent: [reply, ...]}}"
        if not path or not Path(path).is_file():
            raise OpsdError(f"script {path!r}", "the scripted backend plays a script file", way_out)
        try:
            return cls(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as e:  # bytes that are no text, too
            raise OpsdError(f"script {path}: {e}", "a script is a JSON file", way_out) from e

    def entry(self, session: str | None, turn: int) -> Entry:
        """The entry of a turn.

        Raises:
            OpsdError: a session of another form, an unknown pair or agent, or a turn past the script's end.
        """
        parts = (session or "").rsplit("|", 2)
        if len(parts) != 3:
            raise OpsdError(
                f"session {session!r}",
                "the scripted backend needs a session '<pair key>|<episode id>|<agent id>' with every request",
                "pass session= and turn= to generate()",
            )
        pair, _, agent = parts
        entries = self.replies.get(pair, {}).get(agent, [])
        if not 0 <= turn < len(entries):
            raise OpsdError(
                f"pair {pair}, {agent}, turn {turn}: the script has {len(entries)} replies for it",
                "every turn that is asked for is in the script",
                f"add the reply, or end the episode earlier (pairs in the script: {sorted(self.replies)})",
            )
        return entries[turn]


def reply_text(entry: Entry) -> str:
    """The assistant's text of an entry that is not a fault."""
    if isinstance(entry, str):
        return entry
    text = entry.get("text", "")
    if "command" in entry:
        call = tool_call("bash", {"command": entry["command"]})
    elif "tool" in entry:
        call = tool_call(entry["tool"], entry["arguments"])
    else:
        return str(text)
    return f"{text}\n{call}" if text else call


def _well_formed(entry: Entry) -> bool:
    if isinstance(entry, str):
        return bool(entry)
    if not isinstance(entry, dict):
        return False
    keys = set(entry)
    if keys == {"fault"}:
        return entry["fault"] in ("die", "raise")
    return keys - {"text"} in ({"command"}, {"tool", "arguments"}) or (keys == {"text"} and bool(entry["text"]))


class ScriptedServer(EmbeddedServer):
    """The embedded server with forced replies."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.script = Script.load(self.options.script)
        self.tokenizer = self.model_config.tokenizer

    def _request(self, request: Request) -> Request:
        entry = self.script.entry(request.session, request.turn)
        if isinstance(entry, dict) and "fault" in entry:
            if entry["fault"] == "die":
                os._exit(1)
            raise OpsdError(
                f"scripted fault (session {request.session}, turn {request.turn})",
                "the script asks for an error here",
                "remove the fault from the script",
            )
        ids = [*self.tokenizer.encode(reply_text(entry), add_special_tokens=False), self.tokenizer.eos_token_id]
        return dataclasses.replace(request, forced=np.asarray(ids, dtype=np.int32))


class ScriptedReplica(EmbeddedReplica):
    """Replica of `ScriptedServer`."""

    server_class = ScriptedServer
