"""The audit flags what gave answers away before, and passes what did not."""

from __future__ import annotations

import dataclasses
import keyword
import re
import shutil

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
from verl_opsd.cooperbench.pair_briefs import base_tree, briefs_of, material, patch_of, require_patches
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import (
    Material,
    Section,
    audit,
    compose,
    distinct_texts,
    make_brief,
    require_answer_free,
    require_unseen,
)
from verl_opsd.privilege.audit import gold_in_replies, student_leak
from verl_opsd.privilege.hunks import added_lines
from verl_opsd.privilege.library import MENUS, PROTOCOLS, ROLES

PAIRS = load_subset("pocket_train", POCKET_DIR) + load_subset("pocket_eval", POCKET_DIR)
#: From the document on which this audit rests: text of workflows that were called answer-free.
TYPST = """**Your role (agent1):** Own the file. Within ~10 steps message agent2: 'I am taking crates/typst/src/foundations/str.rs and writing
ONE signature carrying both params'. Then write the union: `pub fn first(&self, #[named] pattern: Option<Str>, #[named] #[default]
case: Option<Str>) -> StrResult<Str>` (same for last). Body: if pattern is Some -> `if self.0.is_empty() { return
Err(string_is_empty()); }` then scan on `g.chars().next()`; else the plain next(). Error text must be literal: `no character matches
pattern "{}"`, `unknown pattern "{}"`."""
TYPST_2 = """**Your role (agent2):** Do NOT write an independent version. Fetch, read agent1's diff once as a reviewer specifically for
blind-compile hazards (`{}` on a non-Display value, `Str` vs `&str` mismatches). Then `git fetch origin && git checkout origin/agent1 --
crates/typst/src/foundations/str.rs`, commit, and assert `git diff origin/agent1 -- crates/typst/src/foundations/str.rs` prints nothing."""


def guidance(text: str):
    return compose(Section("text", "guidance", text))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (TYPST, {"code", "collision"}),
        (TYPST_2, {"code", "collision"}),
        ('hash_sha256 = Regex(r"[a-fA-F0-9]{64}")', {"code"}),
        ('Use Regex(r"[a-fA-F0-9]{64}") for it.', {"code"}),
        ('Use `Regex(r"[a-fA-F0-9]{64}")` for it.', {"code"}),
        ("Then run sed -i '61a import re' there.", {"code", "line_number"}),
        ("sed -i '61a", {"code", "line_number"}),
        ("Mind that the hidden tests assert on the message.", {"test_text"}),
        ("The tests must not match an empty string.", {"test_text"}),
        ("Put it at line 61.", {"line_number"}),
        ("Put it behind lines 61-70.", {"line_number"}),
        ("See parser:88 or rather parse.py:88.", {"line_number", "collision"}),
        ("Both of you edit src/jinja2/filters.py.", {"collision"}),
        ("Copy the reference implementation.", {"test_text"}),
        ("```python\nreturn value[1:]\n```", {"code"}),
        ("diff --git a/x b/x", {"code"}),
        ("@@ -12,3 +12,4 @@", {"code", "line_number"}),
    ],
)
def test_leaks_are_flagged_without_any_material(text, kinds):
    found = audit(guidance(f"# Plan\n\nWork together.\n{text}"), Material())
    assert {f.kind for f in found.findings} == kinds and not found.answer_free
    assert found.verdict.startswith("leaks ")
    with pytest.raises(OpsdError, match="allow_answer"):
        require_answer_free(guidance(text), found, "pair agent1")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("hash_sha256 is the pattern [a-fA-F0-9]{64}, sixty-four hex digits.", "code"),
        ("Use Regex(r“[a-fA-F0-9]{64}”).", "code"),
        ("Use Regex(r\u2019[a-fA-F0-9]{64}\u2019).", "code"),
        ('Use Regex(\n    r"[a-fA-F0-9]{64}"\n)', "code"),
        ('hash_sha256 = Regex (r"[a-fA-F0-9]{64}")', "code"),
        ("hash_sha256 = r'[a-fA-F0-9]{64}'", "code"),
        ("Call parse(text, strict=True) in the loader.", "code"),
        ("Then write def first(self, pattern=None): and return.", "code"),
        ("Declare pub fn first(&self, pattern: Option<Str>) -> StrResult<Str> there.", "code"),
        ("Params are typed Option<Str>, not a new enum.", "code"),
        ("Sort by lambda item: item.key there.", "code"),
        ("It ends with return self.value or default.", "code"),
        ("const x = new Foo(bar);", "code"),
        ("items.map(x => x.id)", "code"),
        ("self.cache = {}", "code"),
        ("if self.0.is_empty() { return Err(string_is_empty()); }", "code"),
        ("for g in s.graphemes(true) {", "code"),
        ("from foo.bar import baz", "code"),
        ("~~~python\nreturn value[1:]\n~~~", "code"),
        ("    total = summed(rows)", "code"),
        ("cat <<'EOF' > module", "code"),
        ("echo 'limit 3' >> settings", "code"),
        ("patch -p1 < theirs", "code"),
        ("sed -E -i '61a foo' x", "line_number"),
        ('sed --in-place "61,70d" x', "line_number"),
        ("awk 'NR==61{print}1' x", "line_number"),
        ("Insert it after line sixty-one.", "line_number"),
        ("Insert it after line number 61.", "line_number"),
        ("Right below the sixty-first line.", "line_number"),
        ("Right below the 61st line of it.", "line_number"),
        ("See line no. 61.", "line_number"),
        ("See ln. 61.", "line_number"),
        ("See line #61.", "line_number"),
        ("Skip the first 60 lines.", "line_number"),
        ("The tests hidden from you want a unique id.", "test_text"),
        ("The tests will check for the literal text.", "test_text"),
        ("A unit test verifies the empty case.", "test_text"),
        ("The grader looks for the message.", "test_text"),
        ("Yours are the lines between 10 and 20.", "line_number"),
        ("Look at it with head -n 61 first.", "line_number"),
        ("    if found\n        raise", "code"),
        ("    while pending:\n        step", "code"),
        ("if not found: raise KeyError", "code"),
        ("for item in items: yield item", "code"),
        ("Both of you edit src/jinja2/.", "collision"),
        ("Both of you edit crates/typst/src/foundations.", "collision"),
        ("Both of you edit outlines.types.dsl.", "collision"),
    ],
)
def test_the_same_said_otherwise_is_flagged(text, kind):
    assert kind in {f.kind for f in audit(guidance(f"# Plan\n\nWork together.\n{text}"), Material()).findings}


