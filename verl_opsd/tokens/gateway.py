"""The inference boundary: chat messages in, exact token ids to the engine, turn records out.

One :class:`Session` is one agent of one episode. Its ids are only ever appended (and, where the contract strips reasoning, cut
out; nothing is encoded again): a call that continues what the
session knows tokenizes its new messages alone, and replies stay exactly as the engine gave them. A call that does not
continue opens a new branch, whose fork position and reason are recorded. This file knows no tokenizer, engine or tool
syntax: those are protocols.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from verl_opsd.contract import EvalContract
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.tokens.boundary import Message, canonical, check_reply
from verl_opsd.tokens.records import ForkReason, Sampling, TurnKind, TurnRecord, common_prefix
from verl_opsd.tokens.thinking import Thought, cut, last_user, reasoning_end, shown

Tools = Sequence[Mapping[str, Any]] | None


class ContextOverflow(OpsdError):
    """The prompt and the longest allowed reply do not fit into the contract's context; the engine was not called."""


class SessionBusy(OpsdError):
    """A second call of a session while one is running."""


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
    """Answer to one call: an OpenAI assistant message, the turn's number, tokens read and written, why it ended."""

    message: dict[str, Any]
    turn: int
    prompt_tokens: int
    completion_tokens: int
    stop_reason: str = "stop"


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

    def without_reasoning(self, ids: list[int]) -> list[int]:
        """A reply's ids without its reasoning; the same ids where it has none. Asked for where the contract strips it."""
        ...


class ReplyParser(Protocol):
    """Turns reply ids into content and tool calls; a malformed call is not an exception but no call."""

    async def parse(self, ids: list[int], tools: Tools) -> tuple[str, list[ToolCall]]: ...


class Gateway:
    """Makes sessions that share one engine, one tokenization and one contract."""

    def __init__(
        self,
        engine: Engine,
        builder: TokenBuilder,
        parser: ReplyParser,
        contract: EvalContract,
        clock: Callable[[], float] = time.time,
    ):
        self.engine, self.builder, self.parser, self.contract, self.clock = engine, builder, parser, contract, clock
        self.contract_hash = contract.hash
        self.sampling = Sampling(contract.temperature, contract.top_p, contract.top_k, contract.max_tokens)

    def session(self, episode_id: str, agent_id: str) -> Session:
        """A new, empty session; two agents never share one."""
        return Session(self, episode_id, agent_id)


@dataclass
class _Branch:
    """Ids and messages along one branch. ``replies``: (messages, ids) known just after each own reply, in order.

    Where the contract strips reasoning: ``thoughts`` are replies whose reasoning is still in the ids, in order; ``rendered`` is the
    number of the last message whose reasoning was rendered from text, -1 without one.
    """

    ids: list[int]  # only ever appended to
    messages: list[dict[str, Any]]
    tools: Tools
    parent: int = -1
    fork_position: int = 0
    reason: ForkReason = "start"
    n_prompt: int = 0
    replies: list[tuple[int, int]] = field(default_factory=list)
    thoughts: list[Thought] = field(default_factory=list)
    rendered: int = -1
    _packed: array[int] = field(default_factory=lambda: array("i"))

    def common(self, other: np.ndarray) -> int:
        """Leading ids that are those of ``other``; int32. Packs what was appended since the last call."""
        self._packed.extend(self.ids[len(self._packed) :])
        return common_prefix(np.frombuffer(self._packed, np.int32), other)


