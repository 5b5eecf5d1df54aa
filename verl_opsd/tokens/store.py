"""Parquet store of episodes: one folder an episode, three tables each, visible only when whole.

    <dir>/store.json                   schema version and contract hash of everything in the store
    <dir>/<episode>/turns.parquet      one row a turn
    <dir>/<episode>/grades.parquet     one row a feature; none where there is no grade
    <dir>/<episode>/episodes.parquet   one row

An episode is written under a temporary name (first character a dot), flushed to disk and renamed, so a process killed
at any point leaves the episode either whole or absent. Schema version and contract hash stand in the metadata of
every file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import AgentOutcome, Episode, FeatureGrade, Grade, Sampling, TurnRecord

#: Version of the files' schema; files of another version are refused.
STORE_SCHEMA = 4

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
TURNS = pa.schema(
    [
        ("episode_id", _TEXT),
        ("agent_id", _TEXT),
        ("turn", _INT),
        ("branch", _INT),
        ("start", _INT),
        ("new_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_logprobs", pa.list_(pa.float32())),
        ("stop_reason", _TEXT),
        ("kind", _TEXT),
        ("sampling", pa.struct([("temperature", _FLOAT), ("top_p", _FLOAT), ("top_k", _INT), ("max_tokens", _INT)])),
        ("model_version", _INT),
        ("contract_hash", _TEXT),
        ("t_start", _FLOAT),
        ("t_end", _FLOAT),
        ("parent_branch", _INT),
        ("fork_position", _INT),
        ("fork_reason", _TEXT),
        ("messages_ref", _TEXT),
    ]
)
GRADES = pa.schema(
    [
        ("merge", _TEXT),
        ("strategy", _TEXT),
        ("apply_status", pa.map_(_TEXT, _TEXT)),
        ("seconds", _FLOAT),
        ("strict_strategy", _TEXT),
        ("feature_id", _INT),
        ("passed", pa.bool_()),
        ("tests_passed", _INT),
        ("tests_failed", _INT),
        ("exit_code", _INT),
        ("output", _TEXT),
        ("strict", pa.bool_()),
        ("note", _TEXT),
    ]
)
AGENT = pa.struct(
    [
        ("agent_id", _TEXT),
        ("feature_id", _INT),
        ("status", _TEXT),
        ("steps", _INT),
        ("patch", pa.binary()),  # UTF-8, other bytes as they are
        ("sent_messages", _INT),
        ("opened_pr", pa.bool_()),
        ("error", _TEXT),
        ("prompt_tokens", _INT),
        ("completion_tokens", _INT),
    ]
)
EPISODES = pa.schema(
    [
        ("episode_id", _TEXT),
        ("repo", _TEXT),
        ("task_id", _INT),
        ("features", pa.list_(_INT)),
        ("split", _TEXT),
        ("contract_hash", _TEXT),
        ("outcome", _TEXT),
        ("agents", pa.list_(AGENT)),
        ("brief_kinds", pa.map_(_TEXT, _TEXT)),
        ("model_version", _INT),
        ("near_benchmark", _TEXT),
        ("t_start", _FLOAT),
        ("t_end", _FLOAT),
        ("messages", _TEXT),
    ]
)
_SCHEMAS = {"turns": TURNS, "grades": GRADES, "episodes": EPISODES}
_ARRAYS = {"new_ids": np.int32, "response_ids": np.int32, "response_logprobs": np.float32}


@functools.cache
def _codecs(name: str) -> dict[str, str]:
    """A table's columns, as the file names them, each with its codec: zstd for long ones only, as making its decompressor takes longer
    than reading a short one."""
    buffer = pa.BufferOutputStream()
    pq.write_table(_SCHEMAS[name].empty_table(), buffer)
    columns = pq.ParquetFile(pa.BufferReader(buffer.getvalue())).schema
    paths = [columns.column(i).path for i in range(len(columns))]
    return {
        p: "zstd" if p.split(".")[0] in _ARRAYS or p.split(".")[-1] in ("patch", "output", "messages") else "snappy"
        for p in paths
    }


class EpisodeStore:
    """Episodes of one contract in one directory. Several processes may write different episodes at once.

    Args:
        contract: of the episodes that will be written; kept beside them, so that a refusal can name the fields.

    Raises:
        OpsdError: the directory holds a store of another schema version.
    """

    def __init__(self, directory: Path | str, contract: EvalContract | None = None):
        self.directory, self._contract = Path(directory), contract
        self.directory.mkdir(parents=True, exist_ok=True)
        self._header()

    @property
    def contract_hash(self) -> str | None:
        """Contract of the episodes; None until the first one is written."""
        header = self._header()
        return header["contract_hash"] if header else None

    def write(self, episode: Episode) -> None:
        """Writes one episode, whole or not at all.

        Raises:
            OpsdError: the episode exists, belongs to another contract than the store or than one of its turns, or holds
                text or messages that can't be stored exactly.
        """
        target = self._folder(episode.episode_id)
        if target.exists():
            self._refuse_overwrite(episode.episode_id)
        if self._contract is not None and self._contract.hash != episode.contract_hash:
            raise OpsdError(
                f"episode {episode.episode_id!r} of contract {episode.contract_hash[:12]}",
                f"this store was opened for contract {self._contract.hash[:12]}",
                "open the store with the contract of the episodes",
            )
        self._check(episode)
        tables = _tables(episode)
        self._claim(episode.contract_hash)
        metadata = {"opsd_schema": str(STORE_SCHEMA), "contract_hash": episode.contract_hash}
        temporary = self.directory / f".{uuid.uuid4().hex}.tmp"
        temporary.mkdir()
        try:
            for name, table in tables.items():
                path = temporary / f"{name}.parquet"
                whole = table.replace_schema_metadata(metadata)
                pq.write_table(whole, path, compression=_codecs(name), use_dictionary=False, write_statistics=False)
                _flush(path)
            _flush(temporary)
            try:
                temporary.rename(target)
            except OSError:
                if target.exists():
                    self._refuse_overwrite(episode.episode_id)
                raise
            _flush(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def read(self, episode_id: str) -> Episode:
        """The episode exactly as it was written.

        Raises:
            OpsdError: there is no such episode, its files are of another schema version or contract, or they are
            damaged.
        """
        return self._read(episode_id, self._header())

    def _read(self, episode_id: str, header: dict[str, Any] | None) -> Episode:
        folder = self._folder(episode_id)
        if not folder.is_dir():
            raise OpsdError(
                f"episode {episode_id!r} in {self.directory}",
                "only episodes that were written can be read",
                f"`opsd episodes list {self.directory.parent}` shows what is there",
            )
        turns, grades, episodes = (self._table(folder / f"{name}.parquet", schema, header) for name, schema in _SCHEMAS.items())
        try:
            return _episode(turns, grades, episodes)
        except (ValueError, TypeError, KeyError, IndexError, pa.ArrowException) as error:
            raise self._damaged(folder, f"{type(error).__name__}: {error}") from error

    def ids(self) -> list[str]:
        """Ids of the episodes, sorted."""
        names = (p.name for p in self.directory.iterdir() if p.is_dir() and not p.name.startswith("."))
        return sorted(urllib.parse.unquote(name) for name in names)

    def episodes(self) -> Iterator[Episode]:
        """All episodes, read one by one in the order of :meth:`ids`."""
        ids = self.ids()
        header = self._header()
        for episode_id in ids:
            yield self._read(episode_id, header)

    def _folder(self, episode_id: str) -> Path:
        if not episode_id:
            raise OpsdError("an empty episode id", "an episode's id names its folder", "give each episode its own id")
        name = urllib.parse.quote(episode_id, safe="")
        return self.directory / (f"%2E{name[1:]}" if name.startswith(".") else name)

    def _header(self) -> dict[str, Any] | None:
        path = self.directory / "store.json"
        if not path.exists():
            return None
        header: dict[str, Any] = json.loads(path.read_text())
        if header.get("schema") != STORE_SCHEMA:
            raise OpsdError(
                f"{self.directory} of schema version {header.get('schema')!r}",
                f"this version reads and writes schema {STORE_SCHEMA}",
                "collect into a new directory, or read the store with the version that wrote it",
            )
        return header

    def _claim(self, contract_hash: str) -> None:
        """Binds an empty store to a contract; the first of several writers wins, the others are checked against it."""
        path = self.directory / "store.json"
        if not path.exists():
            temporary = self.directory / f".{uuid.uuid4().hex}.tmp"
            fields = None if self._contract is None else self._contract.as_dict()
            header = {"schema": STORE_SCHEMA, "contract_hash": contract_hash, "contract": fields}
            temporary.write_text(json.dumps(header))
            _flush(temporary)
            try:
                with contextlib.suppress(FileExistsError):  # another writer was first; its claim is checked below
                    os.link(temporary, path)
            finally:
                temporary.unlink()
        known = self._header() or {}
        if known["contract_hash"] != contract_hash:
            if self._contract is not None and known.get("contract") is not None:
                self._contract.require_same(EvalContract.from_dict(known["contract"]), f"store {self.directory}")
            raise OpsdError(
                f"an episode of contract {contract_hash[:12]} for {self.directory}",
                f"the store holds episodes of contract {str(self.contract_hash)[:12]}, and contracts are never mixed",
                "write to another directory, or collect under the store's contract",
            )

    def _check(self, episode: Episode) -> None:
        grade = episode.grade
        if episode.scored != (grade is not None) or not (episode.scored or episode.outcome.startswith("infra:")):
            raise OpsdError(
                f"episode {episode.episode_id!r} of outcome {episode.outcome!r}, grade {'set' if grade else 'None'}",
                "an outcome is scored, with a grade, or infra:<kind>, without one",
                "grade the episode, or name the infrastructure fault",
            )
        if grade is not None and len(grade.features) != 2:
            raise OpsdError(
                f"episode {episode.episode_id!r} with {len(grade.features)} graded features",
                "a pair has two features",
                "grade both features on the merged tree",
            )
        for turn in episode.turns:
            if (turn.episode_id, turn.contract_hash) != (episode.episode_id, episode.contract_hash):
                raise OpsdError(
                    f"turn {turn.turn} of {turn.episode_id}/{turn.agent_id}, contract {turn.contract_hash[:12]}, "
                    f"in episode {episode.episode_id}, contract {episode.contract_hash[:12]}",
                    "an episode's turns carry its own id and contract",
                    "build the episode from the records of its own sessions",
                )
            dtypes = {name: getattr(turn, name).dtype for name in _ARRAYS}
            if any(dtypes[name] != kind for name, kind in _ARRAYS.items()):
                raise OpsdError(
                    f"turn {turn.turn} of {turn.episode_id}/{turn.agent_id} with arrays of {dtypes}",
                    "ids are int32 and log-probabilities float32, so that nothing is rounded when it is stored",
                    "convert the arrays where the record is made",
                )

    def _refuse_overwrite(self, episode_id: str) -> None:
        raise OpsdError(
            f"episode {episode_id!r} exists in {self.directory}",
            "an episode is written once and never replaced",
            "give the new episode its own id, or remove the folder by hand",
        )

    def _damaged(self, path: Path, why: str) -> OpsdError:
        name = urllib.parse.unquote(path.relative_to(self.directory).parts[0])
        return OpsdError(
            f"episode {name}: {path}: {why}",
            "an episode's three files are whole",
            "restore the files, or collect the episode again; `opsd probe --leave-out` goes on without it and records that",
        )

    def _table(self, path: Path, schema: pa.Schema, header: dict[str, Any] | None) -> pa.Table:
        try:
            # A file is small: its bytes at once take less time than Arrow's own reading.
            table = pq.ParquetFile(pa.BufferReader(path.read_bytes()), pre_buffer=False).read(use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(path, str(error)) from error
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        want = {"opsd_schema": str(STORE_SCHEMA), "contract_hash": header["contract_hash"] if header else None}
        found = {k: metadata.get(k) for k in want}
        if found != want or not table.schema.remove_metadata().equals(schema):
            raise OpsdError(
                f"{path} with {found} and columns {table.schema.names}",
                f"the store's files have {want} and the columns {schema.names}",
                "read it with the version that wrote it, and keep episodes of another store apart",
            )
        return table


def corpus_digest(directory: Path) -> str:
    """SHA-256 of the contract and the ids of the scored training episodes of a store: which states a corpus holds.

    Raises:
        OpsdError: there is no store.
    """
    store = EpisodeStore(directory)
    if store.contract_hash is None:
        raise OpsdError(f"{directory} holds no episodes", "a corpus is a run's stored episodes", "name a run's directory")
    ids = [e.episode_id for e in store.episodes() if e.split == "train" and e.scored]
    return hashlib.sha256(json.dumps([store.contract_hash, sorted(ids)]).encode()).hexdigest()


def _tables(episode: Episode) -> dict[str, pa.Table]:
    messages = _exact_json(episode)
    turns = [_shallow(t) | {"sampling": _shallow(t.sampling)} for t in episode.turns]
    grade = episode.grade
    grades = [
        _shallow(f)
        | {
            "merge": grade.merge,
            "strategy": grade.strategy,
            "apply_status": list(grade.apply_status.items()),
            "seconds": grade.seconds,
            "strict_strategy": grade.strict_strategy,
        }
        for f in (grade.features if grade else ())
        if grade
    ]
    row = {name: getattr(episode, name) for name in EPISODES.names}
    agents = [_shallow(a) | {"patch": a.patch.encode("utf-8", "surrogateescape")} for a in episode.agents]
    row |= {"agents": agents, "messages": messages, "features": list(episode.features)}
    row["brief_kinds"] = list(episode.brief_kinds.items())
    try:
        return {
            "turns": pa.Table.from_pylist(turns, TURNS),
            "grades": pa.Table.from_pylist(grades, GRADES),
            "episodes": pa.Table.from_pylist([row], EPISODES),
        }
    except (UnicodeEncodeError, pa.ArrowException) as error:
        raise OpsdError(
            f"episode {episode.episode_id!r}: {error}",
            "fields have the types of the records and text is valid Unicode, so that it is read back exactly",
            "decode bytes with errors='replace' before they become part of an episode",
        ) from error


def _exact_json(episode: Episode) -> str:
    try:
        text = json.dumps(episode.messages, allow_nan=False)
        exact = json.loads(text) == episode.messages
    except (TypeError, ValueError) as error:
        text, exact = str(error), False
    if not exact:
        raise OpsdError(
            f"messages of episode {episode.episode_id!r} that JSON does not give back ({text[:200]})",
            "messages hold text, numbers, None, lists and dicts with text keys",
            "convert tuples, bytes and objects before the episode is built",
        )
    return text


def _episode(turns: pa.Table, grades: pa.Table, episodes: pa.Table) -> Episode:
    columns: dict[str, list[Any]] = {name: _lists(turns[name].combine_chunks(), kind) for name, kind in _ARRAYS.items()}
    columns |= {name: _plain(turns[name]) for name in TURNS.names if name not in (*_ARRAYS, "sampling")}
    parts = map(_plain, turns["sampling"].flatten())
    records = tuple(
        TurnRecord(**dict(zip(columns, row, strict=True)), sampling=Sampling(*how))
        for row, how in zip(zip(*columns.values(), strict=True), zip(*parts, strict=True), strict=True)
    )
    features = []
    grade = None
    for row in grades.to_pylist():
        whole = {k: row.pop(k) for k in ("merge", "strategy", "apply_status", "seconds", "strict_strategy")}
        features.append(FeatureGrade(**row))
        if len(features) == 2:
            whole["apply_status"] = dict(whole["apply_status"])
            grade = Grade(features=(features[0], features[1]), **whole)
    row = episodes.to_pylist()[0]
    row["features"], row["brief_kinds"] = tuple(row["features"]), dict(row["brief_kinds"])
    patches = [a.pop("patch").decode("utf-8", "surrogateescape") for a in row["agents"]]
    row["agents"] = tuple(AgentOutcome(patch=patch, **a) for patch, a in zip(patches, row["agents"], strict=True))
    row["messages"] = json.loads(row["messages"])
    return Episode(turns=records, grade=grade, **row)


def _plain(column: pa.ChunkedArray) -> list[Any]:
    """A column's values; numbers by way of NumPy, which is faster than Arrow's own."""
    number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    values: list[Any] = column.to_numpy().tolist() if number and not column.null_count else column.to_pylist()
    return values


def _lists(column: pa.ListArray, kind: Any) -> list[NDArray[Any]]:
    """A column's lists, as parts of one array."""
    values = column.values.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    ends = column.offsets.to_pylist()
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def _shallow(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