@pytest.mark.parametrize(
    "text",
    [
        "Fetch -> rebase -> push. Plan/split/merge, then stop; either/or/both. Use git/gh/send_message only.",
        "Tell your peer that the branch name = your agent id. Claim as `CLAIM path`, release file(s).",
        "Dry-run: `git merge --no-commit --no-ff origin/agent2; git merge --abort`.",
        "`git -c merge.conflictStyle=diff3 merge origin/agent2`, `GIT_EDITOR=true git rebase --continue`, `gh pr create --title=done`",
        'Ask (early, in a message): "which files and functions does your feature touch?"',
        "Leave three lines between your regions; read the diff line by line; at most 2 lines a message; first line: what it is for.",
        "Reserve 20 steps for the end. The first 30 steps are for reading. Row 3 of the board is yours.",
        "The tests of both features run on the merged tree. Test, check the diff, push. One tests, the other checks.",
        "Whoever tests should also verify the merged tree. Tests must pass before you publish.",
        "Define the class hierarchy together: agree on names. For each item: owner, state.",
        "If you are first: claim it.\n    If it is taken:\n    ask.\nFor one in doubt: wait. If both stop: raise it in a message? Then return.",
        "1. Plan.\n    with your peer: agree\n2. Work.\n    return to step 1 when it fails",
    ],
)
def test_how_to_work_is_no_leak(text):
    found = audit(guidance(text), Material())
    assert found.findings == ()


def _renamed(code: str) -> str:
    """Every identifier of two letters and more, but no keyword, with another name."""
    return re.sub(r"\b[a-z_]\w+\b", lambda m: m[0] if keyword.iskeyword(m[0]) or m[0] == "self" else f"q{m[0][::-1]}", code)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.key)