@dataclass(frozen=True)
class _Plan:
    """A call whose prompt ends with the ids ``new``, after ``start`` known ones; ``branch`` will hold it, ``fork`` is that
    branch if it is new."""

    new: list[int]
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
            OpsdError: bad messages. SessionBusy: another call of this session is running.
            InfraFault: ``engine_died`` or ``engine_bad_reply`` (the session is unchanged), ``parser_died`` (the turn is
                recorded as malformed).
        """
        if self._busy:
            raise SessionBusy(
                f"a second call of {self.episode_id}/{self.agent_id} while one is running",
                "a session answers one call at a time",
                "wait for the reply, or open one session for each agent",
            )
        self._busy = True
        try:
            return await self._chat([canonical(m) for m in messages], tools, kind)
        finally:
            self._busy = False

    def mark(self, turn: int, kind: TurnKind) -> None:
        """Sets the kind of a recorded turn, e.g. ``malformed`` once the harness has refused its reply."""
        _check_kind(kind)
        if not 0 <= turn < len(self._turns):
            raise OpsdError(f"turn {turn}", f"turns are 0..{len(self._turns) - 1}", "pass Reply.turn of the turn to mark")
        self._turns[turn] = dataclasses.replace(self._turns[turn], kind=kind)

    def prompt_ids(self, turn: int) -> list[int]:
        """Ids that the model read in a recorded turn."""
        record = self._turns[turn]
        return self._branches[record.branch].ids[: record.prompt_len]

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
        branch = plan.fork or self._branches[plan.branch]
        prompt_len = plan.start + len(plan.new)
        limit, sampling = gateway.contract.context_length, gateway.sampling
        where = f"turn {turn} of {self.episode_id}/{self.agent_id}"
        if prompt_len + sampling.max_tokens > limit:
            raise ContextOverflow(
                f"{where}: prompt of {prompt_len} tokens with max_tokens={sampling.max_tokens}",
                f"prompt and reply fit into contract.context_length={limit}; nothing is truncated",
                "end the episode, turn compaction on, or use a contract with a longer context",
            )
        t_start = gateway.clock()
        try:
            generation = await gateway.engine.generate(
                branch.ids + plan.new, session=f"{self.episode_id}/{self.agent_id}", turn=turn, sampling=sampling
            )
        except InfraFault:
            raise
        except Exception as error:
            raise InfraFault(
                "engine_died",
                f"{where}: {type(error).__name__}: {error}",
                "an engine answers every call; a dead one ends the episode as an infrastructure fault",
                "see the cause below and the engine's log; restart the engine and collect the episode again",
            ) from error
        t_end = gateway.clock()
        check_reply(generation.token_ids, generation.logprobs, sampling.max_tokens, where)
        fault: Exception | None = None
        content, calls = "", list[ToolCall]()
        try:
            content, calls = await gateway.parser.parse(list(generation.token_ids), tools)
        except Exception as error:
            fault = error
        # From here on nothing waits: a call is recorded as a whole, or (cancelled) not at all.
        if plan.fork is not None:
            self._branches.append(plan.fork)
        branch.ids += plan.new
        branch.ids += generation.token_ids
        branch.messages.extend(copy.deepcopy(m) for m in messages[len(branch.messages) :])
        branch.n_prompt = len(messages)
        self._last = plan.branch
        self._turns.append(
            TurnRecord(
                episode_id=self.episode_id,
                agent_id=self.agent_id,
                turn=turn,
                branch=plan.branch,
                start=plan.start,
                new_ids=np.asarray(plan.new, np.int32),
                response_ids=np.asarray(generation.token_ids, np.int32),
                response_logprobs=np.asarray(generation.logprobs, np.float32),
                stop_reason=generation.stop_reason,
                kind="malformed" if fault else kind,
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
        if fault is not None:
            raise InfraFault(
                "parser_died",
                f"{where}: {type(fault).__name__}: {fault}",
                "a reply parser answers every reply; a malformed tool call is no call, not an exception",
                f"correct the parser (contract.tool_parser={gateway.contract.tool_parser!r})",
            ) from fault
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
        if gateway.contract.thinking == "strip":
            kept = gateway.builder.without_reasoning(generation.token_ids)
            if len(kept) < len(generation.token_ids):
                end = len(branch.ids)
                branch.thoughts.append(Thought(len(branch.messages) - 1, end - len(generation.token_ids), end, tuple(kept)))
        return Reply(message, turn, prompt_len, len(generation.token_ids), generation.stop_reason)

    def _plan(self, messages: list[dict[str, Any]], tools: Tools, kind: TurnKind) -> _Plan:
        """Finds the known reply that the call continues from; without one the prompt is rendered whole."""
        builder, source = self.gateway.builder, self._continued(messages, tools)
        strip = self.gateway.contract.thinking == "strip"
        last = last_user(messages) if strip else -1
        fork = _Branch([], [], copy.deepcopy(tools))
        stripped = source >= 0 and -1 < self._branches[source].rendered < last
        if source >= 0 and not stripped:
            branch = self._branches[source]
            n, length = _known(branch, messages)
            ids = branch.ids if length == len(branch.ids) else branch.ids[:length]
            updated = [*messages[:n], *shown(messages)[n:]] if strip else messages
            new = builder.extend(branch.messages[:n], updated, ids, tools)
            known = [t for t in branch.thoughts if t.end <= length]
            stripped = any(t.message < last for t in known)
            if ids is branch.ids and not stripped:
                return _Plan(new, length, source, None)
            prompt = ids + new
            fork.thoughts, fork.rendered = known, branch.rendered
            if stripped:
                prompt, fork.thoughts, cuts = cut(prompt, known, last)
                fork.replies = [
                    (m, end - sum(gone for at, gone in cuts if at <= end)) for m, end in branch.replies if end <= length
                ]
        else:
            prompt = builder.initial(shown(messages) if strip else messages, tools)
            if strip:
                reasoned = (
                    i for i, m in enumerate(messages) if i > last and m["role"] == "assistant" and reasoning_end(m["content"])
                )
                fork.rendered = max(reasoned, default=-1)
        if self._branches:
            packed = np.frombuffer(array("i", prompt), np.int32)  # several times faster than asarray of a list
            lengths = [b.common(packed) for b in self._branches]
            fork.parent = max(range(len(lengths)), key=lambda i: (lengths[i], i == self._last, i))
            fork.fork_position = lengths[fork.parent]
            fork.reason = "thinking_stripped" if stripped else self._fork_reason(messages, tools, kind)
        start = fork.fork_position
        fork.ids = prompt[:start]
        return _Plan(prompt[start:], start, len(self._branches), fork)

    def _continued(self, messages: list[dict[str, Any]], tools: Tools) -> int:
        """The branch with the longest known conversation that the call continues; -1 without one. Among equals it is one
        that can simply be appended to. A branch that can't win is not compared: work does not grow with the branches."""
        best, found = (0, False, -1), -1
        last = self._last
        for i in sorted(range(len(self._branches)), key=lambda i: (i == last, i), reverse=True):
            branch = self._branches[i]
            if branch.tools != tools or not branch.replies or (branch.replies[-1][0], True, i) < best:
                continue
            n, length = _known(branch, messages)
            if n and (n, length == len(branch.ids), i) > best:
                best, found = (n, length == len(branch.ids), i), i
        return found

    def _fork_reason(self, messages: list[dict[str, Any]], tools: Tools, kind: TurnKind) -> ForkReason:
        """``compaction``: the call is a summarizer or follows one. ``retry``: the last reply alone was dropped."""
        if kind == "summarizer" or self._turns[-1].kind == "summarizer":
            return "compaction"
        last = self._branches[self._last]
        common = _common(last.messages, messages) if last.tools == tools else 0
        if common != last.n_prompt:
            return "template_rewrite"
        replaced = len(messages) > common and messages[common]["role"] == "assistant"
        return "template_rewrite" if replaced else "retry"


def _check_kind(kind: str) -> None:
    if kind not in get_args(TurnKind):
        raise OpsdError(f"turn kind {kind!r}", f"kinds are {get_args(TurnKind)}", "pass one of them")


def _common(known: list[dict[str, Any]], messages: list[dict[str, Any]]) -> int:
    """Leading messages that are equal. Equal strings of old messages are mostly the same objects, so this is cheap."""
    for i, (a, b) in enumerate(zip(known, messages, strict=False)):
        if a != b:
            return i
    return min(len(known), len(messages))


def _known(branch: _Branch, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """(messages, ids) just after the last reply of the branch that ``messages`` still holds; (0, 0) without one."""
    common = _common(branch.messages, messages)
    return next((reply for reply in reversed(branch.replies) if reply[0] <= common), (0, 0))
