"""The built-in briefs: everything that the documents list is there, general texts are general, answers are declared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.privilege import NoBrief, TaskFacts, brief_names, make_brief
from verl_opsd.privilege.library import MENUS, MIXED, PROTOCOLS, ROLES, TEXTS, text_file
from verl_opsd.privilege.textfile import parse
from verl_opsd.privilege.workflows import draft, import_blocks

PEERS = {"agent1": {"agent2": "Add a --quiet flag."}, "agent2": {"agent1": "Add a --color flag."}}
GENERAL = (*PROTOCOLS, *MENUS, "process")
GOLD = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,1 +1,2 @@\n a\n+b = 1\n"


def facts(key: str = "r/task1/f1_f2", patch: str | None = None, files: Path | None = None) -> TaskFacts:
    patches = None if patch is None else {"agent1": patch}
    return TaskFacts(key, lambda agent, kind: f"{kind} of {agent}", files, patches)


def test_all_protocols_of_the_documents_are_there():
    table = ["lead_reviewer", "implementer_integrator", "spec_owner_builder", "driver_navigator", "two_authors_one_gate", "sequential_shifts", "test_first_pair", "claim_registry", "merge_forward", "negotiated_split", "shared_backlog"]  # fmt: skip
    menu = ["lead_reviewer", "handoff", "spec_owner_builder", "claim_registry", "partition_by_region", "sequential_shifts", "implementer_integrator", "two_authors_one_gate", "merge_forward", "shared_backlog"]  # fmt: skip
    assert set(PROTOCOLS) == {*table, *menu} and len(PROTOCOLS) == 13
    assert {*PROTOCOLS, *MENUS, *ROLES, "process", "mixed", "workflow", "own_tests", "gold_patch"} <= set(brief_names())
    assert {p.stem for p in TEXTS.glob("*.md")} == {*GENERAL, *ROLES[1:], "endgame"}


@pytest.mark.parametrize("name", GENERAL)
def test_a_general_brief_says_nothing_of_the_task(name):
    """The same two texts whatever the task: only the agents' ids and the side differ."""
    for agent, peers in PEERS.items():
        brief = make_brief(name, agent, peers)
        assert brief.kind == "guidance" and "{{" not in brief.text
        (peer,) = peers
        assert brief == make_brief(name, agent, {peer: "Another task altogether."}, task=facts("other/task9/f1_f2"))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_sides_come_from_the_sorted_ids(name):
    """Renaming both agents in order renames them in the text; exchanging their order exchanges the jobs."""
    one, two = make_brief(name, "agent1", PEERS["agent1"]).text, make_brief(name, "agent2", PEERS["agent2"]).text
    low = make_brief(name, "a", {"b": "t"}).text
    assert low == one.replace("agent1", "a").replace("agent2", "b")
    assert make_brief(name, "b", {"a": "t"}).text == two.replace("agent1", "a").replace("agent2", "b")
    sided = any(s.side for s in text_file(name).sections)
    assert sided == (one.replace("agent1", "X").replace("agent2", "Y") != two.replace("agent2", "X").replace("agent1", "Y"))


def test_measured_and_corrected_menu_differ_where_the_measured_one_misled():
    measured, corrected = (make_brief(n, "agent1", PEERS["agent1"]).text for n in MENUS)
    assert "Use 1, 2, 6 or 7: exactly one of you writes that file. A split will not merge." in measured
    assert measured.count("BOTH") == 4 and corrected.count("BOTH") == 0
    assert "1, 2, 6 or 7" not in corrected
    assert text_file("menu_corrected").value("status") == "untested"
    assert text_file("menu_measured").value("source").endswith("the decision rule is the document's")
    assert "the decision rule is the document's" not in text_file("menu_corrected").value("source")
    assert "4/10" in text_file("menu_measured").value("status")
    for text in (measured, corrected):
        assert [line[:3].strip() for line in text.splitlines() if line[:1].isdigit()] == [f"{i}." for i in range(1, 11)]


