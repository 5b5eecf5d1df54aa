"""The teacher's hidden states on disk, by what they are made of: a frozen teacher scores a view once, whatever epoch or run asks.

An entry is one file, named by the SHA-256 of everything that decides its content: the passes (ids, scored positions), the teacher's
identity, revision and dtype, the tokenizer, and the brief with its placement. It is written under a temporary name, flushed and
renamed, so a process killed at any point leaves it whole or absent; a hash over its name and all that it holds is checked whenever it is
read.

Suffixes: N loss positions of a row, H hidden size of the teacher.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_opsd.errors import OpsdError
from verl_opsd.teachers.base import Pass, slots_of

#: Version of the file's layout, part of every key.
FORMAT = 2
#: Seconds after which a temporary file has no writer any more.
STALE_S = 3600.0
#: Bytes from which on a weight file is sampled, and of one sample.
SAMPLED, SAMPLE = 64 << 20, 64 << 10


@dataclass(frozen=True)
class TeacherKey:
    """What all entries of one teacher in one configuration share.

    Attributes:
        teacher: its path or hub name. revision: see :func:`revision_of`. dtype: of weights and compute.
        tokenizer: see :func:`tokenizer_hash`. brief: hash or name of the brief, with its placement.
    """

    teacher: str
    revision: str
    dtype: str
    tokenizer: str
    brief: str


def revision_of(path: str, probe: Tensor) -> str:
    """SHA-256 that changes with the weights: hidden states of a fixed sequence, bit by bit, and the files where ``path`` is a folder."""
    digest = hashlib.sha256(_bytes(probe))
    folder = Path(path).expanduser()
    if folder.is_dir():
        _add_files(digest, folder)
    return digest.hexdigest()


def model_digest(path: str) -> str:
    """SHA-256 of a model's files, those of :func:`revision_of`, wherever the folder lies; of a hub name those that were downloaded.

    Raises:
        OpsdError: neither a folder nor a downloaded model.
    """
    from transformers.utils import cached_file

    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(str(cached_file(path, "config.json"))).parent
        except (OSError, ValueError) as e:
            raise OpsdError(
                f"model {path}: {str(e).splitlines()[0]}",
                "a model is named by the content of its files",
                "download it, or name a folder",
            ) from e
    digest = hashlib.sha256()
    _add_files(digest, folder)
    return digest.hexdigest()


def _add_files(digest: hashlib._Hash, folder: Path) -> None:
    """Adds a folder's files. Those above 64 MiB count by size and 66 samples of 64 KiB spread over them, so that 50 GB take no minutes."""
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with file.open("rb") as f:
            if size <= SAMPLED:
                digest.update(f.read())
                continue
            for n in range(66):
                f.seek((size - SAMPLE) * n // 65)
                digest.update(f.read(SAMPLE))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over a tokenizer's entries with their ids, its special tokens and its chat template."""
    parts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer.all_special_tokens,
        tokenizer.eos_token_id,
        tokenizer.chat_template,
    ]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


