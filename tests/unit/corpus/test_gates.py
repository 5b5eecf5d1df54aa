"""One corrupted token, mask or hash is caught, by a gate with a name; whatever else the corruptor repairs after it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import CONTRACT, rendering

from verl_opsd.corpus.card import card, composition
from verl_opsd.corpus.gates import VERSIONS, check
from verl_opsd.corpus.records import MANIFEST, MANIFEST_KEYS, CorpusRow, read_manifest, read_rows, write_manifest, write_rows
from verl_opsd.corpus.select import Source
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import file_hash
from verl_opsd.tokens import EpisodeStore


def failed(corpus: Path, run: Path, target, sources: bool = True) -> dict[str, str]:
    known = {"run": Source("run", EpisodeStore(run / "episodes"), CONTRACT, str(run))} if sources else None
    found = check(corpus, rendering(), target, known)
    assert [v.gate for v in found] == list(VERSIONS)
    return {v.gate: v.detail for v in found if v.verdict == "fail"}


def rewrite(corpus: Path, change: Callable[[CorpusRow], CorpusRow], *, row_hash: bool = True, files: bool = True) -> None:
    """Changes the first row; a careful corruptor also repairs the row's hash, and the manifest's hash and counts."""
    path = corpus / "train.parquet"
    rows = read_rows(path)
    rows[0] = change(rows[0])
    rows[0] = rows[0].hashed() if row_hash else rows[0]
    write_rows(path, rows)
    if files:
        manifest = read_manifest(corpus)
        manifest["files"]["train"]["sha256"] = file_hash(path)
        manifest["composition"] = composition(rows)
        write_manifest(corpus, manifest)
        (corpus / "README.md").write_text(card(manifest))


def at(row: CorpusRow, name: str, where: int, value: int) -> CorpusRow:
    values = getattr(row, name).copy()
    values[where] = value
    return dataclasses.replace(row, **{name: values})


def reply(row: CorpusRow) -> int:
    return int(np.flatnonzero(row.loss_mask)[3])


def context(row: CorpusRow) -> int:
    return int(np.flatnonzero(row.loss_mask == 0)[-5])


def test_an_untouched_corpus_passes_every_gate(corpus, run, target):
    assert failed(corpus, run, target) == {}
    kinds = {v.gate: v.verdict for v in check(corpus, rendering(), target, None)}
    assert [g for g, v in kinds.items() if v == "not run"] == ["recorded", "success", "observation", "rendered_again"]


@pytest.mark.parametrize("where", [reply, context])
@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "turn_index", "token_class", "logprobs"])
def test_a_changed_value_is_caught_at_every_depth_of_repair(name, where, corpus, run, target):
    def change(row: CorpusRow) -> CorpusRow:
        values = getattr(row, name)
        i = where(row)
        return at(row, name, i, 1 - values[i] if name == "loss_mask" else values[i] + 1)

    rewrite(corpus, change, row_hash=False, files=False)
    found = failed(corpus, run, target)
    assert "file_hash" in found and "row_hash" in found
    manifest = read_manifest(corpus)
    manifest["files"]["train"]["sha256"] = file_hash(corpus / "train.parquet")
    write_manifest(corpus, manifest)
    found = failed(corpus, run, target)
    assert "file_hash" not in found and "row_hash" in found
    rewrite(corpus, lambda row: row)
    found = failed(corpus, run, target)
    assert "row_hash" not in found and f"{name}[" in found["recorded"]
    if name == "loss_mask":
        assert "mask" in failed(corpus, run, target, sources=False)


@pytest.mark.parametrize("where", [reply, context])
def test_a_token_that_was_changed_in_the_episodes_too_is_not_rendered_again(where, corpus, run, target, tmp_path):
    """The corruptor also rewrites the store; what the messages say stays."""
    i = where(read_rows(corpus / "train.parquet")[0])
    rewrite(corpus, lambda row: at(row, "input_ids", i, row.input_ids[i] + 1))
    store = EpisodeStore(tmp_path / "episodes")
    for e in EpisodeStore(run / "episodes").episodes():
        turns = list(e.turns)
        for k, t in enumerate(turns):
            if e.episode_id == "a" and t.agent_id == "agent1" and t.start <= i < t.end:
                whole = np.concatenate([t.new_ids, t.response_ids])
                whole[i - t.start] += 1
                turns[k] = dataclasses.replace(t, new_ids=whole[: len(t.new_ids)], response_ids=whole[len(t.new_ids) :])
        store.write(dataclasses.replace(e, turns=tuple(turns)))
    found = failed(corpus, tmp_path, target)
    assert set(found) <= {"recorded", "rendered_again"} and "rendered_again" in found
    part = "reply" if where is reply else "context"
    assert f"{part}, token {i}:" in found["rendered_again"]


@pytest.mark.parametrize(
    ("entry", "gate"),
    [
        (("files", "train", "sha256"), "file_hash"),
        (("tokenizer",), "tokenizer"),
        (("evaluation", "digest"), "contamination"),
        (("contract", "step_limit"), "contract"),
        (("composition", "loss_tokens"), "composition"),
        (("files", "train", "rows"), "composition"),
    ],
)
def test_a_changed_manifest_is_caught(entry, gate, corpus, run, target):
    manifest = json.loads((corpus / MANIFEST).read_text())
    node = manifest
    for key in entry[:-1]:
        node = node[key]
    old = node[entry[-1]]
    node[entry[-1]] = old + 1 if isinstance(old, int) else ("0" if old[0] != "0" else "1") + old[1:]
    write_manifest(corpus, manifest)
    assert set(failed(corpus, run, target)) - {"card"} == {gate}


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"contract_hash": "0" * 64}, "contract"),
        ({"actor_brief_kind": "answer"}, "brief_kind"),
        ({"repo": "pocket_inifile_task"}, "contamination"),
        ({"episode_id": "gone"}, "recorded"),
    ],
)
def test_a_row_that_says_something_else_is_caught(change, gate, corpus, run, target):
    rewrite(corpus, lambda row: dataclasses.replace(row, **change))
    assert gate in failed(corpus, run, target)


def test_a_failed_run_and_a_copy_are_caught(corpus, run, target):
    rows = read_rows(corpus / "train.parquet")
    write_rows(corpus / "train.parquet", [*rows, rows[0]])
    assert rows[0].name in failed(corpus, run, target)["near_duplicate"]
    lost = dataclasses.replace(rows[0], episode_id="b").hashed()
    write_rows(corpus / "train.parquet", [lost])
    assert "run/b/agent1" in failed(corpus, run, target)["success"]


@pytest.mark.parametrize(
    "broken",
    [
        lambda r: dataclasses.replace(r, loss_mask=np.zeros_like(r.loss_mask)),
        lambda r: dataclasses.replace(r, loss_mask=r.loss_mask * 2),
        lambda r: dataclasses.replace(r, loss_mask=r.loss_mask[1:]),
        lambda r: at(r, "loss_mask", 0, 1),
        lambda r: at(at(r, "turn_index", 0, 0), "loss_mask", 0, 1),
    ],
)
def test_masks_that_are_no_masks(broken, corpus, run, target):
    rewrite(corpus, broken, files=False)
    assert "mask" in failed(corpus, run, target, sources=False)


def test_damage_to_a_file_is_that_gates_and_the_others_do_not_run(corpus, run, target):
    path = corpus / "train.parquet"
    good = path.read_bytes()
    for bad in (good[:-40], good[:200] + bytes(100) + good[300:], None):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        found = check(corpus, rendering(), target, None)
        assert [v.gate for v in found] == list(VERSIONS)
        assert {v.gate for v in found if v.verdict == "fail"} >= {"file_hash"}, bad


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["excluded"].update(not_passed=[]),
        lambda m: m["spread"].update({"yield": 1.0}),
        lambda m: m["spec"].update(level="pair"),
        lambda m: m["sources"][0].update(episodes=9),
        lambda m: m["gates"][0].update(verdict="fail"),
        lambda m: m["contract"].update(step_limit=7),
    ],
)
def test_the_card_is_what_the_manifest_gives(change, corpus, run, target):
    manifest = read_manifest(corpus)
    change(manifest)
    write_manifest(corpus, manifest)
    assert "card" in failed(corpus, run, target)


def test_a_changed_card_is_caught_and_so_is_one_that_is_gone(corpus, run, target):
    path = corpus / "README.md"
    path.write_text(path.read_text().replace("- rows: 3", "- rows: 4"))
    assert "line 17: '- rows: 4" in failed(corpus, run, target)["card"]
    path.unlink()
    assert set(failed(corpus, run, target)) == {"card"}


def test_an_episode_on_both_sides_of_the_split_is_caught(corpus, run, target):
    rows = read_rows(corpus / "train.parquet")
    mine = [[r for r in rows if r.agent_id == "agent1"], [r for r in rows if r.agent_id == "agent2"]]
    manifest = read_manifest(corpus)
    for split, some in zip(("train", "validation"), mine, strict=True):
        write_rows(corpus / f"{split}.parquet", some)
        file = corpus / f"{split}.parquet"
        manifest["files"][split] = {"name": file.name, "rows": len(some), "sha256": file_hash(file)}
    write_manifest(corpus, manifest)
    (corpus / "README.md").write_text(card(manifest))
    assert failed(corpus, run, target) == {"composition": "run/a is in train and validation"}


def other(value):
    """Another value of the same form: what a hand that edits the file would leave."""
    if isinstance(value, dict):
        return {k: other(v) if i == 0 else v for i, (k, v) in enumerate(value.items())} or {"added": 1}
    if isinstance(value, list):
        return [other(value[0]), *value[1:]] if value else ["added"]
    return f"{value}x" if isinstance(value, str) else 1 if value is None else value + 1


@pytest.mark.parametrize("key", [k for k in MANIFEST_KEYS if k != "schema"])
def test_a_manifest_that_was_edited_is_refused_wherever_it_is_read_and_named_by_its_gate(key, corpus, run, target):
    text = (corpus / MANIFEST).read_text()
    (corpus / MANIFEST).write_text(json.dumps(json.loads(text), indent=7))  # the same, laid out otherwise
    assert read_manifest(corpus) == json.loads(text)
    manifest = json.loads(text)
    manifest[key] = other(manifest[key])
    (corpus / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(OpsdError, match=r"corpus\.json has digest [0-9a-f]{12}, it states"):
        read_manifest(corpus)
    if key in ("name", "sources", "composition", "excluded", "gates", "digest", "spread"):  # what a check can go on with
        assert "it has digest" in failed(corpus, run, target)["manifest"]


def test_a_manifest_of_an_older_version_is_refused_with_a_way_out(corpus):
    manifest = {k: v for k, v in read_manifest(corpus).items() if k != "digest"} | {"schema": 2}
    (corpus / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(OpsdError, match=r"of schema 2\n(.|\n)*opsd corpus build"):
        read_manifest(corpus)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 3}'])
def test_a_manifest_that_is_none_is_refused(text, corpus):
    (corpus / MANIFEST).write_text(text)
    with pytest.raises(OpsdError, match=r"corpus\.json"):
        read_manifest(corpus)


def test_a_specification_of_another_version_is_refused(corpus, run, target):
    manifest = read_manifest(corpus)
    manifest["spec"]["no_such"] = 1
    write_manifest(corpus, manifest)
    with pytest.raises(OpsdError, match=r"specification with \['no_such'\]"):
        failed(corpus, run, target)


def paths(value, where=()):
    """Of every key of a manifest, at any depth."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in entries:
        if isinstance(value, dict):
            yield (*where, key)
        yield from paths(below, (*where, key))