def test_role_arms_add_a_role_to_the_peer_spec():
    spec = make_brief("peer_spec", "agent1", PEERS["agent1"]).text
    arms = [make_brief(r, "agent1", PEERS["agent1"]) for r in ROLES]
    assert [a.text.startswith(spec) for a in arms] == [True] * 4
    assert arms[0].text == spec and [a.kind for a in arms] == ["scope", "guidance", "guidance", "guidance"]
    assert len({a.text for a in arms}) == 4


def test_mixed_deals_one_protocol_a_task_to_both_agents():
    seen = set()
    for n in range(60):
        task = facts(f"repo/task{n}/f1_f2")
        dealt = []
        for agent, peers in PEERS.items():
            text = make_brief("mixed", agent, peers, task=task).text
            dealt += [p for p in MIXED if make_brief(p, agent, peers).text == text]
        assert len(dealt) == 2 and dealt[0] == dealt[1]
        seen.add(dealt[0])
    assert seen == set(MIXED)
    with pytest.raises(OpsdError, match="without a task"):
        make_brief("mixed", "agent1", PEERS["agent1"])


@pytest.mark.parametrize("names", ["peer_spec+peer_spec", "role_owner+peer_spec", "process+handoff+process"])
def test_a_section_twice_is_refused(names):
    with pytest.raises(OpsdError, match="twice"):
        make_brief(names, "agent1", PEERS["agent1"])


@pytest.mark.parametrize(("name", "kind"), [("own_tests", "tests"), ("gold_patch", "gold"), ("hindsight_gold", "gold")])
def test_answers_are_declared_and_never_shown(name, kind):
    with pytest.raises(OpsdError, match="allow_answer"):
        make_brief(name, "agent1", PEERS["agent1"], task=facts())
    brief = make_brief(name, "agent1", PEERS["agent1"], task=facts(), allow_answer=True)
    assert brief.kind == "answer" and [s.answer for s in brief.sections] == [kind]
    assert f"{kind} of agent1" in brief.text
    for shown in (brief.shown, repr(brief), str(brief), repr(brief.sections)):
        assert f"{kind} of agent1" not in shown and f"{len(brief.text)} characters" in shown


def test_own_tests_need_tests():
    empty = TaskFacts("k", lambda agent, kind: "")
    for task in (empty, TaskFacts("k")):
        with pytest.raises(OpsdError, match="own_tests"):
            make_brief("own_tests", "agent1", PEERS["agent1"], task=task, allow_answer=True)


@pytest.mark.parametrize(
    ("patch", "real"),
    [
        ("", False),
        (GOLD, True),
        (GOLD.replace("+b = 1", "+# b"), False),
        (GOLD.replace("+b = 1", "+   "), False),
        (GOLD.replace("x.py", "tests/test_x.py"), False),
        (GOLD.replace("+b = 1", "-b = 1"), True),
        (GOLD.replace("x.py", "latest/contest.py"), True),
    ],
)
def test_hindsight_wants_real_edits(patch, real):
    def make():
        return make_brief("hindsight_gold", "agent1", PEERS["agent1"], task=facts(patch=patch), allow_answer=True)

    if real:
        assert make().kind == "answer"
    else:
        with pytest.raises(NoBrief):
            make()


def test_workflow_is_read_from_its_file_and_ends_with_the_endgame(tmp_path):
    key = "r/task1/f1_f2"
    (tmp_path / "r__task1__f1_f2.md").write_text(draft(key, GOLD, GOLD))
    with pytest.raises(OpsdError, match="allow_answer"):
        make_brief("workflow", "agent1", PEERS["agent1"], task=facts(key, files=tmp_path))
    made = {a: make_brief("workflow", a, p, task=facts(key, files=tmp_path), allow_answer=True) for a, p in PEERS.items()}
    assert made["agent1"].text.startswith("Your role, agent1: ...") and made["agent2"].text.startswith("Your role, agent2: ...")
    assert "git merge --no-commit --no-ff origin/agent2" in made["agent1"].text
    assert made["agent2"].text.endswith("an unpublished branch scores zero.")
    for files, pair in ((tmp_path, "r/task2/f1_f2"), (None, key)):
        with pytest.raises(OpsdError, match="every training state must have its brief"):
            make_brief("workflow", "agent1", PEERS["agent1"], task=facts(pair, files=files), allow_answer=True)


