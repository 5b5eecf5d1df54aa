"""The log: one JSON object a line, each with its number, the hash of the line before, and its own.

    {"n": 0, "time": ..., "gate": ..., "value": ..., "threshold": ..., "verdict": ..., "detail": ..., "prev": ..., "hash": ...}

``hash`` is the SHA-256 of the line's text without it, so an edit of any byte shows in the line itself or in the next one.
``prev`` of line 0 is 64 zeros. ``evidence.head`` holds number and hash of the last line: a log that is shorter has lost
lines. A chain shows edits to whoever has an older copy or the head; it can't stop someone who rewrites all three, which is
why evidence is copied elsewhere (``evidence.copies``).

``verdict``: ``pass`` or ``fail`` of a gate, ``void`` of a prediction that the infrastructure spoilt, ``recorded`` where
nothing is judged, ``torn`` for the rest of a line whose writer was killed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError

LOG, HEAD = "evidence.jsonl", "evidence.head"
VERDICTS = ("pass", "fail", "void", "recorded", "torn")
_START = "0" * 64
_FORM: dict[str, type | tuple[type, ...]] = {"n": int, "time": (int, float), "gate": str, "verdict": str, "detail": str}
#: Gate -> what the value of its lines has at least, of those that are read again.
_VALUES: dict[str, dict[str, type]] = {
    "episode": {"episode": str, "version": int},
    "invalidated": {"field": str, "value": str},
    "predicted": {"name": str, "sha256": str},
    "claim": {"id": str, "text": str, "status": str, "support": list},
}
_HASHED = re.compile(rb'^(\{.*), "hash": "([0-9a-f]{64})"\}$', re.DOTALL)
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a log.

    Attributes:
        n: number of the line, from 0; None for the log as a whole.
        killed: a writer was killed, and what it left is there: nothing was edited.
    """

    n: int | None
    what: str
    killed: bool = False

    def __str__(self) -> str:
        return self.what if self.n is None else f"line {self.n}: {self.what}"