@pytest.mark.parametrize(
    "part", ["files", "composition", "spread", "brief_kinds", "evaluation", "sources", "gates", "contract"]
)
def test_a_manifest_with_a_key_lost_anywhere_is_told_from_a_bug(part, corpus, run, target):
    text = (corpus / MANIFEST).read_text()
    found = list(paths(json.loads(text)[part]))
    for *above, key in found:
        manifest = json.loads(text)
        place = manifest[part]
        for step in above:
            place = place[step]
        del place[key]
        write_manifest(corpus, manifest)
        try:
            failed(corpus, run, target)
        except OpsdError as error:
            assert "build the corpus again" in str(error) or "contract" in str(error), (above, key, error)
    assert found


@pytest.mark.parametrize("where", ["value", "list"])
@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "logprobs", "repo", "passed", "row_hash"])
def test_values_that_are_not_there_are_refused(name, where, corpus):
    path = corpus / "train.parquet"
    table = pq.read_table(path)
    values, place = table[name].to_pylist(), table.schema.names.index(name)
    if where == "list" and not isinstance(values[0], list):
        return
    if where == "list":
        values[0][1] = None
    else:
        values[1] = None
    pq.write_table(table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type)), path)
    with pytest.raises(OpsdError, match=r"train\.parquet: nulls in"):
        read_rows(path)


def test_text_that_is_none_is_told_from_a_bug(corpus, run, target):
    """A byte of a repository's name that is no UTF-8: Parquet's own reader passes it."""
    path = corpus / "train.parquet"
    table = pq.read_table(path)
    raw = pa.array([b"\xff\xfe"] * table.num_rows, pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.schema.names.index("repo"), table.schema.field("repo"), raw), path)
    with pytest.raises(OpsdError, match=r"train\.parquet: 'utf-8'"):
        read_rows(path)
    assert "'utf-8'" in failed(corpus, run, target)["file_hash"]