def test_imported_blocks_read_back(tmp_path):
    text = "**Your role (agent1):** write `x = {1}`.\n\nThen stop: {{not a field}}."
    blocks = {"r/task1/f1_f2": {"shape": "handoff", "kind": "gold", "agents": {"agent2": "Copy.", "agent1": text}}}
    ((name, written),) = import_blocks(json.loads(json.dumps(blocks)))
    (tmp_path / name).write_text(written)
    made = make_brief("workflow", "agent1", PEERS["agent1"], task=facts(files=tmp_path), allow_answer=True)
    assert made.sections[0].text == text and made.sections[0].answer == "gold"
    bad = [
        {"r/task1/f1_f2": {"shape": "relay", "agents": {"a": "x", "b": "y"}}},
        {"r/task1/f1_f2": {"shape": "handoff", "agents": {"a": "x"}}},
        {"r/task1/f1_f2": {"shape": "handoff", "agents": {"a": "x", "b": " "}}},
        {"r/task1/f1_f2": {"shape": "partition", "agents": {"a": "x", "b": "y"}}},
        {"r/task1/f1_f2": {"shape": "handoff", "colour": 1, "agents": {"a": "x", "b": "y"}}},
        {"r/task1/f1_f2": "text"},
    ]
    for one in bad:
        with pytest.raises(OpsdError):
            list(import_blocks(one))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "title: x\n",
        "--- section a\nx",
        "--- section a wisdom\nx",
        "--- section a guidance third\nx",
        "--- section a guidance first more\nx",
        "--- section a guidance\n\n",
        "title x\n--- section a guidance\nx",
        "--- section a guidance\nx\n--- section a guidance first\ny",
    ],
)
def test_broken_files_are_refused(text):
    with pytest.raises(OpsdError, match=r"docs/briefs\.md"):
        parse(text, "f.md")


def test_a_file_keeps_its_text_byte_for_byte():
    body = "  indented `code`\n\x0c\u2028 of a line\x85\r\n--- a/file\n+++ b/file\n@@ -1 +1 @@\n-\tx {{other}}\n"
    file = parse(f"title: t\n\n--- section a workflow\n{body}", "f.md")
    assert file.sections[0].text + "\n" == body and file.value("title") == "t"


def test_imported_text_is_the_text_that_was_given(tmp_path):
    odd = "A line\x0cwith \u2028 marks\x85 in it,\r\nand {{ name }}."
    block = {"p/task1/f1_f2": {"shape": "handoff", "agents": {"agent1": odd, "agent2": "wait"}}}
    ((name, text),) = import_blocks(block)
    (tmp_path / name).write_bytes(text.encode())
    made = make_brief("workflow", "agent1", PEERS["agent1"], allow_answer=True, task=facts("p/task1/f1_f2", files=tmp_path))
    assert made.sections[0].text == odd
    block["p/task1/f1_f2"]["agents"]["agent1"] = "one\n--- section more guidance\ntwo"
    with pytest.raises(OpsdError, match="begins a section"):
        list(import_blocks(block))
    (tmp_path / name).write_bytes(text.encode("utf-16"))
    with pytest.raises(OpsdError, match="UTF-8"):
        make_brief("workflow", "agent1", PEERS["agent1"], allow_answer=True, task=facts("p/task1/f1_f2", files=tmp_path))


def test_wrong_task_is_the_peer_spec_of_another_repository():
    from verl_opsd.cooperbench.dataset import POCKET_DIR, load_subset
    from verl_opsd.cooperbench.pair_briefs import briefs_of

    pairs = [pair for split in ("train", "eval", "test") for pair in load_subset(f"pocket_{split}", POCKET_DIR)]
    texts = {p.feature_text(f).strip(): p.repo for p in pairs for f in p.features}
    for pair in pairs:
        for agent, brief in briefs_of(pair, "wrong_task").items():
            introduction, task = brief.sections
            assert brief.kind == "scope" and texts[task.text] != pair.repo
            assert introduction == briefs_of(pair, "peer_spec")[agent].sections[0]
    with pytest.raises(OpsdError, match="another task"):
        make_brief("wrong_task", "agent1", PEERS["agent1"], task=facts())
