"""The cache of teacher signals: exact, crash-safe, and blind to nothing that decides the signal."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_tokenizer import chat_tokenizer

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.privilege import ChatMarkers, make_brief, teacher_view
from verl_opsd.teachers import cache as module
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.cache import SignalCache, TeacherKey, revision_of, tokenizer_hash
from verl_opsd.teachers.device import DeviceTeacher

KEY = TeacherKey("m", "r", "float32", "t", "b")


def row(seed: int, count: int = 3, row: int = 0) -> list[Pass]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2048, (20,), generator=g)
    return [Pass(row, torch.arange(count), ids, torch.arange(count) * 2 + 1)]


def states(passes: list[Pass], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(int(passes[0].ids_T.sum()))
    return torch.randn(sum(len(p.slots_N) for p in passes), 8, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_put_comes_back_bit_by_bit(tmp_path, dtype):
    key = dataclasses.replace(KEY, dtype="server top 3")
    one = SignalCache(tmp_path, key)
    assert one.get(row(1)) is None
    hidden = states(row(1), dtype)
    hidden[0, 0], hidden[0, 1] = float("-inf"), -0.0  # an unused slot of a support signal
    one.put(row(1), hidden)
    other = SignalCache(tmp_path, key)
    back = other.get(row(1))
    assert back.dtype == dtype and back.shape == hidden.shape
    assert back.view(torch.uint8).tolist() == hidden.view(torch.uint8).tolist()
    assert (one.hits, one.misses, other.hits, other.misses) == (0, 1, 1, 0)
    assert other.size() == one.written == sum(p.stat().st_size for p in tmp_path.glob("*/*"))


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_a_signal_that_is_no_number_is_not_kept(tmp_path, odd):
    """Every later run over the same views would read it, with a teacher that is well again."""
    hidden = states(row(1))
    hidden[1:, 3] = float(odd)
    server = SignalCache(tmp_path / "server", dataclasses.replace(KEY, dtype="server top 3"))
    if odd == "-inf":  # the log-probability of a slot that is not used
        server.put(row(1), hidden)
    else:
        with pytest.raises(OpsdError, match="2 of 3 loss positions"):
            server.put(row(1), hidden)
    store = SignalCache(tmp_path / "device", KEY)
    with pytest.raises(OpsdError, match="teacher m gives NaN or infinite values at 2 of 3 loss positions"):
        store.put(row(1), hidden)
    assert store.get(row(1)) is None and store.size() == 0


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TeacherKey)])
def test_every_part_of_the_key_decides(tmp_path, field):
    SignalCache(tmp_path, KEY).put(row(1), states(row(1)))
    assert SignalCache(tmp_path, KEY).get(row(1)) is not None
    assert SignalCache(tmp_path, dataclasses.replace(KEY, **{field: "other"})).get(row(1)) is None


def test_parts_of_the_key_do_not_run_into_one_another(tmp_path):
    SignalCache(tmp_path, dataclasses.replace(KEY, teacher="ab", revision="c")).put(row(1), states(row(1)))
    assert SignalCache(tmp_path, dataclasses.replace(KEY, teacher="a", revision="bc")).get(row(1)) is None


def test_every_id_and_position_decides_but_not_the_place_in_the_batch(tmp_path):
    store = SignalCache(tmp_path, KEY)
    store.put(row(1), states(row(1)))
    (p,) = row(1)
    for t in range(len(p.ids_T)):
        ids = p.ids_T.clone()
        ids[t] += 1
        assert store.get([dataclasses.replace(p, ids_T=ids)]) is None
    for changed in (p.index_N + 1, p.index_N.flip(0)):
        assert store.get([dataclasses.replace(p, index_N=changed)]) is None
    assert store.get([dataclasses.replace(p, slots_N=p.slots_N.flip(0))]) is None
    cut = [Pass(0, p.slots_N[:2], p.ids_T, p.index_N[:2]), Pass(0, p.slots_N[2:], p.ids_T, p.index_N[2:])]
    assert store.get(cut) is None
    assert store.get(row(1, row=7)) is not None


def test_a_changed_brief_is_another_view(tmp_path):
    tokenizer = chat_tokenizer()
    markers = ChatMarkers.from_tokenizer(tokenizer)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "yes"}]
    ids = np.array(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False), np.int32)
    mask = np.zeros(len(ids), np.int8)
    mask[-3] = 1
    store = SignalCache(tmp_path, KEY)
    seen = 0
    for task in ("Add a flag.", "Add a flag!"):
        for placement in ("system", "last_user"):
            brief = make_brief("peer_spec", "agent1", {"agent2": task}).ids(tokenizer)
            view = teacher_view(ids, mask, brief, placement, markers)
            passes = [Pass(0, torch.arange(1), torch.from_numpy(view.ids.astype(np.int64)), torch.from_numpy(view.position))]
            assert store.get(passes) is None
            store.put(passes, states(passes))
            seen += 1
    assert len(list(tmp_path.glob("*/*"))) == seen == 4


@pytest.mark.parametrize("damage", ["cut", "flip", "header", "empty", "other row", "equal row", "dtype", "shape", "grown"])
def test_a_damaged_entry_is_found_and_made_again(tmp_path, damage):
    store = SignalCache(tmp_path, KEY)
    calls = []

    def teacher(rows):
        calls.append(len(rows))
        return [states(r) for r in rows]

    first = store.score([row(1)], teacher)
    path = store.entry(row(1))
    data = path.read_bytes()
    store.put(row(2, count=5), states(row(2, count=5)))
    store.put(row(3), states(row(3)))
    broken = {
        "cut": data[:-7],
        "flip": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "header": b"{" + data,
        "empty": b"",
        "other row": store.entry(row(2, count=5)).read_bytes(),
        "equal row": store.entry(row(3)).read_bytes(),
        "dtype": data.replace(b"float32", b"int32", 1),
        "shape": data.replace(b"[3, 8]", b"[3, 4]", 1),
        "grown": data + b"x",
    }[damage]
    path.write_bytes(broken)
    again = store.score([row(1)], teacher)
    assert torch.equal(first[0], again[0]) and calls == [1, 1] and store.damaged == 1
    assert path.read_bytes() == data
    assert torch.equal(store.score([row(1)], teacher)[0], first[0]) and calls == [1, 1]


def test_only_what_is_missing_is_scored_and_the_order_is_kept(tmp_path):
    store = SignalCache(tmp_path, KEY)
    asked: list[int] = []

    def teacher(rows):
        asked.extend(int(r[0].ids_T.sum()) if r else -1 for r in rows)
        return [states(r) if r else torch.empty(0, 8) for r in rows]

    rows = [row(s, count=1 + s) for s in range(5)]
    store.score(rows[1:3], teacher)
    asked.clear()
    out = store.score([rows[0], [], *rows[1:]], teacher)
    assert sorted(asked) == sorted([-1, *(int(rows[i][0].ids_T.sum()) for i in (0, 3, 4))])
    assert [tuple(o.shape) for o in out] == [(1, 8), (0, 8), (2, 8), (3, 8), (4, 8), (5, 8)]
    assert all(torch.equal(o, states(r)) for o, r in zip(out[2:], rows[1:], strict=True))
    asked.clear()
    store.score(rows, teacher)
    assert asked == []  # a second epoch makes no teacher pass


WRITER = """
import sys, torch
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.cache import SignalCache, TeacherKey
store = SignalCache(sys.argv[1], TeacherKey("m", "r", "float32", "t", "b"))
print("ready", flush=True)
n = 0
while True:
    store.put([Pass(0, torch.arange(64), torch.arange(80) + n, torch.arange(64))], torch.full((64, 4096), float(n)))
    n += 1
