"""`ServerTeacher`: any model behind an OpenAI-like `/v1/completions` that returns `prompt_logprobs`, as vLLM does.

The server reads exact token ids and gives, for each of them, the log-probabilities of its K most probable tokens and of the given one:
a support signal, the rest of the mass in the tail. What it can do is measured before anything is trained (:meth:`ServerTeacher.probe`),
and never assumed. JSON is the protocol's; every reply becomes tensors as it arrives.

Suffixes: N loss positions of a row, K slots of the support.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
import torch
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential
from torch import Tensor

from verl_opsd.distill.signal import Signal
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.teachers.base import Pass, Voice, slots_of
from verl_opsd.teachers.device import check_passes

#: Seconds of one request; attempts of a request that the server fails (status 5xx, a broken connection).
TIMEOUT_S, ATTEMPTS = 600.0, 4
#: Largest sum of probabilities that rounding explains, and the smallest tail that float32 log-probabilities tell from 0.
SUM_LIMIT, TAIL_FLOOR = 1.0 + 1e-3, 2.0**-24
#: Largest difference, in nats, between a token's log-probability in a sequence and in its prefix, that rounding explains.
PREFIX_LIMIT = 0.25


@dataclass(frozen=True)
class Capabilities:
    """What a server was seen to do.

    Attributes:
        model: name under which it serves. max_length: tokens of prompt and reply that it takes; None: it does not say.
        prefix_error: largest difference between log-probabilities of a sequence's tokens and those of its prefix alone, nats: what is
            scored does not depend on what follows, up to the server's rounding.
        logprobs_P: of the probe's tokens, nats; a server with other weights gives others.
    """

    model: str
    max_length: int | None
    prefix_error: float
    logprobs_P: Tensor


class ServerTeacher:
    """A :class:`~verl_opsd.teachers.base.Scorer`, but asynchronous.

    Attributes:
        name: in telemetry. top_k: most probable tokens a position; 0: the given token alone.
        positions: that it has scored so far. floored: those whose tail rounding hid, which is taken as 2^-24.
    """

    def __init__(
        self,
        url: str,
        path: str,
        name: str,
        top_k: int,
        vocabulary: int,
        requests: int = 4,
        client: httpx.AsyncClient | None = None,
    ):
        """
        Args:
            url: base of the server, e.g. ``http://host:8000``.
            path: the model, as the server names it; another name is taken where the server serves one model only.
            vocabulary: entries of the student's vocabulary.
            requests: that may be under way at a time.
            client: for tests.
        """
        self.name, self.top_k, self._path, self._vocabulary = name, top_k, path, vocabulary
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client, self._requests = client, requests
        self.found: Capabilities | None = None
        self.positions = self.floored = 0

    @property
    def voice(self) -> Voice:
        """K most probable tokens and the given one: K + 1 slots, one of them unused where the given one is among the K."""
        return Voice(self.name, "support", 2 * (self.top_k + 1) + 1, torch.float32)

    def probe_ids(self) -> list[int]:
        """A fixed sequence, for the probe."""
        return [i * 7919 % self._vocabulary for i in range(1, 30)]

    async def probe(self) -> Capabilities:
        """Measures what the server can do, and keeps it.

        Raises:
            OpsdError: it serves another model, or does not return ``top_k`` log-probabilities of given ids, exactly those ids, one
                distribution a position, independent of what follows.
            InfraFault: ``teacher_died``: it can't be reached.
        """
        self._client = self._client or httpx.AsyncClient(timeout=TIMEOUT_S)  # both belong to the event loop that uses them
        self._slots = asyncio.Semaphore(self._requests)
        served = (await self._request("GET", "/v1/models")).get("data")
        if not isinstance(served, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in served):
            self._refuse(
                "lists no models under /v1/models", "an OpenAI-like server names its models", "correct opsd.teacher.url"
            )
        names = [m["id"] for m in served]
        if self._path not in names and len(names) != 1:
            self._refuse(
                f"serves {names}, not {self._path}", "a teacher is a named model", "set opsd.teacher.path to a served name"
            )
        model = served[names.index(self._path)] if self._path in names else served[0]
        ids = self.probe_ids()
        whole = await self._logprobs(model["id"], ids)
        part = await self._logprobs(model["id"], ids[:15])
        at = torch.arange(len(ids) - 1)
        labels = torch.tensor(ids)
        logprobs_P = _pick(self._signal(whole, at, labels[1:]), labels[1:])
        prefix_P = _pick(self._signal(part, at[:14], labels[1:15]), labels[1:15])
        error = float((logprobs_P[:14] - prefix_P).abs().max())
        if not error <= PREFIX_LIMIT or float(logprobs_P.std()) == 0:
            self._refuse(
                f"gives log-probabilities that differ by {error:.2g} nats with what follows, or are all the same",
                "a token's probability depends on what stands before it, and on nothing else",
                "serve a causal model, without a setting that changes prompt_logprobs",
            )
        length = model.get("max_model_len")
        self.found = Capabilities(model["id"], None if length is None else int(length), error, logprobs_P)
        return self.found

    async def close(self) -> None:
        """Ends the connections; :meth:`probe` opens new ones."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def check(self, passes: Sequence[Pass]) -> None:
        """
        Raises:
            OpsdError: a sequence with the one token of a reply is longer than the server takes, or has an id outside the vocabulary.
        """
        assert self.found is not None
        limit = None if self.found.max_length is None else self.found.max_length - 1
        check_passes(passes, self.name, limit, self._vocabulary)

    async def score(self, passes: Sequence[Pass]) -> Signal:
        """See :meth:`verl_opsd.teachers.base.Scorer.score`; a support signal on the host.

        Raises:
            OpsdError: see :meth:`check`, or the server refuses or breaks its own word.
            InfraFault: ``teacher_died``: it fails request after request.
        """
        self.check(passes)
        assert self.found is not None
        model, n = self.found.model, len(slots_of(passes))
        signals = await asyncio.gather(*(self._score_pass(model, p) for p in passes))
        out_NW = torch.empty(n, self.voice.width)
        for p, signal in zip(passes, signals, strict=True):
            out_NW[p.slots_N] = self.voice.pack(signal)
        return self.voice.unpack(out_NW)

    async def _score_pass(self, model: str, p: Pass) -> Signal:
        end = int(p.index_N.max()) + 2 if len(p.index_N) else 1  # nothing behind the last scored token is asked for
        reply = await self._logprobs(model, p.ids_T[:end].tolist())
        signal = self._signal(reply, p.index_N, p.ids_T[p.index_N + 1])
        assert signal.tail_N is not None
        self.positions += len(signal.tail_N)
        self.floored += int((signal.tail_N == torch.tensor(math.log(TAIL_FLOOR))).sum())
        return signal

    async def _logprobs(self, model: str, ids: list[int]) -> list[Any]:
        """For each id the server's log-probabilities at its place; the first has none.

        Raises:
            OpsdError: there is not one entry an id, or an entry lacks the id.
        """
        asked = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self.top_k}
        async with self._slots:
            reply = await self._request("POST", "/v1/completions", asked)
        choices = reply.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        found = first.get("prompt_logprobs", reply.get("prompt_logprobs"))
        if not isinstance(found, list) or not any(found):
            self._refuse(
                "returns no prompt_logprobs",
                "a server teacher gives log-probabilities of the tokens that it is given",
                "use a server that does (vLLM), or teacher=device",
            )
        if len(found) != len(ids) or any(
            not isinstance(e, dict) or str(i) not in e for e, i in zip(found[1:], ids[1:], strict=True)
        ):
            self._refuse(
                f"answers {len(ids)} ids with {len(found)} entries, or entries that lack the given id",
                "the very ids that are sent are scored, one entry each",
                "turn off what adds special tokens or renders the prompt again",
            )
        return list(found)

    def _signal(self, entries: list[Any], index_N: Tensor, labels_N: Tensor) -> Signal:
        """The support signal at positions that predict ``labels_N``."""
        slots = self.top_k + 1
        ids_NK = torch.full((len(index_N), slots), -1, dtype=torch.int64)
        logprobs_NK = torch.full((len(index_N), slots), -math.inf)
        tails = []
        for n, (index, label) in enumerate(zip(index_N.tolist(), labels_N.tolist(), strict=True)):
            try:
                entry = {int(k): float(v["logprob"]) for k, v in entries[index + 1].items()}
            except (TypeError, ValueError, KeyError):
                self._refuse(
                    f"gives {str(entries[index + 1])[:80]} at a position",
                    "a token's entry has its `logprob`, a number",
                    "see its version",
                )
            others = sorted((k for k in entry if k != label), key=lambda k: -entry[k])
            # Asked for K, the given token beside them; where it is one of the K there are K entries.
            if len(entry) not in (self.top_k, self.top_k + 1) or (self.top_k == 0 and others) or max(entry) >= self._vocabulary:
                self._refuse(
                    f"gives {len(entry)} tokens up to id {max(entry)} where {self.top_k} and the given one were asked for",
                    f"a position has the {self.top_k} most probable tokens of the student's vocabulary of {self._vocabulary}",
                    "raise the server's limit (vLLM: --max-logprobs), or lower opsd.loss.top_k",
                )
            kept = [label, *others]
            ids_NK[n, : len(kept)] = torch.tensor(kept)
            logprobs_NK[n, : len(kept)] = torch.tensor([entry[k] for k in kept])
            tails.append(self._tail(math.fsum(math.exp(entry[k]) for k in kept), len(kept)))
        return Signal(ids_NK=ids_NK, logprobs_NK=logprobs_NK, tail_N=torch.tensor(tails, dtype=torch.float32))

    def _tail(self, mass: float, kept: int) -> float:
        """Log-mass of everything else; what rounding hides is the smallest tail that float32 tells, not 0."""
        if not mass <= SUM_LIMIT:
            self._refuse(
                f"gives probabilities that sum to {mass:.4f}", "probabilities sum to 1 at most", "look at its sampling settings"
            )
        return -math.inf if kept == self._vocabulary else math.log(max(1.0 - mass, TAIL_FLOOR))

    async def _request(self, method: str, path: str, json: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait_exponential(0.5, max=30),
                retry=retry_if_exception_type((httpx.TransportError, _ServerFailed)),
                reraise=True,
            ):
                with attempt:
                    assert self._client is not None  # probe
                    reply = await self._client.request(method, self._url + path, json=json)
                    if reply.status_code >= 500:
                        raise _ServerFailed(f"status {reply.status_code}: {reply.text[:300]}")
        except (httpx.TransportError, _ServerFailed) as error:
            raise InfraFault(
                "teacher_died",
                f"teacher {self.name}: {ATTEMPTS} requests to {self._url}{path} failed, the last with {type(error).__name__}: {error}",
                "a server teacher answers; nothing is trained on rows that were not scored",
                "start the server, or correct opsd.teacher.url",
            ) from error
        if reply.status_code != 200:
            self._refuse(
                f"answers {path} with status {reply.status_code}: {reply.text[:300]}", "it takes the request", "see its message"
            )
        try:
            found = reply.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self._refuse(
                f"answers {path} with no JSON object: {reply.text[:80]!r}", "it speaks JSON", "correct opsd.teacher.url"
            )
        return found  # type: ignore[no-any-return]

    def _refuse(self, what: str, rule: str, way_out: str) -> NoReturn:
        raise OpsdError(f"the server of teacher {self.name} at {self._url} {what}", rule, way_out)


class _ServerFailed(Exception):
    """A reply of status 5xx."""


def _pick(signal: Signal, labels_N: Tensor) -> Tensor:
    assert signal.ids_NK is not None and signal.logprobs_NK is not None
    return signal.logprobs_NK[signal.ids_NK == labels_N[:, None]]