@pytest.mark.parametrize(
    "write",
    [
        lambda code: " ".join(code.split()),
        lambda code: code.replace('"', "'"),
        lambda code: re.sub(r'"([^"]*)"', r"“\1”", code),
        lambda code: re.sub(r"([(,\[])", "\\1\n        ", code),
        _renamed,
        lambda code: f"The code is this: {' '.join(_renamed(code).split())} and no more.",
    ],
    ids=["one line", "other quotes", "typographic quotes", "wrapped", "renamed", "renamed in prose"],
)
def test_a_gold_patch_written_otherwise_is_found(pair, write):
    for feature in pair.features:
        code = "\n".join(added_lines(patch_of(pair, feature, "gold")))
        found = audit(guidance(write(code)), material(pair, "agent1"))
        assert {"code", "gold_text"} & {f.kind for f in found.findings}


def test_a_shared_file_said_in_words_is_knowledge_of_the_collision():
    patch = "--- a/lib/ledgerish.py\n+++ b/lib/ledgerish.py\n@@ -1 +1 @@\n-a\n+b\n"
    known = Material(public=("Make it fast.", "Make it small."), own=("Make it fast.",), gold=(patch, patch))
    for text in ("Both of you edit ledgerish dot py.", "Leave the ledgerish module alone."):
        assert {f.kind for f in audit(guidance(text), known).findings} == {"collision"}
    assert audit(guidance("Keep a ledgerish tone."), known).answer_free


@pytest.mark.parametrize("name", [*PROTOCOLS, *MENUS, *ROLES, "process", "peer_spec", "none"])
def test_protocols_and_specs_pass_on_every_shipped_pair(name):
    made = []
    for pair in PAIRS:
        for agent, brief in briefs_of(pair, name).items():
            found = audit(brief, material(pair, agent, base_tree(pair)))
            assert found.findings == () and found.verdict == "answer-free"
            assert name in (*ROLES, "peer_spec") or found.derivable == 1.0
            require_answer_free(brief, found, pair.key)
            made.append(brief)
    general = name not in (*ROLES, "peer_spec")
    assert distinct_texts(made) in ((1, 2) if general else range(3, 2 * len(PAIRS) + 1))


@pytest.mark.parametrize(("name", "kind"), [("gold_patch", "gold_text"), ("own_tests", "test_text")])
def test_answers_are_found_by_their_text_even_when_declared_as_guidance(name, kind):
    """Declared or not: the same text, called guidance, is found by what the patches hold."""
    for pair in PAIRS[:4]:
        for agent, brief in briefs_of(pair, name, allow_answer=True).items():
            declared = audit(brief, material(pair, agent, base_tree(pair)))
            assert {"answer", kind} <= {f.kind for f in declared.findings}
            hidden = audit(guidance(brief.sections[0].text), material(pair, agent, base_tree(pair)))
            assert kind in {f.kind for f in hidden.findings}
            require_answer_free(brief, declared, pair.key)  # allowed explicitly


@pytest.mark.parametrize("file", ["feature.patch", "tests.patch"])
@pytest.mark.parametrize("left", [None, "", "\n"])
def test_nothing_is_answer_free_beside_nothing(file, left, tmp_path):
    pair = dataclasses.replace(PAIRS[0], dataset_dir=tmp_path)
    shutil.copytree(PAIRS[0].task_dir, pair.task_dir)
    require_patches(pair)
    gone = pair.task_dir / f"feature{pair.features[1]}" / file
    gone.unlink() if left is None else gone.write_text(left)
    with pytest.raises(OpsdError, match=f"feature {pair.features[1]} has no text in {file}"):
        require_patches(pair)


def test_patch_text_counts_only_where_it_is_news():
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1,3 @@\n a\n+alpha beta gamma delta epsilon zeta eta theta iota\n+msg = 'no such entry here'\n"
    words = "alpha beta gamma delta epsilon zeta eta theta"
    for text, kinds in (
        (words, {"gold_text"}),
        (words.rsplit(" ", 1)[0], set()),  # seven tokens
        ("The message is no such entry here, please.", {"gold_text"}),
        ("The message is no such entry.", set()),
    ):
        assert {f.kind for f in audit(guidance(text), Material(gold=(patch,))).findings} == kinds
        for known in (Material(own=(text,), gold=(patch,)), Material(public=(text,), gold=(patch,))):
            assert audit(guidance(f"{text} x"), known).findings == ()


