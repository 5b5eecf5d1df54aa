"""A corpus' rows: one branch of one agent each, in exact token ids, with a hash over everything that is trained on.

<dir>/train.parquet, validation.parquet   rows (:data:`SCHEMA`)
<dir>/corpus.json                         manifest: files, sources, contract, gates, exclusions, counts, each with hashes
<dir>/README.md                           the same for people: a dataset card in Hugging Face's format
<dir>/exemplarity.csv                     a sample for a person to judge
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import file_hash, write_json
from verl_opsd.tokens.records import BriefKind, Episode, Ids, Trajectory

#: Version of the rows and of the manifest; others are refused.
CORPUS_SCHEMA = 3
MANIFEST = "corpus.json"
SPLITS = ("train", "validation")
MANIFEST_KEYS = (
    "schema", "name", "model", "tokenizer", "files", "sources", "contract", "contract_hashes", "spec", "composition", "spread",
    "brief_kinds", "excluded", "evaluation", "gates", "digest",
)  # fmt: skip

_ARRAYS: dict[str, Any] = {
    "input_ids": np.int32,
    "loss_mask": np.int8,
    "turn_index": np.int32,
    "token_class": np.int8,
    "logprobs": np.float32,
}
_TEXT, _INT = pa.string(), pa.int64()
SCHEMA = pa.schema(
    [
        ("source", _TEXT),
        ("episode_id", _TEXT),
        ("agent_id", _TEXT),
        ("branch", _INT),
        ("origin", _TEXT),
        ("repo", _TEXT),
        ("task_id", _INT),
        ("feature_id", _INT),
        ("passed", pa.bool_()),
        ("pair_passed", pa.bool_()),
        ("actor_brief_kind", _TEXT),
        ("contract_hash", _TEXT),
        ("model_version", _INT),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("turn_index", pa.list_(pa.int32())),
        ("token_class", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("row_hash", _TEXT),
    ]
)


@dataclass(frozen=True)
class CorpusRow:
    """One branch of one agent.

    Attributes:
        source: name of the run or file that it comes from.
        origin: ``recorded`` at the gateway, or ``rendered`` from chat messages.
        input_ids, loss_mask, turn_index, token_class, logprobs: length T each, as in ``tokens.records.Trajectory``.
        passed, pair_passed: whether this agent's feature, and both, earned reward on the merged tree.
        actor_brief_kind: the strongest brief in a prompt of the pair.
        row_hash: SHA-256 over every other field; see :meth:`computed_hash`.
    """

    source: str
    episode_id: str
    agent_id: str
    branch: int
    origin: Literal["recorded", "rendered"]
    repo: str
    task_id: int
    feature_id: int
    passed: bool
    pair_passed: bool
    actor_brief_kind: BriefKind
    contract_hash: str
    model_version: int
    input_ids: Ids
    loss_mask: NDArray[np.int8]
    turn_index: NDArray[np.int32]
    token_class: NDArray[np.int8]
    logprobs: NDArray[np.float32]
    row_hash: str = ""

    @property
    def name(self) -> str:
        """``source/episode/agent/branch``."""
        return f"{self.source}/{self.episode_id}/{self.agent_id}/{self.branch}"

    @property
    def task(self) -> str:
        """``repo/task<N>``; empty for text of no task."""
        return f"{self.repo}/task{self.task_id}" if self.repo else ""

    def computed_hash(self) -> str:
        """SHA-256 (hex) over the fields' values; arrays by their bytes in the schema's types."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in (*_ARRAYS, "row_hash")}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
        for name, kind in _ARRAYS.items():
            values = np.ascontiguousarray(getattr(self, name), kind)
            digest.update(f"\0{name}\0{len(values)}\0".encode())
            digest.update(values.tobytes())
        return digest.hexdigest()

    def hashed(self) -> CorpusRow:
        """The same row with its own hash."""
        return dataclasses.replace(self, row_hash=self.computed_hash())


def row_of(source: str, episode: Episode, trajectory: Trajectory) -> CorpusRow:
    """The row of one branch of a scored episode."""
    assert episode.grade is not None
    passed = {f.feature_id: f.earned for f in episode.grade.features}
    feature = next(a.feature_id for a in episode.agents if a.agent_id == trajectory.agent_id)
    return CorpusRow(
        source=source,
        episode_id=episode.episode_id,
        agent_id=trajectory.agent_id,
        branch=trajectory.branch,
        origin="recorded",
        repo=episode.repo,
        task_id=episode.task_id,
        feature_id=feature,
        passed=passed[feature],
        pair_passed=all(passed.values()),
        actor_brief_kind=episode.actor_brief_kind,
        contract_hash=episode.contract_hash,
        model_version=trajectory.model_version[1],
        **{name: getattr(trajectory, name) for name in _ARRAYS},
    ).hashed()


def write_rows(path: Path, rows: Iterable[CorpusRow]) -> None:
    """Writes a file of rows under a temporary name and renames it."""
    table = pa.Table.from_pylist([{n: getattr(r, n) for n in SCHEMA.names} for r in rows], SCHEMA)
    temporary = path.with_name(f".{path.name}")
    pq.write_table(table.replace_schema_metadata({"opsd_corpus_schema": str(CORPUS_SCHEMA)}), temporary, compression="zstd")
    temporary.replace(path)


