"""An episode as two conversations: what each agent read and wrote, with the divergence of every token that it was trained on.

Blocks are JSON, compressed with zlib and written as base64 into the page, where they are read when somebody opens an episode. Texts
that several episodes share (system prompts, task texts) stand once, in a common block.

A divergence d is stored as the integer ``q = round(8 log2(1 + d / 1e-6))``: within 5% of d, 0 for 0; -1 where it is not known (NaN).
In a block, these integers and the tokens' lengths are texts, one character a token: the one whose code is the integer + 0x5e.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_opsd.evaluation.page.kl_join import RowKey
from verl_opsd.evaluation.page.redact import Secrets, note, redacted, spans
from verl_opsd.tokens.classes import token_offsets
from verl_opsd.tokens.records import Episode, TurnRecord

#: Texts from this length on are shared between episodes.
SHARED = 200


class _Characters(dict[int, str]):
    """Integer -> its character in a block."""

    def __missing__(self, number: int) -> str:
        return self.setdefault(number, chr(number + 0x5E))


_CHARACTERS = _Characters()


def quantise(divergence_N: NDArray[Any]) -> list[int]:
    """The integers of the module's docstring."""
    code_N = np.rint(8 * np.log2(1 + np.clip(divergence_N, 0, 1e6) / 1e-6))
    codes: list[int] = np.where(np.isnan(code_N), -1, code_N).astype(np.int64).tolist()
    return codes


class Decoder:
    """Pieces of text of token ids; a piece is decoded once.

    Whether pieces may be put together is seen at the first ``SEEN`` replies, whose whole text is decoded too: it is so for byte-level
    tokenizers, but for characters that several tokens share.
    """

    SEEN = 100

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._piece: dict[int, str] = {}
        self._partial: set[int] = set()  # tokens that are a part of a character
        self._looked, self._joins = 0, True

    def pieces(self, ids: NDArray[np.int32]) -> list[str]:
        """One piece a token, joined the text of the reply; the whole text as one piece where a tokenizer's pieces can't be joined."""
        wanted = ids.tolist()
        try:
            pieces = [self._piece[i] for i in wanted]
        except KeyError:
            for i in set(wanted) - self._piece.keys():
                self._piece[i] = self._decode([i])
                if "\ufffd" in self._piece[i]:
                    self._partial.add(i)
            pieces = [self._piece[i] for i in wanted]
        shared = bool(self._partial) and not self._partial.isdisjoint(wanted)
        if self._looked < self.SEEN and not shared:
            self._looked += 1
            self._joins = self._joins and "".join(pieces) == self._decode(wanted)
        if not self._joins:
            return [self._decode(wanted)]
        if not shared:
            return pieces
        text, starts = token_offsets(wanted, self._decode)
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def conversation(
    episode: Episode,
    divergences: Mapping[RowKey, NDArray[np.float32]],
    decoder: Decoder | None,
    secrets: Secrets,
    reveal: bool,
) -> dict[str, Any]:
    """The block of one episode.

    Args:
        divergences: at the loss positions of branches, in order; a turn without has none.
        decoder: None where the student's tokenizer is not at hand: replies are shown as the harness read them.
        secrets: of the pair; not used with ``reveal``.
    """
    secret = (
        frozenset[str]() if reveal else secrets.tests | (secrets.gold if episode.actor_brief_kind == "answer" else frozenset())
    )
    agents = []
    for outcome in episode.agents:
        turns = {t.turn: t for t in episode.turns if t.agent_id == outcome.agent_id}
        by_turn = _by_turn(turns.values(), divergences)
        items = []
        for message, turn in _in_order(episode.messages.get(outcome.agent_id, ()), turns):
            items.append(_item(message, turn, by_turn, decoder, secret, episode.t_start))
        patch = redacted(outcome.patch, spans(outcome.patch, secret))
        agents.append(
            {"name": outcome.agent_id, "feature": outcome.feature_id, "status": outcome.status, "items": items, "patch": patch}
        )
    grade = None
    if episode.grade is not None:
        features = [
            {
                "id": f.feature_id,
                "passed": f.passed,
                "tests": [f.tests_passed, f.tests_failed],
                "output": f.output if reveal else None,
            }
            for f in episode.grade.features
        ]
        grade = {"merge": episode.grade.merge, "apply": episode.grade.apply_status, "features": features}
    return {"id": episode.episode_id, "outcome": episode.outcome, "agents": agents, "grade": grade}


