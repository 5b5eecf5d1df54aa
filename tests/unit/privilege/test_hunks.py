"""Edits of patches and what can be merged, against Git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.cooperbench.pair_briefs import patch_of
from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hunks import CONTEXT, Edit, added_lines, collisions, edits, gap, is_test, made_real_edits
from verl_opsd.privilege.workflows import check_workflow, draft, parse_workflow

BASE = [f"line {i}" for i in range(1, 31)]


def test_edits_by_hand():
    patch = (
        "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n"
        "@@ -2,5 +2,6 @@ def f():\n two\n-three\n+3\n four\n+4.5\n five\n six\n"
        "@@ -20 +21,0 @@\n-twenty\n"
        "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+a\n+b\n"
        "diff --git a/gone.py b/gone.py\n--- a/gone.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-a\n-b\n"
    )
    found = edits(patch)
    assert found["x.py"] == [Edit(3, 3), Edit(5, 4), Edit(20, 20)]  # line 3 replaced, something behind line 4, line 20 removed
    assert found["new.py"] == [Edit(1, 0)] and found["gone.py"] == [Edit(1, 2)]


def test_a_line_ends_at_its_line_feed_alone():
    """Git's lines hold form feeds, the separators of Unicode and carriage returns."""
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,4 @@\n a\x0cb\r\n-c\u2028d\n+e\x85f\n+g\x1ch\n i\n"
    assert edits(patch) == {"x.py": [Edit(2, 2)]} and added_lines(patch) == ["e\x85f", "g\x1ch"]
    assert made_real_edits(patch)


def test_gap_by_hand():
    assert gap(Edit(3, 5), Edit(9, 9)) == 3 == gap(Edit(9, 9), Edit(3, 5))  # 6 7 8
    assert gap(Edit(6, 5), Edit(9, 10)) == 3 and gap(Edit(6, 5), Edit(6, 5)) == 0
    assert gap(Edit(1, 10), Edit(3, 4)) < 0 and gap(Edit(3, 3), Edit(4, 4)) == 0


def test_a_cut_patch_is_refused():
    with pytest.raises(OpsdError, match="ends inside"):
        edits("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n-b\n")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("tests/x.py", True), ("a/test_x.py", True), ("x_test.go", True), ("x.spec.ts", True), ("MyTest.java", True),
     ("src/latest.py", False), ("contest/a.py", False), ("inspect.py", False)],
)  # fmt: skip
def test_test_files(path, expected):
    assert is_test(path) == expected


def diff(folder: Path, new: list[str]) -> str:
    (folder / "old").write_text("\n".join(BASE) + "\n")
    (folder / "new").write_text("\n".join(new) + "\n")
    out = subprocess.run(["git", "diff", "--no-index", "old", "new"], cwd=folder, capture_output=True, text=True, check=False)
    return out.stdout.replace("b/new", "b/old")


def changed(at: int, count: int, new: int, mark: str) -> list[str]:
    """The base with ``count`` lines from ``at`` on replaced by ``new`` others."""
    return BASE[: at - 1] + [f"{mark} {i}" for i in range(new)] + BASE[at - 1 + count :]


@settings(max_examples=40, deadline=None)
@given(
    a=st.tuples(st.integers(1, 28), st.integers(0, 3), st.integers(0, 2)),
    b=st.tuples(st.integers(1, 28), st.integers(0, 3), st.integers(0, 2)),
)
def test_what_is_called_separable_is_merged_and_applied_by_git(a, b, tmp_path_factory):
    """Both ways that grading takes: a three-way merge, and one patch applied after the other."""
    assume(a[1] + a[2] and b[1] + b[2])
    folder = tmp_path_factory.mktemp("merge")
    ours, theirs = changed(*a, "ours"), changed(*b, "theirs")
    patches = [diff(folder, ours), diff(folder, theirs)]
    spans = sorted(
        (Edit(at, at + count - 1) for at, count, _ in (a, b)), key=lambda e: (e.first, e.last)
    )  # by construction, not read off the patch
    untouched = spans[1].first - max(spans[0].last, spans[0].first - 1) - 1
    assert bool(collisions(*patches)["old"]) == (untouched < CONTEXT)
    if untouched >= CONTEXT:
        for name, lines in (("base", BASE), ("ours", ours), ("theirs", theirs)):
            (folder / name).write_text("\n".join(lines) + "\n")
        merge = ["git", "merge-file", "ours", "base", "theirs"]
        assert subprocess.run(merge, cwd=folder, capture_output=True, check=False).returncode == 0


PARTITION = (
    "pair: p\nshape: partition\nregion: first old 1-{end}\nregion: second old {start}-30\n"
    "--- section plan workflow first\na\n--- section plan workflow second\nb\n"
)


@pytest.mark.parametrize(("end", "start", "good"), [(10, 14, True), (10, 13, False), (10, 11, False), (10, 9, False)])
def test_a_partition_tighter_than_three_lines_is_refused(end, start, good):
    text = PARTITION.format(end=end, start=start)
    if good:
        assert parse_workflow(text, "f", "p").regions["first"] == {"old": [Edit(1, 10)]}
    else:
        with pytest.raises(OpsdError, match="lines of context"):
            parse_workflow(text, "f", "p")


def test_partitions_are_checked_against_the_gold_patches(tmp_path):
    workflow = parse_workflow(PARTITION.format(end=10, start=14), "f", "p")
    near, far, outside = (diff(tmp_path, changed(at, 1, 1, m)) for at, m in ((9, "n"), (20, "f"), (12, "o")))
    check_workflow(workflow, near, far)
    with pytest.raises(OpsdError, match="first: old:12-12"):
        check_workflow(workflow, outside, far)
    with pytest.raises(OpsdError, match="make it a handoff"):
        check_workflow(workflow, near, diff(tmp_path, changed(12, 1, 1, "c")))
    handoff = parse_workflow(draft("p", near, near), "f", "p")
    assert handoff.shape == "handoff"
    check_workflow(handoff, near, near)
    with pytest.raises(OpsdError, match="share no file"):
        check_workflow(handoff, near, near.replace("old", "other"))
    drafted = parse_workflow(draft("p", near, far), "f", "p")
    assert drafted.shape == "partition"
    check_workflow(drafted, near, far)


@pytest.mark.parametrize("shape", ["relay", "handoff\nregion: first old 1-2", "partition", "partition\nregion: first old 1-2"])
def test_shapes_that_contradict_themselves_are_refused(shape):
    with pytest.raises(OpsdError, match=r"docs/briefs\.md"):
        parse_workflow(f"pair: p\nshape: {shape}\n--- section a workflow\nx\n", "f", "p")
    with pytest.raises(OpsdError, match="pair"):
        parse_workflow("pair: q\nshape: handoff\n--- section a workflow\nx\n", "f", "p")


@pytest.mark.parametrize("subset", ["pocket_train", "pocket_eval"])
def test_drafts_of_shipped_pairs_hold(subset):
    for pair in load_subset(subset, POCKET_DIR):
        gold = [patch_of(pair, f, "gold") for f in pair.features]
        check_workflow(parse_workflow(draft(pair.key, *gold), "f", pair.key), *gold)
