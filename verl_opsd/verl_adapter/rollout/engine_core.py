"""The embedded engine without any process around it: continuous batching of turns over kept key-value caches.

A request is one turn of one session. Each `EngineCore.step` forwards one token of every decoding request and up to
``prefill_chunk`` prompt tokens of the others. With a model whose layers all attend to the whole past they share one
flat row; with any other model (recurrent, hybrid such as Qwen3.5, sliding) the sessions run one after another in the
step. The engine counts the tokens that it forwards: over a session they sum to its length, whatever the number of
turns.

Legend: P positions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from verl_opsd.errors import OpsdError
from verl_opsd.verl_adapter.rollout.kv import CacheStore, FlatCache, RecurrentCache, Segment, SessionCache
from verl_opsd.verl_adapter.rollout.sampling import SamplingParams, processed_logprobs, request_generator, sample

StopReason = Literal["completed", "length", "aborted"]


@dataclass
class Counters:
    """Totals since the start, in tokens unless the name says otherwise."""

    requests: int = 0
    forward_passes: int = 0
    forwarded: int = 0
    reused: int = 0
    copied: int = 0
    sampled: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Request:
    """One turn.

    Attributes:
        request_id: unique among the requests in flight.
        prompt: int32 ids of the whole prompt.
        session: whose cache to continue; None: only a cache without a session that the prompt extends.
        turn: index of the turn in its session; with the session it determines the random numbers.
        forced: reply to play instead of sampling; its log-probabilities are the model's at the request's temperature.
    """

    request_id: str
    prompt: NDArray[np.int32]
    sampling: SamplingParams
    session: str | None = None
    turn: int = 0
    forced: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Reply:
    """Outcome of a request: ``token_ids`` (stop token included) and their log-probabilities in nats."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    cached_tokens: int = 0


@dataclass
class _Active:
    request: Request
    cache: SessionCache
    tokens: NDArray[np.int32]  # prompt, then reply so far; capacity prompt + max_tokens
    known: int  # valid entries of `tokens`
    reused: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.known - len(self.cache)