class SignalCache:
    """Entries of one teacher under one directory, which any number of runs and processes may share.

    Attributes:
        hits, misses: rows that were asked for and were or were not there. damaged: entries that were there and broken; they are
            removed and count as misses. written: bytes written by this object.
    """

    def __init__(self, directory: Path | str, key: TeacherKey):
        self.directory, self.key = Path(directory), key
        self.hits = self.misses = self.damaged = self.written = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob("*/.*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # its writer has renamed it meanwhile
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink(missing_ok=True)

    def entry(self, passes: Sequence[Pass]) -> Path:
        """The file of one row's passes."""
        digest = hashlib.sha256(json.dumps([FORMAT, *astuple(self.key)]).encode())
        for p in passes:
            for part in (p.ids_T, p.index_N, p.slots_N):
                digest.update(f"|{part.numel()}|".encode() + _bytes(part.to(torch.int64)))
        name = digest.hexdigest()
        return self.directory / name[:2] / name

    def get(self, passes: Sequence[Pass]) -> Tensor | None:
        """[N, H] on the host, or None where there is no whole entry."""
        path = self.entry(passes)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self.misses += 1
            return None
        found = _decode(path.name, data, len(slots_of(passes)))
        if found is None:
            path.unlink(missing_ok=True)
            self.damaged += 1
            self.misses += 1
            return None
        self.hits += 1
        return found

    def put(self, passes: Sequence[Pass], hidden_NH: Tensor) -> None:
        """Writes one row's hidden states; whoever writes the same entry at the same time writes the same bytes.

        Raises:
            OpsdError: some are NaN or infinite: every later run would read them. An unused slot of a server's support has the logarithm of 0.
        """
        broken_NH = hidden_NH.isnan() | hidden_NH.isposinf()
        if not self.key.dtype.startswith("server"):
            broken_NH |= hidden_NH.isneginf()
        if bad := int(broken_NH.any(-1).sum()):
            raise OpsdError(
                f"teacher {self.key.teacher} gives NaN or infinite values at {bad} of {len(hidden_NH)} loss positions",
                "a signal is kept for other epochs and runs, so it is whole",
                "look at the teacher's weights, dtype and device",
            )
        path = self.entry(passes)
        data = _encode(path.name, hidden_NH)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
        self.written += len(data)

    def size(self) -> int:
        """Bytes of all whole entries in the directory, of every teacher."""
        total = 0
        for path in self.directory.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # another run has found it damaged meanwhile
                total += 0 if path.name.startswith(".") else path.stat().st_size
        return total

    def report(self) -> dict[str, int]:
        """Counts for a stage's manifest: rows since the start, and bytes of the whole directory."""
        counts = {"cache_hits": self.hits, "cache_misses": self.misses, "cache_damaged": self.damaged}
        return {**counts, "cache_written_bytes": self.written, "cache_bytes": self.size()}

    def score(
        self, rows: Sequence[Sequence[Pass]], teacher: Callable[[Sequence[Sequence[Pass]]], list[Tensor]]
    ) -> list[Tensor]:
        """Hidden states of rows: what is there is read, the rest is scored by ``teacher`` in one call and kept.

        Args:
            rows: the passes of each row. teacher: gives [N_r, H] a row, see ``TeacherPool.score``.
        """
        found = [self.get(row) if row else None for row in rows]
        missing = [i for i, hidden in enumerate(found) if hidden is None and rows[i]]
        empty = [i for i, row in enumerate(rows) if not row]
        if not missing and not empty:
            return [hidden for hidden in found if hidden is not None]
        scored = dict(zip([*missing, *empty], teacher([rows[i] for i in [*missing, *empty]]), strict=True))
        for i in missing:
            self.put(rows[i], scored[i])
        return [scored[i] if hidden is None else hidden for i, hidden in enumerate(found)]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(name: str, dtype: str, shape: Sequence[int], payload: bytes) -> str:
    digest = hashlib.sha256(json.dumps([name, dtype, list(shape)]).encode())
    digest.update(payload)
    return digest.hexdigest()


def _encode(name: str, hidden_NH: Tensor) -> bytes:
    payload, dtype, shape = _bytes(hidden_NH), str(hidden_NH.dtype).removeprefix("torch."), list(hidden_NH.shape)
    header = {"dtype": dtype, "shape": shape, "sha256": _digest(name, dtype, shape, payload)}
    return json.dumps(header).encode() + b"\n" + payload


def _decode(name: str, data: bytes, rows: int) -> Tensor | None:
    """The tensor, or None where the bytes are not what :func:`_encode` made of a tensor with that many rows for this entry."""
    head, _, payload = data.partition(b"\n")
    try:
        header = json.loads(head)
        whole = header["sha256"] == _digest(name, header["dtype"], header["shape"], payload)
    except (ValueError, KeyError, TypeError):
        return None
    if not whole or header["shape"][0] != rows:
        return None
    dtype, shape = getattr(torch, header["dtype"]), tuple(header["shape"])
    return torch.frombuffer(bytearray(payload), dtype=dtype).reshape(shape) if payload else torch.empty(shape, dtype=dtype)
