"""The inference boundary: chat messages in, exact token ids to the engine, turn records out.

One :class:`Session` is one agent of one episode. Its ids are only ever appended: a call that continues what the
session knows tokenizes its new messages alone, and replies stay exactly as the engine gave them. A call that does not
continue opens a new branch, whose fork position and reason are recorded. This file knows no tokenizer, engine or tool
syntax: those are protocols.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from verl_opsd.contract import EvalContract
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens.records import ForkReason, Sampling, TurnKind, TurnRecord

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
ROLES = ("system", "user", "assistant", "tool")


class ContextOverflow(OpsdError):
    """The prompt and the longest allowed reply do not fit into the contract's context; the engine was not called."""


@dataclass(frozen=True)
class Generation:
    """One reply of an engine.

    Attributes:
        token_ids: sampled ids, the turn-end token included when the model produced it.
        logprobs: nats, one for each id.
        stop_reason: as the engine names it, e.g. ``stop`` or ``length``.
        model_version: version of the weights that sampled the reply.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str
    model_version: int


@dataclass(frozen=True)
class ToolCall:
    """One parsed call. ``arguments`` is JSON text; an empty ``id`` is filled by the session."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Reply:
    """Answer to one call: an OpenAI assistant message, the turn's number, and tokens read and written."""

    message: dict[str, Any]
    turn: int
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    """Samples a reply to exact prompt ids. Any exception counts as a dead engine."""

    async def generate(self, prompt_ids: list[int], *, session: str, turn: int, sampling: Sampling) -> Generation: ...


class TokenBuilder(Protocol):
    """Renders messages to ids; a message must render the same whatever follows it."""

    def initial(self, messages: list[dict[str, Any]], tools: Tools) -> list[int]:
        """Ids of a whole prompt, the generation prompt included."""
        ...

    def extend(self, previous: list[dict[str, Any]], updated: list[dict[str, Any]], ids: list[int], tools: Tools) -> list[int]:
        """Ids to append after ``ids``, which end with the reply ``previous[-1]``: boundary, new messages, generation
        prompt."""
        ...


class ReplyParser(Protocol):
    """Turns reply ids into content and tool calls; a malformed call is not an exception but no call."""

    async def parse(self, ids: list[int], tools: Tools) -> tuple[str, list[ToolCall]]: ...


class Gateway:
    """Makes sessions that share one engine, one tokenization and one contract.

    Raises:
        OpsdError: the contract strips reasoning of earlier turns, which an append-only session can't do.
    """

    def __init__(
        self,
        engine: Engine,
        builder: TokenBuilder,
        parser: ReplyParser,
        contract: EvalContract,
        clock: Callable[[], float] = time.time,
    ):
        if contract.thinking != "keep":
            raise OpsdError(
                f"contract.thinking={contract.thinking!r}",
                "a session only appends tokens, so reasoning of earlier turns stays in the prompt",
                "set contract.thinking=keep and use a chat template that keeps reasoning",
            )
        self.engine, self.builder, self.parser, self.contract, self.clock = engine, builder, parser, contract, clock
        self.contract_hash = contract.hash
        self.sampling = Sampling(contract.temperature, contract.top_p, contract.top_k, contract.max_tokens)

    def session(self, episode_id: str, agent_id: str) -> Session:
        """A new, empty session; two agents never share one."""
        return Session(self, episode_id, agent_id)


@dataclass
class _Branch:
    """Ids and messages along one branch. ``replies``: (messages, ids) known just after each own reply, in order."""

    ids: list[int]
    messages: list[dict[str, Any]]
    tools: Tools
    parent: int = -1
    fork_position: int = 0
    reason: ForkReason = "start"
    n_prompt: int = 0
    replies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """A call's prompt, ``start`` ids of it known; ``branch`` will hold it, ``fork`` is that branch if it is new."""

    prompt: list[int]
    start: int
    branch: int
    fork: _Branch | None