def blocks(conversations: Iterable[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The common block, and one block for each conversation, as base64 of zlib."""
    found = list(conversations)
    seen = Counter(
        text
        for c in found
        for text in {i["t"] for a in c["agents"] for i in a["items"] if isinstance(i["t"], str) and len(i["t"]) >= SHARED}
    )
    number = {text: n for n, text in enumerate(sorted(t for t, count in seen.items() if count > 1))}
    for c in found:
        for a in c["agents"]:
            for i in a["items"]:
                if i["t"] in number:
                    i["t"] = number[i["t"]]
                for key in ("c", "k"):
                    if key in i:
                        i[key] = "".join(map(_CHARACTERS.__getitem__, i[key]))
    return _pack(list(number)), [_pack(c) for c in found]


def _pack(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Bytes of a patch that are no UTF-8 are lone surrogates in it: they become escapes, which JSON reads back.
    return base64.b64encode(zlib.compress(text.encode(errors="backslashreplace"), 6)).decode()


def _by_turn(turns: Iterable[TurnRecord], divergences: Mapping[RowKey, NDArray[np.float32]]) -> dict[int, list[int]]:
    """Turn -> integers of the divergence of its reply's tokens, in order."""
    by_branch: dict[RowKey, list[TurnRecord]] = {}
    for t in turns:
        by_branch.setdefault((t.episode_id, t.agent_id, t.branch), []).append(t)
    out: dict[int, list[int]] = {}
    for key, members in by_branch.items():
        values, at = divergences.get(key), 0
        if values is None:
            continue
        trained = [t for t in members if t.kind in ("policy", "malformed")]
        if sum(len(t.response_ids) for t in trained) != len(values):  # one of the kinds carries no loss
            trained = [t for t in members if t.kind == "policy"]
        codes = quantise(values)
        for t in trained:
            out[t.turn] = codes[at : at + len(t.response_ids)]
            at += len(t.response_ids)
    return out


def _in_order(
    messages: Sequence[Mapping[str, Any]], turns: Mapping[int, TurnRecord]
) -> Iterator[tuple[Mapping[str, Any], TurnRecord | None]]:
    """Each message with the turn that wrote it. A reply that the harness could not read is in no message, only its complaint is: such a
    turn comes before the complaint, or before the next turn that has a message, or at the end."""
    named = {m["extra"]["turn"] for m in messages if m.get("role") == "assistant" and "turn" in (m.get("extra") or {})}
    unread = sorted(turns.keys() - named)

    def reply() -> tuple[Mapping[str, Any], TurnRecord]:
        turn = turns[unread.pop(0)]
        return {"role": "assistant", "content": "", "extra": {"timestamp": turn.t_end}}, turn

    for message in messages:
        extra = message.get("extra") or {}
        if message.get("role") == "exit":
            continue
        turn = turns.get(extra.get("turn", -1)) if message.get("role") == "assistant" else None
        while turn is not None and unread and unread[0] < turn.turn:
            yield reply()
        if unread and extra.get("interrupt_type") == "FormatError":
            yield reply()
        yield message, turn
    while unread:
        yield reply()


def _item(
    message: Mapping[str, Any],
    turn: TurnRecord | None,
    by_turn: Mapping[int, list[int]],
    decoder: Decoder | None,
    secret: frozenset[str],
    started: float,
) -> dict[str, Any]:
    extra = message.get("extra") or {}
    role, text = str(message.get("role")), _text(message)
    if role == "user" and text.startswith(("[Message from", "[Reply from")):
        role = "peer"
    item: dict[str, Any] = {"r": role, "t": text}
    if "timestamp" in extra and started:
        item["s"] = round(extra["timestamp"] - started, 1)
    if turn is not None:
        item["n"] = turn.turn
        if turn.kind != "policy":
            item["kind"] = turn.kind
    if turn is None or decoder is None:
        return item | {"t": redacted(text, spans(text, secret))}
    pieces = decoder.pieces(turn.response_ids)
    codes = by_turn.get(turn.turn) if len(pieces) == len(turn.response_ids) else None
    whole = "".join(pieces)
    if hidden := spans(whole, secret):
        pieces, codes = _without(pieces, codes, hidden)
        whole = "".join(pieces)
    item["t"] = whole
    if codes is not None:
        item |= {"c": list(map(len if whole.isascii() else _units, pieces)), "k": codes}
    return item


def _units(text: str) -> int:
    """Length as JavaScript counts it: in code units of UTF-16."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _without(pieces: list[str], codes: list[int] | None, hidden: list[tuple[int, int]]) -> tuple[list[str], list[int] | None]:
    """Tokens that touch a hidden span are left out, a note in their place."""
    kept: list[str] = []
    kept_codes: list[int] = []
    at, told = 0, -1
    for i, piece in enumerate(pieces):
        touched = next((n for n, (a, b) in enumerate(hidden) if at < b and at + len(piece) > a), None)
        at += len(piece)
        if touched is None:
            kept.append(piece)
            kept_codes.append(codes[i] if codes else 0)
        elif touched != told:
            told = touched
            kept.append(note(hidden[touched][1] - hidden[touched][0]))
            kept_codes.append(0)
    return kept, kept_codes if codes is not None else None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)]
    parts += [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or ()]
    return "\n".join(p for p in parts if p)
