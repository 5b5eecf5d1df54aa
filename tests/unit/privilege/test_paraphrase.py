"""Answers in plain words: no code, no run of tokens, and yet what only a gold patch or a hidden test says."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from verl_opsd.cooperbench.dataset import POCKET_DIR, discover, load_subset
from verl_opsd.cooperbench.pair_briefs import base_tree, briefs_of, material, patch_of
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.privilege import Material, Section, audit, compose
from verl_opsd.privilege.library import MENUS, PROTOCOLS, ROLES
from verl_opsd.privilege.paraphrase import paraphrased, traces_of

GOLD = """--- a/click/core.py
+++ b/click/core.py
@@ -10,2 +10,8 @@ def invoke(ctx, callback):
 import os
-def resolve(ctx, name):
+MAX_DEPTH = 12
+def resolve(ctx, strict, name, timeout=30):
+    # how the fallback works
+    first_seen_at = clock()
+    if strict and name not in ctx:
+        raise Missing('no such entry in the table of names')
+    return FallbackScope(ctx, mode="lazy", rate=0.25)
"""
TESTS = """--- /dev/null
+++ b/tests/test_depth.py
@@ -0,0 +1,3 @@
+def test_deep_chains_stop_early():
+    with raises(RecursionStop):
+        walk(deep_chain, steps=77)
"""
TASK, PEER = "Make lookups of names stricter. Write `ctx` where it is needed.", "Make the walk stop."
KNOWN = Material(public=(TASK, PEER), own=(TASK,), gold=(GOLD, ""), tests=("", TESTS))


def brief(text: str):
    return compose(Section("text", "guidance", f"# Plan\n\nWork together. {text}"))


def kinds(text: str, known: Material) -> set[str]:
    return {f.kind for f in audit(brief(text), known).findings}


SAID = [
    ("Change the signature of resolve to accept strict before name.", "gold_text"),
    ("Add a parameter named timeout with default 30 in click/core.py.", "gold_text"),
    ("The function gets a timeout argument, thirty by default.", "gold_text"),
    ("Let it take a timeout.", "gold_text"),
    ("There is a strict flag.", "gold_text"),
    ("Call it `strict`.", "gold_text"),
    ("It is an option called \u201ctimeout\u201d.", "gold_text"),
    ("Its default value is 30.", "gold_text"),
    ("The default is thirty.", "gold_text"),
    ("Set the limit to 12.", "gold_text"),
    ("A maximum of twelve is right.", "gold_text"),
    ("The rate has the value 0.25.", "gold_text"),
    ("Return a fallback scope object: the class is FallbackScope.", "gold_text"),
    ("Remember when it was first seen at all.", "gold_text"),
    ("Keep MAX_DEPTH beside it.", "gold_text"),
    ("Its constant for max depth matters: the max-depth setting.", "gold_text"),
    ("The mode is 'lazy'.", "gold_text"),
    ("It complains of no such entry in the table, or so.", "gold_text"),
    ("Extend the function resolve.", "gold_text"),
    ("What you need is in the core module.", "collision"),
    ("Hidden is that deep chains stop early.", "test_text"),
    ("It raises RecursionStop.", "test_text"),
    ("It raises a recursion stop.", "test_text"),
    ("Mind the module test_depth.", "collision"),
    ("The limit is seventy-seven.", "test_text"),
]


@pytest.mark.parametrize(("text", "kind"), SAID)
def test_what_only_a_patch_says_is_found_in_plain_words(text: str, kind: str) -> None:
    assert kind in kinds(text, KNOWN)
    assert kind not in kinds(text, Material(public=(TASK, PEER), own=(TASK,)))  # by the patches, not by its form


@pytest.mark.parametrize(("text", "kind"), SAID)
def test_what_the_task_says_is_no_leak(text: str, kind: str) -> None:
    """Nor what the agent has read, but for what is to be changed or set: that no file of the base tree says."""
    told = Material((f"{TASK} {text}", PEER), (f"{TASK} {text}",), KNOWN.gold, KNOWN.tests)
    assert not {"gold_text", "test_text", "collision"} & kinds(text, told)


def test_what_the_base_tree_holds_is_a_name_but_no_instruction() -> None:
    base = "def use(timeout, strict): ...\nclass FallbackScope: ...\n# 12 and 30\n"
    read = Material(KNOWN.public, (TASK, base), KNOWN.gold, KNOWN.tests)
    for text in ("Let it take a timeout.", "There is a strict flag.", "Look at FallbackScope."):
        assert kinds(text, read) == set()
    for text in ("Extend the function resolve.", "Set the limit to 12.", "The default is thirty."):
        assert "gold_text" in kinds(text, read)


@pytest.mark.parametrize(
    "text",
    [
        "Be strict about names and set a timeout for yourself: thirty steps, at most 12 messages.",
        "Lazy work is bad work. Resolve conflicts early; fall back to a smaller scope. Stop at the first option that works.",
        "The first 30 steps are for reading, the next 12 for a plan. Item 12 is mine. Keep a limit of 30 steps.",
        "Ask which functions, types and parameters the other one adds, and what their defaults are.",
    ],
)
def test_the_same_words_in_a_plan_are_no_leak(text: str) -> None:
    assert kinds(text, KNOWN) == set()


GENERAL = [
    "Fetch -> rebase -> push. Plan/split/merge, then stop; either/or/both. Use git/gh/send_message only.",
    "Tell your peer that the branch name = your agent id. Claim as `CLAIM path`, release file(s).",
    "Leave three lines between your regions; at most 2 lines a message; first line: what it is for. Reserve 20 steps for the end.",
    "Define the class hierarchy together: agree on names. Raise errors early; return values and types stay as they are. Name the "
    "function, its parameters and options in the message. Default to the first option. Keep messages to a maximum of 50 words.",
    "Say which file, module, class or function you change; which parameter you add and which default value it has. Ask before you "
    "change the signature of a shared function. Use the type names of the task text.",
]


def pairs_of(root: Path) -> list[PairTask]:
    """Every feature with the next one of its task: each patch and each text once."""
    return [PairTask(root, t.repo, t.task_id, pair, "train") for t in discover(root) for pair in itertools.pairwise(t.features)]


def general_texts(pair: PairTask, agent: str) -> set[str]:
    public = {pair.feature_text(f).strip() for f in pair.features}
    made = (briefs_of(pair, name)[agent] for name in (*PROTOCOLS, *MENUS, *ROLES, "process"))
    return {s.text for b in made for s in b.sections} - public | set(GENERAL)


@pytest.mark.parametrize("where", ["pocket", "real"])
def test_general_texts_pass_on_every_task(where: str) -> None:
    """All protocols, menus and roles, and texts like them, against every gold patch and hidden test. Without the base tree, which could
    only make more of them known."""
    root = POCKET_DIR if where == "pocket" else Path(os.environ.get("OPSD_REAL_TASKS", "/nowhere"))
    if not root.is_dir():
        pytest.skip("OPSD_REAL_TASKS names no folder")
    for pair in pairs_of(root):
        for agent in ("agent1", "agent2"):
            known = material(pair, agent)
            for text in general_texts(pair, agent):
                for patches in (known.gold, known.tests):
                    assert paraphrased(text, patches, known.public, known.own) == []


@pytest.mark.parametrize(
    "pair", load_subset("pocket_train", POCKET_DIR) + load_subset("pocket_eval", POCKET_DIR), ids=lambda p: p.key
)
def test_every_new_name_of_a_gold_patch_is_found(pair: PairTask) -> None:
    """Whatever a shipped gold patch calls something that neither a task text nor the base tree names."""
    known = material(pair, "agent1", base_tree(pair))
    texts = " ".join((*known.public, *known.own))
    for feature in pair.features:
        gold = patch_of(pair, feature, "gold")
        new = {
            n for n in traces_of(gold).names if n not in texts and n not in ("key", "items", "result", "head")
        }  # words of any text
        for name in new:
            for said in (f"Add a parameter named {name}.", f"Let it accept {name} at the end.", f"There is the {name} option."):
                assert "gold_text" in {f.kind for f in audit(brief(said), known).findings}, said
