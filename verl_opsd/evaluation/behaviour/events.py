"""The event stream of a pair: what each agent read, wrote, ran and sent, in order, from an episode's recorded messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_opsd.cooperbench.send_calls import read_calls
from verl_opsd.evaluation.behaviour.patterns import INBOX, REPLY, STATUS, SUBMIT, UNPARSED
from verl_opsd.tokens.records import AgentOutcome, Episode

Status = Literal["delivered", "rejected", "peer_gone"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A command that was executed. ``output`` is empty and ``returncode`` None for the final submit, which has no observation."""

    text: str
    output: str
    returncode: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One model call. ``i`` counts the agent's assistant messages from 0; ``inbox``: senders of the messages read before it."""

    i: int
    t: float
    text: str
    commands: tuple[Command, ...]
    inbox: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """One `send_message` call.

    ``read_at``: step of the recipient that reads it; None where it was not delivered or the recipient made no further call.
    """

    sender: str
    to: str
    text: str
    wait: bool
    step: int
    t: float
    status: Status
    read_at: int | None


@dataclass(frozen=True)
class Pair:
    """The stream of one episode: each agent's steps, and all sends in order of time."""

    episode: Episode
    steps: dict[str, tuple[Step, ...]]
    sends: tuple[Send, ...]

    @property
    def delivered(self) -> tuple[Send, ...]:
        """Sends that the recipient's mailbox took."""
        return tuple(s for s in self.sends if s.status == "delivered")

    def agent(self, agent_id: str) -> AgentOutcome:
        """How the agent's run ended."""
        return next(a for a in self.episode.agents if a.agent_id == agent_id)


def stream(episode: Episode) -> Pair:
    """The event stream of an episode. Only executed commands and real `send_message` calls count; prose never does."""
    steps: dict[str, tuple[Step, ...]] = {}
    sends: list[Send] = []
    reads: dict[str, list[tuple[str, int]]] = {}
    for agent, messages in sorted(episode.messages.items()):
        steps[agent], reads[agent] = _steps(messages)
        sends += _sends(agent, steps[agent])
    return Pair(episode, steps, _with_readers(sends, reads))


def _steps(messages: Sequence[Message]) -> tuple[tuple[Step, ...], list[tuple[str, int]]]:
    """An agent's steps, and (sender, step that reads it) of every message that it got."""
    observed = {m.get("tool_call_id"): m for m in messages if m.get("role") == "tool"}
    steps: list[Step] = []
    inbox: list[str] = []
    reads: list[tuple[str, int]] = []
    submitted = any(m.get("role") == "exit" and (m.get("extra") or {}).get("exit_status") == "Submitted" for m in messages)
    for message in messages:
        role = message.get("role")
        if role == "user":
            if found := INBOX.match(_text(message)):
                inbox.append(found[1])
        elif role == "assistant" and not (message.get("extra") or {}).get("summary"):
            i, commands = len(steps), []
            reads += [(sender, i) for sender in inbox]
            for action in _actions(message):
                seen = observed.get(action.get("tool_call_id"))
                text = _command(action)
                if seen is not None:
                    output, returncode = _observation(seen)
                    commands.append(Command(text, output, returncode))
                    if "[Reply from " in output:
                        reads += [(found[1], i + 1) for found in REPLY.finditer(output)]
                elif SUBMIT in text and submitted:
                    commands.append(Command(text, "", None))
            words = "\n".join(filter(None, (str(message.get("reasoning_content") or ""), _text(message))))
            stamp = (message.get("extra") or {}).get("timestamp")
            steps.append(Step(i, float(stamp) if stamp is not None else float("nan"), words, tuple(commands), tuple(inbox)))
            inbox = []
    return tuple(steps), reads


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts of a multimodal message
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""


def _actions(message: Message) -> list[Mapping[str, Any]]:
    extra = message.get("extra") or {}
    if "actions" in extra:
        return list(extra["actions"])
    actions: list[Mapping[str, Any]] = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            continue  # the harness refuses such a call and executes nothing
        actions.append({"tool_name": call["function"]["name"], "tool_call_id": call.get("id"), **arguments})
    return actions


def _command(action: Mapping[str, Any]) -> str:
    if action.get("tool_name") == "send_message":
        return f"send_message {action.get('recipient', '')} <<'MSG'\n{action.get('content', '')}\nMSG"
    return str(action.get("command") or "")


def _observation(message: Message) -> tuple[str, int | None]:
    """Output and return code of a tool message: the raw ones where the log keeps them, else what the model saw."""
    extra = message.get("extra") or {}
    if "raw_output" in extra:
        return str(extra["raw_output"] or ""), extra.get("returncode")
    text = _text(message)
    try:
        values = json.loads(text, strict=False)
    except ValueError:
        return text, None
    if not isinstance(values, dict):
        return text, None
    parts = (values.get(k) for k in ("output", "output_head", "output_tail"))
    return "\n".join(str(p) for p in parts if p is not None), values.get("returncode")


def _sends(agent: str, steps: Sequence[Step]) -> list[Send]:
    out = []
    for step in steps:
        for command in step.commands:
            if "send_message" not in command.text:
                continue
            occurrences, calls = read_calls(command.text)
            said: list[Status] = [found.lastgroup for found in STATUS.finditer(command.output)]  # type: ignore[misc]
            if calls is None or UNPARSED in command.output:
                # Our harness refuses such a command as a whole; the plain one may have delivered parts that can't be read back.
                calls, said = [("", "", False)] * occurrences, ["rejected"] * occurrences
            for n, (to, text, wait) in enumerate(calls):
                out.append(Send(agent, to, text, wait, step.i, step.t, said[n] if n < len(said) else "rejected", None))
    return out


def _with_readers(sends: list[Send], reads: dict[str, list[tuple[str, int]]]) -> tuple[Send, ...]:
    """Sends with the step that reads them: a mailbox is first in, first out, so the n-th delivered is the n-th read."""
    queues = {(to, sender): [i for s, i in got if s == sender] for to, got in reads.items() for sender in {s for s, _ in got}}
    taken: dict[tuple[str, str], int] = {}
    out = []
    for send in sends:  # of one sender these are in order
        if send.status == "delivered":
            key = (send.to, send.sender)
            n = taken[key] = taken.get(key, -1) + 1
            queue = queues.get(key, [])
            if n < len(queue):
                send = Send(send.sender, send.to, send.text, send.wait, send.step, send.t, send.status, queue[n])
        out.append(send)
    return tuple(sorted(out, key=lambda s: (s.t != s.t, s.t if s.t == s.t else 0.0, s.sender, s.step)))
