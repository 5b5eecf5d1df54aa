"""The log: hashes recomputed by hand, every edit of a byte, a line or the end is found, and a killed writer loses nothing."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import HEAD, LOG, append, lines, verify


def fill(folder: Path, count: int, text: str = "why") -> None:
    for i in range(count):
        append(folder, f"g{i}", i / 3, 0.5, "pass", f"{text} ä {i}", clock=lambda i=i: 100.0 + i)


def wrong(folder: Path) -> list[str]:
    return [str(f) for f in verify(folder)[1] if not f.killed]


def test_hashes_are_those_of_the_text(tmp_path):
    fill(tmp_path, 3)
    prev = "0" * 64
    for n, raw in enumerate((tmp_path / LOG).read_text().splitlines()):
        body, digest = raw.split(', "hash": "')
        line = json.loads(raw)
        assert digest == hashlib.sha256(f"{body}}}".encode()).hexdigest() + '"}'
        assert (line["n"], line["prev"], line["time"], line["gate"]) == (n, prev, 100.0 + n, f"g{n}")
        prev = line["hash"]
    assert (tmp_path / HEAD).read_text() == f"2 {prev}\n" and verify(tmp_path)[1] == []


@given(st.data())
def test_an_edit_of_any_byte_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("log")
    fill(folder, 3)
    raw = bytearray((folder / LOG).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.sampled_from([b for b in b'0a"\n {9' if b != raw[at]]))
    (folder / LOG).write_bytes(raw)
    assert verify(folder)[1], bytes(raw)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_line_that_is_removed_is_found(tmp_path, lost):
    fill(tmp_path, 3)
    kept = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    (tmp_path / LOG).write_bytes(b"".join(x for i, x in enumerate(kept) if i != lost))
    assert wrong(tmp_path)
    if lost == 2:
        with pytest.raises(OpsdError, match="not the one that was written last"):
            append(tmp_path, "next", 1, 1, "pass")


def test_lines_that_change_places_are_found(tmp_path):
    fill(tmp_path, 4)
    a, b, c, d = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    (tmp_path / LOG).write_bytes(a + c + b + d)
    assert any("does not follow" in w for w in wrong(tmp_path))


def test_a_line_with_its_hash_made_anew_is_found(tmp_path):
    fill(tmp_path, 3)
    raw = (tmp_path / LOG).read_text().splitlines()
    for edited in (1, 2):  # the next line gives the first away, the head the last
        body = raw[edited].split(', "hash": "')[0].replace('"pass"', '"fail"')
        made = f'{body}, "hash": "{hashlib.sha256(f"{body}}}".encode()).hexdigest()}"}}'
        (tmp_path / LOG).write_text("\n".join([*raw[:edited], made, *raw[edited + 1 :]]) + "\n")
        assert wrong(tmp_path)


def test_every_cut_of_a_line_being_written_is_kept_and_told(tmp_path, capfd):
    """As after kill -9: of the last line any number of bytes, with the head of the line before."""
    fill(tmp_path, 2)
    before, head = (tmp_path / LOG).read_bytes(), (tmp_path / HEAD).read_bytes()
    append(tmp_path, "third", 3, 3, "pass", 'text with "quotes" and ünïcode')
    whole = (tmp_path / LOG).read_bytes()
    for cut in range(len(before) + 1, len(whole)):
        (tmp_path / LOG).write_bytes(whole[:cut])
        (tmp_path / HEAD).write_bytes(head)
        assert [f.killed for f in verify(tmp_path)[1]] == [True]
        append(tmp_path, "after", 4, 4, "pass")
        found, findings = verify(tmp_path)
        if cut == len(whole) - 1:  # only the line break was missing: nothing is lost
            assert [x["gate"] for x in found] == ["g0", "g1", "third", "after"] and findings == []
            continue
        assert [x["gate"] for x in found] == ["g0", "g1", "torn_line", "after"] and [f.killed for f in findings] == [True]
        assert found[2]["value"].encode() == whole[len(before) : cut]
        assert "a writer was killed in line 2" in capfd.readouterr().err


def test_killed_between_the_line_and_its_head(tmp_path):
    fill(tmp_path, 1)
    head = (tmp_path / HEAD).read_bytes()
    append(tmp_path, "second", 1, 1, "pass")
    (tmp_path / HEAD).write_bytes(head)
    assert verify(tmp_path)[1] == []
    append(tmp_path, "third", 1, 1, "pass")
    assert [x["gate"] for x in lines(tmp_path)] == ["g0", "second", "third"] and verify(tmp_path)[1] == []


def write_many(folder: str, name: str) -> None:
    for i in range(25):
        append(Path(folder), name, i, None, "recorded", "x" * 3000)


def test_processes_wait_for_one_another(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_many, args=(str(tmp_path), f"p{n}")) for n in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    found, findings = verify(tmp_path)
    assert findings == [] and len(found) == 100
    for n in range(4):
        assert [x["value"] for x in found if x["gate"] == f"p{n}"] == list(range(25))


def test_kill_minus_9_of_a_writer(tmp_path):
    """A real one: whatever it was doing, the log can be continued and holds what was written before."""
    code = (
        "import sys; from pathlib import Path; from verl_opsd.evidence.chain import append\n"
        "i = 0\n"
        "while True: append(Path(sys.argv[1]), 'g', i, None, 'recorded', 'x' * 20000); i += 1; print(i, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 20:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    append(tmp_path, "end", 1, None, "recorded")
    found, findings = verify(tmp_path)
    assert [x["value"] for x in found if x["gate"] == "g"] == list(range(len(found) - 1 - sum(f.killed for f in findings)))
    assert len(found) > 20 and all(f.killed for f in findings)


@pytest.mark.parametrize("content", ['{"gate": "old", "verdict": "pass"}\n', "text\n", "[]\n", "3\n"])
def test_a_log_of_other_lines_is_not_continued(tmp_path, content):
    (tmp_path / LOG).write_text(content)
    assert wrong(tmp_path)
    with pytest.raises(OpsdError, match="way out"):
        append(tmp_path, "g", 1, 1, "pass")


def test_no_log(tmp_path):
    assert lines(tmp_path) == [] and "does not exist" in wrong(tmp_path)[0]