class Session:
    """All calls of one agent in one episode, one at a time."""

    def __init__(self, gateway: Gateway, episode_id: str, agent_id: str):
        self.gateway, self.episode_id, self.agent_id = gateway, episode_id, agent_id
        self._branches: list[_Branch] = []
        self._last = -1
        self._turns: list[TurnRecord] = []
        self._busy = False

    async def chat(self, messages: Sequence[Message], tools: Tools = None, *, kind: TurnKind = "policy") -> Reply:
        """Answers one call and records its turn.

        Args:
            messages: the whole conversation as OpenAI chat messages with text content; ``extra`` and None values are
            ignored. tools: OpenAI tool definitions, part of the prompt.
            kind: ``summarizer`` for a call that compacts the history.

        Raises:
            ContextOverflow: prompt plus the contract's max_tokens exceed its context_length. The session is unchanged.
            OpsdError: bad messages, or another call of this session is running.
            InfraFault: ``engine_died`` or ``engine_bad_reply`` (the session is unchanged), ``parser_died`` (the turn is
                recorded as malformed).
        """
        if self._busy:
            raise OpsdError(
                f"a second call of {self.episode_id}/{self.agent_id} while one is running",
                "a session answers one call at a time",
                "wait for the reply, or open one session for each agent",
            )
        self._busy = True
        try:
            return await self._chat([_canonical(m) for m in messages], tools, kind)
        finally:
            self._busy = False

    def mark(self, turn: int, kind: TurnKind) -> None:
        """Sets the kind of a recorded turn, e.g. ``malformed`` once the harness has refused its reply."""
        _check_kind(kind)
        if not 0 <= turn < len(self._turns):
            raise OpsdError(f"turn {turn}", f"turns are 0..{len(self._turns) - 1}", "pass Reply.turn of the turn to mark")
        self._turns[turn] = dataclasses.replace(self._turns[turn], kind=kind)

    def records(self) -> tuple[TurnRecord, ...]:
        """The turns so far, in order."""
        return tuple(self._turns)

    async def _chat(self, messages: list[dict[str, Any]], tools: Tools, kind: TurnKind) -> Reply:
        _check_kind(kind)
        if not messages or messages[-1]["role"] == "assistant":
            raise OpsdError(
                "no messages" if not messages else "a conversation whose last message is the assistant's",
                "a call asks for a reply to a system, user or tool message",
                "append the message that the agent should answer",
            )
        gateway, turn = self.gateway, len(self._turns)
        plan = self._plan(messages, tools, kind)
        limit, sampling = gateway.contract.context_length, gateway.sampling
        if len(plan.prompt) + sampling.max_tokens > limit:
            raise ContextOverflow(
                f"turn {turn} of {self.episode_id}/{self.agent_id}: prompt of {len(plan.prompt)} tokens with "
                f"max_tokens={sampling.max_tokens}",
                f"prompt and reply fit into contract.context_length={limit}; nothing is truncated",
                "end the episode, turn compaction on, or use a contract with a longer context",
            )
        t_start = gateway.clock()
        try:
            generation = await gateway.engine.generate(
                plan.prompt.copy(), session=f"{self.episode_id}/{self.agent_id}", turn=turn, sampling=sampling
            )
        except InfraFault:
            raise
        except Exception as error:
            raise InfraFault(
                "engine_died",
                f"turn {turn} of {self.episode_id}/{self.agent_id}: {type(error).__name__}: {error}",
                "an engine answers every call; a dead one ends the episode as an infrastructure fault",
                "see the cause below and the engine's log; restart the engine and collect the episode again",
            ) from error
        t_end = gateway.clock()
        _check_generation(generation, sampling, f"turn {turn} of {self.episode_id}/{self.agent_id}")
        branch = self._commit(plan, messages, generation)
        self._turns.append(
            TurnRecord(
                episode_id=self.episode_id,
                agent_id=self.agent_id,
                turn=turn,
                branch=self._last,
                start=plan.start,
                new_ids=np.asarray(plan.prompt[plan.start :], np.int32),
                response_ids=np.asarray(generation.token_ids, np.int32),
                response_logprobs=np.asarray(generation.logprobs, np.float32),
                stop_reason=generation.stop_reason,
                kind=kind,
                sampling=sampling,
                model_version=generation.model_version,
                contract_hash=gateway.contract_hash,
                t_start=t_start,
                t_end=t_end,
                parent_branch=branch.parent,
                fork_position=branch.fork_position,
                fork_reason=branch.reason,
            )
        )
        try:
            content, calls = await gateway.parser.parse(list(generation.token_ids), tools)
        except Exception as error:
            self.mark(turn, "malformed")
            raise InfraFault(
                "parser_died",
                f"turn {turn} of {self.episode_id}/{self.agent_id}: {type(error).__name__}: {error}",
                "a reply parser answers every reply; a malformed tool call is no call, not an exception",
                f"correct the parser (contract.tool_parser={gateway.contract.tool_parser!r})",
            ) from error
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{turn}_{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(calls)
            ]
        branch.messages.append(copy.deepcopy(message))
        branch.replies.append((len(branch.messages), len(branch.ids)))
        return Reply(message, turn, len(plan.prompt), len(generation.token_ids))

    def _plan(self, messages: list[dict[str, Any]], tools: Tools, kind: TurnKind) -> _Plan:
        """Finds the known reply that the call continues from; without one the prompt is rendered whole."""
        builder = self.gateway.builder
        common = [_common(b.messages, messages) if b.tools == tools else 0 for b in self._branches]
        known = [(n, i, length) for i, b in enumerate(self._branches) for n, length in b.replies if n <= common[i]]
        if known:
            # The longest known conversation; among equals the one whose branch can simply be appended to.
            n, i, length = max(known, key=lambda k: (k[0], k[2] == len(self._branches[k[1]].ids), k[1]))
            source = self._branches[i]
            ids = source.ids[:length]
            prompt = ids + builder.extend(source.messages[:n], messages, ids, tools)
            if length == len(source.ids):
                return _Plan(prompt, length, i, None)
        else:
            prompt = builder.initial(messages, tools)
        fork = _Branch([], [], copy.deepcopy(tools))
        if self._branches:
            array = np.asarray(prompt, np.int32)
            lengths = [_common_ids(np.asarray(b.ids, np.int32), array) for b in self._branches]
            fork.parent = max(range(len(lengths)), key=lambda i: (lengths[i], i == self._last, i))
            fork.fork_position = lengths[fork.parent]
            fork.reason = self._fork_reason(messages, common[self._last], kind)
        return _Plan(prompt, fork.fork_position, len(self._branches), fork)

    def _fork_reason(self, messages: list[dict[str, Any]], common: int, kind: TurnKind) -> ForkReason:
        """``compaction``: the call is a summarizer or follows one. ``retry``: the last reply alone was dropped."""
        if kind == "summarizer" or self._turns[-1].kind == "summarizer":
            return "compaction"
        last = self._branches[self._last]
        if common != last.n_prompt:
            return "template_rewrite"
        replaced = len(messages) > common and messages[common]["role"] == "assistant"
        return "template_rewrite" if replaced else "retry"

    def _commit(self, plan: _Plan, messages: list[dict[str, Any]], generation: Generation) -> _Branch:
        """Appends the prompt's new part and the reply to its branch."""
        if plan.fork is not None:
            self._branches.append(plan.fork)
            plan.fork.ids = plan.prompt.copy()
        else:
            branch = self._branches[plan.branch]
            branch.ids.extend(plan.prompt[len(branch.ids) :])
        self._last = plan.branch
        branch = self._branches[plan.branch]
        branch.messages.extend(copy.deepcopy(m) for m in messages[len(branch.messages) :])
        branch.n_prompt = len(messages)
        branch.ids.extend(generation.token_ids)
        return branch


def _canonical(message: Message) -> dict[str, Any]:
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


def _check_kind(kind: str) -> None:
    if kind not in get_args(TurnKind):
        raise OpsdError(f"turn kind {kind!r}", f"kinds are {get_args(TurnKind)}", "pass one of them")


def _common(known: list[dict[str, Any]], messages: list[dict[str, Any]]) -> int:
    """Leading messages that are equal. Equal strings of old messages are mostly the same objects, so this is cheap."""
    for i, (a, b) in enumerate(zip(known, messages, strict=False)):
        if a != b:
            return i
    return min(len(known), len(messages))


def _common_ids(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _check_generation(generation: Generation, sampling: Sampling, where: str) -> None:
    ids, logprobs = generation.token_ids, generation.logprobs
    problem = ""
    if not ids:
        problem = "no token ids"
    elif len(ids) != len(logprobs):
        problem = f"{len(ids)} ids with {len(logprobs)} log-probabilities"
    elif len(ids) > sampling.max_tokens:
        problem = f"{len(ids)} ids where at most {sampling.max_tokens} were asked for"
    elif any(isinstance(t, bool) or t != int(t) or t < 0 for t in ids):
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