"""


def test_kill_9_while_writing_leaves_whole_entries_only(tmp_path):
    rng, whole = random.Random(0), 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.3 + rng.random() / 5)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    store = SignalCache(tmp_path, KEY)
    for n in range(len(list(tmp_path.glob("*/[!.]*")))):
        found = store.get([Pass(0, torch.arange(64), torch.arange(80) + n, torch.arange(64))])
        assert found is not None and torch.equal(found, torch.full((64, 4096), float(n)))
        whole += 1
    assert whole > 3 and store.damaged == 0


def test_every_flipped_bit_is_found(tmp_path):
    store = SignalCache(tmp_path, KEY)
    store.put(row(1), states(row(1)))
    path = store.entry(row(1))
    data, whole = path.read_bytes(), store.get(row(1))
    for at in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            found = store.get(row(1))
            assert found is None or torch.equal(found, whole)  # a blank of the header may be another one


def test_files_that_other_processes_take_away_meanwhile(tmp_path, monkeypatch):
    """Between listing a folder and looking at its files another run may have renamed or removed them."""
    gone = [tmp_path / "ab" / ".1.tmp", tmp_path / "ab" / "entry"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(gone))
    assert SignalCache(tmp_path, KEY).size() == 0


def test_left_temporary_files_are_removed_once_they_are_old(tmp_path):
    folder = tmp_path / "ab"
    folder.mkdir()
    old, new = folder / ".1.tmp", folder / ".2.tmp"
    old.write_bytes(b"x" * 50)
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    store = SignalCache(tmp_path, KEY)
    assert not old.exists() and new.exists() and store.size() == 0


def test_revision_changes_with_any_weight(tmp_path, monkeypatch):
    path = make_tiny(tmp_path / "m", seed=1)
    probe = DeviceTeacher(str(path), torch.float32, "cpu", "t").probe()
    first = revision_of(str(path), probe)
    assert revision_of(str(path), probe) == first
    moved = probe.clone()
    moved[0, 0] = torch.nextafter(moved[0, 0], torch.tensor(9.0))
    assert revision_of(str(path), moved) != first
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert revision_of(str(path), probe) != first
    assert revision_of("org/name", probe) != revision_of("org/name", moved)
    monkeypatch.setattr(module, "SAMPLED", 1000)  # now by samples: size, start and end count
    monkeypatch.setattr(module, "SAMPLE", 64)
    sampled = revision_of(str(path), probe)
    for at in (0, len(data) - 1):
        data[at] ^= 1
        weights.write_bytes(data)
        assert revision_of(str(path), probe) != sampled
        data[at] ^= 1
    weights.write_bytes(data)
    assert revision_of(str(path), probe) == sampled


def test_tokenizers_are_told_apart():
    import copy

    one = chat_tokenizer()
    other = copy.deepcopy(one)
    assert tokenizer_hash(one) == tokenizer_hash(other)
    other.chat_template += " "
    assert tokenizer_hash(one) != tokenizer_hash(other)
    assert tokenizer_hash(chat_tokenizer(False)) != tokenizer_hash(one)