def append(
    folder: Path,
    gate: str,
    value: Any,
    threshold: Any,
    verdict: str,
    detail: str = "",
    clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Appends a line to the log in ``folder`` and returns it. Writers in any process wait for one another.

    What a killed writer left of a line is kept: it becomes a line of its own with verdict ``torn``, and is told on stderr.

    Raises:
        OpsdError: the last line is not one of the chain, or the log has lost lines.
    """
    assert verdict in VERDICTS, verdict
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOG, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        last, rest, end = _tail(handle)
        n, prev = _continue(folder, last)
        if rest and (whole := _parse(rest, n, prev)) is not None:  # only its line break is missing
            end = _put(handle, folder, end, rest, n, whole["hash"])
            n, prev = n + 1, whole["hash"]
        elif rest:
            text = rest.decode(errors="backslashreplace")
            print(f"warning: {folder / LOG}: a writer was killed in line {n}; what it left is kept", file=sys.stderr)
            torn, prev = _line(n, prev, clock(), "torn_line", text, None, "torn", "its writer was killed; never a whole line")
            end = _put(handle, folder, end, torn, n, prev)  # longer than the rest, so nothing is cut off
            n += 1
        line, prev = _line(n, prev, clock(), gate, value, threshold, verdict, detail)
        _put(handle, folder, end, line, n, prev)
    finally:
        os.close(handle)
    return dict(json.loads(line))


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, unchecked; [] where there is none. Lines that are no JSON object are left to :func:`verify`."""
    return verify(folder)[0]


def verify(folder: Path) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The lines of a log that can be read, and everything that is wrong with it: [] for a whole, unedited log."""
    path = folder / LOG
    if not path.is_file():
        return [], [Finding(None, f"{path} does not exist")]
    found, findings, count = _read(path.read_bytes())
    return list(found), [*findings, *_against_head(folder, found, count)]


@functools.lru_cache(maxsize=4)  # a report asks for the same log again and again
def _read(data: bytes) -> tuple[list[dict[str, Any]], list[Finding], int]:
    """A log's lines that can be read, what is wrong with it, and how many lines it has."""
    pieces = data.split(b"\n")
    rest = pieces.pop()
    found: list[dict[str, Any]] = []
    findings: list[Finding] = []
    prev = _START
    for n, raw in enumerate(pieces):
        line, wrong = _examine(raw, n, prev)
        findings += [Finding(n, w) for w in wrong]
        if line is None:
            prev = hashlib.sha256(raw).hexdigest()
            continue
        found.append(line)
        prev = str(line.get("hash", ""))
        if line.get("verdict") == "torn":
            findings.append(Finding(n, f"a writer was killed here and left {line.get('value')!r}", killed=True))
    if rest:
        findings.append(Finding(len(pieces), f"its writer was killed, {len(rest)} bytes are left of it", killed=True))
    return found, findings, len(pieces)


def head(folder: Path) -> tuple[int, str] | None:
    """Number and hash of the last line as it was when it was written; None without ``evidence.head``.

    Raises:
        OpsdError: the file holds something else.
    """
    path = folder / HEAD
    if not path.is_file():
        return None
    try:
        n, digest = path.read_text().split()
        return int(n), digest
    except ValueError as error:
        raise OpsdError(
            f"{path} can't be read",
            "it holds number and hash of the last line",
            f"look with `opsd evidence verify {folder}`; go on in a new run directory",
        ) from error


def _examine(raw: bytes, n: int, prev: str) -> tuple[dict[str, Any] | None, list[str]]:
    try:
        line = json.loads(raw)
    except ValueError:
        return None, [f"not JSON: {raw[:60]!r}"]
    match = _HASHED.match(raw)
    if match is None or not _has(line, _FORM) or not _has(line.get("value"), _VALUES.get(line["gate"])):
        return None, [f"no line of the chain: {raw[:60]!r}"]
    wrong = []
    if hashlib.sha256(match[1] + b"}").hexdigest() != match[2].decode():
        wrong.append("edited: its text does not have its hash")
    if line.get("prev") != prev:
        wrong.append("it does not follow the line before: lines were edited, removed, added or moved")
    if line.get("n") != n:
        wrong.append(f"it calls itself line {line.get('n')}")
    return line, wrong


def _has(value: Any, form: Mapping[str, type | tuple[type, ...]] | None) -> bool:
    return form is None or (isinstance(value, dict) and all(isinstance(value.get(k), kind) for k, kind in form.items()))


def _parse(raw: bytes, n: int, prev: str) -> dict[str, Any] | None:
    line, wrong = _examine(raw, n, prev)
    return None if wrong else line


def _against_head(folder: Path, found: Sequence[Mapping[str, Any]], count: int) -> list[Finding]:
    try:
        there = head(folder)
    except OpsdError:
        return [Finding(None, f"{HEAD} can't be read")]
    if there is None:
        return [Finding(None, f"{HEAD} is missing: removed last lines could not be told")] if found else []
    n, digest = there
    if n >= count:
        return [Finding(None, f"the log has {count} lines, {HEAD} knows of {n + 1}: the last were removed")]
    if not any(x.get("n") == n and x.get("hash") == digest for x in found):
        return [Finding(n, f"{HEAD} holds another hash: the line was rewritten")]
    if n < count - 2:  # a writer killed between its line and the head leaves one, torn or not
        return [Finding(n, f"{HEAD} ends here: {count - 1 - n} lines were added by hand")]
    return []


def _line(n: int, prev: str, now: float, gate: str, value: Any, threshold: Any, verdict: str, detail: str) -> tuple[bytes, str]:
    body = {
        "n": n,
        "time": now,
        "gate": gate,
        "value": value,
        "threshold": threshold,
        "verdict": verdict,
        "detail": detail,
        "prev": prev,
    }
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]}, "hash": "{digest}"}}'.encode(), digest


def _tail(handle: int) -> tuple[bytes | None, bytes, int]:
    """The last whole line (None in an empty log), the bytes behind it, and where these begin."""
    size = os.fstat(handle).st_size
    start, data = size, b""
    while start > 0 and data.count(b"\n") < 2:
        step = min(_BLOCK, start)
        start -= step
        data = os.pread(handle, step, start) + data
    whole, newline, rest = data.rpartition(b"\n")
    if not newline:
        return None, rest, size - len(rest)
    return whole.rpartition(b"\n")[2], rest, size - len(rest)


def _continue(folder: Path, last: bytes | None) -> tuple[int, str]:
    """Number and ``prev`` of the next line."""
    before = None if last is None else json.loads(last) if _HASHED.match(last) else {}
    n, prev = (-1, _START) if before is None else (before.get("n"), before.get("hash"))
    there = head(folder)
    if n is None or (there is not None and (there[0] not in (n, n - 1) or (there[0] == n and there[1] != prev))):
        raise OpsdError(
            f"{folder / LOG}: its last line is not the one that was written last",
            "evidence is only ever appended to, and each line continues the one before",
            f"look with `opsd evidence verify {folder}`; go on in a new run directory",
        )
    return n + 1, str(prev)


def _put(handle: int, folder: Path, at: int, line: bytes, n: int, digest: str) -> int:
    """Writes line ``n`` at byte ``at``, then the head; under the log's lock. Returns where the next one goes."""
    data = line + b"\n"
    if os.pwrite(handle, data, at) != len(data):
        raise OSError(f"{folder / LOG}: line {n} was written in part; the disk is full?")
    temporary = folder / f".{HEAD}"
    temporary.write_text(f"{n} {digest}\n")
    temporary.replace(folder / HEAD)
    return at + len(data)