def test_names_that_only_a_patch_defines_are_its_text():
    gold = "--- a/m.py\n+++ b/m.py\n@@ -1 +1,4 @@\n a\n+def clip_spans(x):\n+    class SpanSet: ...\n+def merge(x): ...\n"
    tests = gold.replace("clip_spans", "test_clips_twice").replace("SpanSet", "TestSpans")
    known = Material(gold=(gold,), tests=(tests,))
    for text, kind in (
        ("Call the helper clip_spans.", "gold_text"),
        ("Return a SpanSet there.", "gold_text"),
        ("Make test_clips_twice pass.", "test_text"),
        ("See TestSpans for it.", "test_text"),
    ):
        assert {f.kind for f in audit(guidance(text), known).findings} == {kind}
        for told in (dataclasses.replace(known, own=(text,)), dataclasses.replace(known, public=(text,))):
            assert audit(guidance(f"{text} x"), told).answer_free
    assert audit(guidance("Then merge. Leave clip and spans alone, and clip_spans_later."), known).answer_free


def test_symbols_that_both_sides_touch_are_knowledge_of_the_collision():
    patch = "--- a/m.py\n+++ b/m.py\n@@ -5,1 +5,2 @@ def render_all(x):\n a\n+b\n"
    other = patch.replace("+b", "+c")
    found = audit(guidance("You both change render_all together."), Material(gold=(patch, other)))
    assert [(f.kind, f.text) for f in found.findings] == [("gold_text", "render_all"), ("collision", "render_all")]
    alone = audit(guidance("You both change render_all together."), Material(gold=(patch,)))
    assert [(f.kind, f.text) for f in alone.findings] == [("gold_text", "render_all")]  # what one side's answer changes
    own = Material(("Fix render_all in m.py.", "x"), ("Fix render_all in m.py.",), (patch, other))
    assert audit(guidance("You both change render_all in m.py together."), own).findings == ()


def test_derivable_share_by_hand():
    text = "Call `load_file` from src/io.py with limit 4096 and `git fetch origin`; see `other_name`."
    found = audit(guidance(text), Material(own=("src/io.py has load_file(limit)",)))
    # specifics: load_file, src/io.py, 4096, other_name; the git command is none
    assert (found.specifics, found.derivable) == (4, 0.5)
    assert audit(guidance("Talk to your peer."), Material()).derivable == 1.0


def test_a_public_task_text_is_exempt_and_an_edited_one_is_not():
    task = "Change `parse()` in src/p.py at line 12."
    known = Material((task, "mine"), ("mine",))
    assert audit(make_brief("peer_spec", "agent1", {"agent2": task}), known).answer_free
    assert not audit(make_brief("peer_spec", "agent1", {"agent2": task + " Use x = f(1)."}), known).answer_free


def test_an_answer_in_the_students_own_prompt_is_refused():
    pair = PAIRS[0]
    brief = briefs_of(pair, "gold_patch", allow_answer=True)["agent1"]
    prompt = f"You are agent1.\n{pair.feature_text(pair.features[0])}"
    require_unseen(brief, prompt, "e/agent1")
    added = "\n".join(patch_of(pair, pair.features[0], "gold").splitlines()[4:])
    with pytest.raises(OpsdError, match="student's own prompt"):
        require_unseen(brief, f"{prompt}\n{added}", "e/agent1")
    quoting = f"{pair.feature_text(pair.features[0])}\n{added}"  # a task text that quotes its own solution
    require_unseen(brief, f"You are agent1.\n{quoting}", "e/agent1", told=[quoting])
    with pytest.raises(OpsdError, match="student's own prompt"):
        require_unseen(brief, f"{prompt}\n{added}", "e/agent1", told=[pair.feature_text(pair.features[0])])
    scope = make_brief("peer_spec", "agent1", {"agent2": prompt})
    require_unseen(scope, prompt, "e/agent1")  # a task text is no answer
    assert student_leak(scope, [prompt]) != []


def test_replies_are_scanned_for_gold():
    patch = "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n a\n+one two three four five six seven eight nine\n"
    eight = "one two three four five six seven eight"
    assert gold_in_replies({"agent1": patch}, ["I write", f"echo {eight}"]) == [eight]
    assert gold_in_replies({"agent1": patch}, [eight], known=[eight]) == []
    assert gold_in_replies({"agent1": patch}, [eight.replace("four", "4")]) == []