def read_rows(path: Path) -> list[CorpusRow]:
    """All rows of a file, as they were written.

    Raises:
        OpsdError: not a corpus file of this version.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise OpsdError(f"{path}: {error}", "a corpus' rows are a Parquet file", "build the corpus again") from error
    stamp = (table.schema.metadata or {}).get(b"opsd_corpus_schema", b"none").decode()
    if stamp != str(CORPUS_SCHEMA) or not table.schema.remove_metadata().equals(SCHEMA):
        raise OpsdError(
            f"{path} of corpus schema {stamp} with columns {table.schema.names}",
            f"this version reads schema {CORPUS_SCHEMA} with the columns {SCHEMA.names}",
            "build the corpus again with `opsd corpus build`",
        )
    within = {name: sum(c.values.null_count for c in table[name].chunks) for name in _ARRAYS}
    try:
        if nulls := [n for n in SCHEMA.names if table[n].null_count or within.get(n)]:
            raise ValueError(f"nulls in {nulls}")
        plain = table.drop_columns(list(_ARRAYS)).to_pylist()
        arrays = {
            name: [value.values.to_numpy(zero_copy_only=False).astype(kind, copy=False) for value in table[name]]
            for name, kind in _ARRAYS.items()
        }
    except (ValueError, pa.ArrowException) as error:  # text that is no UTF-8 too
        raise OpsdError(
            f"{path}: {error}", "every value of a row is there, and is of its kind", "build the corpus again"
        ) from error
    return [CorpusRow(**row, **{name: arrays[name][i] for name in _ARRAYS}) for i, row in enumerate(plain)]


def read_split(folder: Path, entry: dict[str, Any]) -> list[CorpusRow]:
    """The rows of one file of a manifest.

    Raises:
        OpsdError: see :func:`read_rows`, or another number of rows than the manifest states.
    """
    rows = read_rows(folder / entry["name"])
    if len(rows) != entry["rows"]:
        raise OpsdError(
            f"{folder / entry['name']} of {len(rows)} rows, its manifest says {entry['rows']}",
            "gate composition: a manifest counts what is there",
            "build the corpus again",
        )
    return rows


def require_files(folder: Path, manifest: dict[str, Any]) -> None:
    """
    Raises:
        OpsdError: a file of the corpus is gone, or was changed.
    """
    for entry in manifest["files"].values():
        path = folder / entry["name"]
        found = file_hash(path) if path.is_file() else "none"
        if found != entry["sha256"]:
            raise OpsdError(
                f"{path} has SHA-256 {found[:12]}, its manifest says {entry['sha256'][:12]}",
                "gate file_hash: a corpus is read as it was built",
                "build it again",
            )


def digest_of(manifest: dict[str, Any]) -> str:
    """SHA-256 (hex) over a manifest's canonical JSON, its own digest left out."""
    plain = json.loads(json.dumps({k: v for k, v in manifest.items() if k != "digest"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Writes ``corpus.json`` with its digest, and returns it."""
    manifest = manifest | {"digest": digest_of(manifest)}
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path, changed: bool = False) -> dict[str, Any]:
    """``corpus.json`` of a corpus.

    Args:
        changed: read one that was changed since it was written too; the gate ``manifest`` names it.

    Raises:
        OpsdError: there is none, it is of another version, was changed, or a part of it is gone.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise OpsdError(f"{folder} holds no {MANIFEST}", "a corpus is a folder of `opsd corpus build`", "name such a folder")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        schema = manifest.get("schema")
    except (ValueError, AttributeError) as error:
        raise OpsdError(f"{path}: {error}", "a manifest is a JSON object", "build the corpus again") from error
    if schema != CORPUS_SCHEMA:
        raise OpsdError(
            f"{path} of schema {schema!r}",
            f"this version reads schema {CORPUS_SCHEMA}",
            "build the corpus again with `opsd corpus build`",
        )
    if missing := [k for k in MANIFEST_KEYS if k not in manifest]:
        raise OpsdError(f"{path} lacks {', '.join(missing)}", "a manifest is whole", "build the corpus again")
    if not changed and (found := digest_of(manifest)) != manifest["digest"]:
        raise OpsdError(
            f"{path} has digest {found[:12]}, it states {str(manifest['digest'])[:12]}",
            "gate manifest: counts, contract and exclusions are read as they were written",
            "build the corpus again with `opsd corpus build`",
        )
    if not _is_form(manifest):
        raise OpsdError(
            f"{path}: files {manifest['files']}, gates {manifest['gates']}",
            f"a file is one of {', '.join(SPLITS)} with name, rows and sha256, train among them; a gate has gate and verdict",
            "build the corpus again",
        )
    return manifest


def _is_form(manifest: dict[str, Any]) -> bool:
    files, gates = manifest["files"], manifest["gates"]
    if not isinstance(files, dict) or not isinstance(gates, list) or "train" not in files or not set(files) <= set(SPLITS):
        return False
    kinds = {"name": str, "rows": int, "sha256": str}
    named = all(isinstance(e, dict) and all(type(e.get(k)) is kind for k, kind in kinds.items()) for e in files.values())
    return named and all(isinstance(g, dict) and {"gate", "verdict"} <= g.keys() for g in gates)