class EngineCore:
    """Serves one causal language model.

    Args:
        model: transformers causal language model on the CPU, in evaluation mode (PEFT-wrapped or not). For models whose
            layers all attend to the whole past it must have been loaded with the attention ``kv.ATTENTION``.
        eos_ids: ids that end a reply.
        max_model_len: tokens of prompt plus reply.
        max_num_seqs: requests that run at once.
        prefill_chunk: prompt tokens a step may forward.
        kv_cache_bytes: budget of all kept caches.
        seed: base of every request's random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        eos_ids: set[int],
        max_model_len: int,
        max_num_seqs: int = 64,
        prefill_chunk: int = 512,
        kv_cache_bytes: int = 2 << 30,
        seed: int = 0,
    ):
        self.model, self.eos_ids, self.seed = model, frozenset(eos_ids), seed
        self.max_model_len, self.max_num_seqs, self.prefill_chunk = max_model_len, max_num_seqs, prefill_chunk
        self.store = CacheStore(model, kv_cache_bytes, max_model_len)
        self.counters = Counters()
        self._waiting: deque[Request] = deque()
        self._active: list[_Active] = []

    @property
    def running(self) -> int:
        """Requests that hold a cache."""
        return len(self._active)

    @property
    def unfinished(self) -> int:
        """Requests running or waiting."""
        return len(self._active) + len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            OpsdError: empty prompt, prompt plus reply beyond the model's length, a forced reply beyond ``max_tokens``.
        """
        total = len(request.prompt) + request.sampling.max_tokens
        if len(request.prompt) == 0:
            raise OpsdError(f"request {request.request_id} has an empty prompt", "a reply follows a prompt", "send ids")
        if total > self.max_model_len:
            raise OpsdError(
                f"prompt of {len(request.prompt)} tokens plus max_tokens={request.sampling.max_tokens} = {total}"
                + (f" (session {request.session}, turn {request.turn})" if request.session else ""),
                f"a request fits into the model's {self.max_model_len} tokens; nothing is truncated",
                "lower max_tokens, end the episode earlier, or raise rollout.max_model_len",
            )
        if request.forced is not None and not 0 < len(request.forced) <= request.sampling.max_tokens:
            raise OpsdError(
                f"forced reply of {len(request.forced)} tokens (session {request.session}, turn {request.turn})",
                f"a reply has 1 to max_tokens={request.sampling.max_tokens} tokens",
                "raise max_tokens or shorten the scripted reply",
            )
        self._waiting.append(request)
        self.counters.requests += 1

    def step(self, admit: bool = True) -> list[Reply | tuple[str, OpsdError]]:
        """One round; returns what finished: replies, or (request id, error) for requests that can't be served."""
        failed: list[Reply | tuple[str, OpsdError]] = list(self._admit()) if admit else []
        with torch.inference_mode():
            finished = self._forward(self._plan())
        self.counters.copied, self.counters.evictions = self.store.copied_tokens, self.store.evictions
        return failed + finished

    def abort_all(self) -> list[Reply]:
        """Ends every request with what it has so far (``stop_reason="aborted"``)."""
        replies = [self._finish(a, "aborted") for a in list(self._active)]
        replies += [Reply(r.request_id, [], [], "aborted") for r in self._waiting]
        self._waiting.clear()
        return replies

    def drop_caches(self) -> None:
        """Forgets all kept caches; required after every change of the weights.

        Raises:
            OpsdError: requests are running (their caches belong to the old weights).
        """
        if self._active:
            raise OpsdError(
                f"{len(self._active)} requests are running",
                "weights change only between requests: a reply belongs to one version",
                "drain or abort the requests first",
            )
        self.store.clear()

    def score_logprobs(self, sequences: list[list[int]], positions: list[list[int]]) -> list[NDArray[np.float32]]:
        """Log-softmax at given positions, from the served weights in one uncached pass a sequence.

        Args:
            sequences: ids of each sequence.
            positions: predicting positions of each sequence; row p is the distribution of token p + 1.

        Returns:
            float32 (P, V) in nats for each sequence.
        """
        out: list[NDArray[np.float32]] = []
        with torch.inference_mode():
            for ids, keep in zip(sequences, positions, strict=True):
                logits_PV = self._logits(torch.tensor([ids]), torch.tensor(keep, dtype=torch.long))
                out.append(torch.log_softmax(logits_PV.float(), -1).numpy())
        return out

    def _admit(self) -> list[tuple[str, OpsdError]]:
        failed: list[tuple[str, OpsdError]] = []
        while self._waiting and len(self._active) < self.max_num_seqs:
            r = self._waiting[0]
            need = len(r.prompt) + r.sampling.max_tokens
            try:
                cache = self.store.acquire(r.session, r.prompt, need)
            except OpsdError as e:
                failed.append((self._waiting.popleft().request_id, e))
                continue
            if cache is None:
                break  # the budget is held by running requests
            self._waiting.popleft()
            tokens = np.zeros(need, np.int32)
            known = len(r.prompt)
            tokens[:known] = r.prompt
            if r.forced is not None:
                # The last token of a reply is never forwarded in its own turn: nothing follows it yet.
                tokens[known : known + len(r.forced) - 1] = r.forced[:-1]
                known += len(r.forced) - 1
            session = r.session if r.session is not None else r.request_id
            seed = self.seed if r.sampling.seed is None else r.sampling.seed
            self.counters.reused += len(cache)
            self._active.append(_Active(r, cache, tokens, known, len(cache), request_generator(seed, session, r.turn)))
        return failed

    def _plan(self) -> list[tuple[_Active, int]]:
        """(request, tokens to forward): decoding requests first, then prompts within the chunk."""
        plan, budget = [], self.prefill_chunk
        for a in sorted(self._active, key=lambda a: a.pending > 1):
            n = min(a.pending, budget) if a.pending > 1 else 1
            if n > 0:
                plan.append((a, n))
                budget -= n if a.pending > 1 else 0
        return plan

    def _forward(self, plan: list[tuple[_Active, int]]) -> list[Reply | tuple[str, OpsdError]]:
        if not plan:
            return []
        if self.store.flat:
            rows = self._forward_flat(plan)
        else:
            rows = [self._forward_recurrent(a, n) for a, n in plan]
        finished: list[Reply | tuple[str, OpsdError]] = []
        for (a, n), logits_PV in zip(plan, rows, strict=True):
            start = len(a.cache)
            a.cache.ids = np.concatenate([a.cache.ids, a.tokens[start : start + n]])
            self.counters.forwarded += n
            for logits_V in logits_PV:
                reason = self._take(a, logits_V)
                if reason is not None:
                    finished.append(self._finish(a, reason))
        return finished

    def _kept(self, a: _Active, n: int) -> range:
        """Offsets, among the next n tokens, of those whose logits predict a token of the reply."""
        start = len(a.cache)
        first = len(a.request.prompt) - 1 if a.request.forced is not None else a.known - 1
        return range(max(0, first - start), n)

    def _forward_flat(self, plan: list[tuple[_Active, int]]) -> list[Tensor]:
        ids, position, segments, keep, counts = [], [], [], [], []
        end = 0
        for a, n in plan:
            start = len(a.cache)
            ids.append(a.tokens[start : start + n])
            position.append(np.arange(start, start + n))
            assert isinstance(a.cache, FlatCache)
            segments.append(Segment(a.cache, end, end + n))
            kept = self._kept(a, n)
            keep += [end + i for i in kept]
            counts.append(len(kept))
            end += n
        logits_PV = self._logits(
            torch.from_numpy(np.concatenate(ids)).long()[None],
            torch.tensor(keep, dtype=torch.long),
            position_ids=torch.from_numpy(np.concatenate(position))[None],
            segments=segments,
        )
        return list(logits_PV.split(counts))

    def _forward_recurrent(self, a: _Active, n: int) -> Tensor:
        start = len(a.cache)
        assert isinstance(a.cache, RecurrentCache)
        return self._logits(
            torch.from_numpy(a.tokens[start : start + n]).long()[None],
            torch.tensor(list(self._kept(a, n)), dtype=torch.long),
            past_key_values=a.cache.past,
            use_cache=True,
        )

    def _logits(self, ids: Tensor, keep: Tensor, **kwargs: object) -> Tensor:
        """(P, V) logits at the kept positions of one row; the head runs on nothing else."""
        self.counters.forward_passes += 1
        kwargs.setdefault("use_cache", False)
        return self.model(input_ids=ids, logits_to_keep=keep, **kwargs).logits[0]

    def _take(self, a: _Active, logits_V: Tensor) -> StopReason | None:
        """Adds the next token of the reply; returns why the reply ends, if it does."""
        r = a.request
        if r.forced is not None:
            # Truncation (top-p, top-k) could give a played token no mass at all, so only the temperature applies.
            plain = SamplingParams(r.sampling.max_tokens, temperature=r.sampling.temperature)
            token = int(r.forced[len(a.token_ids)])
            logp = float(processed_logprobs(logits_V, plain)[token])
        else:
            token, logp = sample(logits_V, r.sampling, a.generator)
            self.counters.sampled += 1
        a.token_ids.append(token)
        a.logprobs.append(logp)
        if r.forced is not None:
            return "completed" if len(a.token_ids) == len(r.forced) else None
        if token in self.eos_ids and not r.sampling.ignore_eos:
            return "completed"
        if len(a.token_ids) == r.sampling.max_tokens:
            return "length"
        a.tokens[a.known] = token
        a.known += 1
        return None

    def _finish(self, a: _Active, reason: StopReason) -> Reply:
        self._active.remove(a)
        self.store.release(a.cache)
        return Reply(a.request.request_id, a.token_ids, a.logprobs, reason, a.reused)
