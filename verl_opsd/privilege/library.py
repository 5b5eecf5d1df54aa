"""The built-in briefs: who the peer is, how to work (texts from ``texts/``), per-task workflows, tests, gold patches.

Imported by the package, so that every process knows their names.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.briefs import Brief, Case, Section, compose, register_brief
from verl_opsd.privilege.hunks import made_real_edits
from verl_opsd.privilege.textfile import BriefFile, parse
from verl_opsd.privilege.workflows import read_workflow

TEXTS = Path(__file__).parent / "texts"
#: Working relationships: who holds which job. They name no file and no code.
PROTOCOLS = (
    "lead_reviewer",
    "implementer_integrator",
    "spec_owner_builder",
    "driver_navigator",
    "two_authors_one_gate",
    "sequential_shifts",
    "test_first_pair",
    "claim_registry",
    "merge_forward",
    "negotiated_split",
    "shared_backlog",
    "handoff",
    "partition_by_region",
)
#: Peer spec plus a role, the arms of the role ablation; ``role_context_only`` is the peer spec alone.
ROLES = ("role_context_only", "role_announce", "role_owner", "role_negotiate")
MENUS = ("menu_measured", "menu_corrected")
#: The protocols that ``mixed`` deals out: each agent writes its own feature in all of them. (The experiment's own seven are not on
#: record.)
MIXED = (
    "handoff",
    "partition_by_region",
    "spec_owner_builder",
    "two_authors_one_gate",
    "sequential_shifts",
    "implementer_integrator",
    "claim_registry",
)


class NoBrief(OpsdError):
    """This agent has no brief of this sort by design (hindsight without edits): its turns carry no loss, and are counted."""


@functools.cache
def text_file(name: str) -> BriefFile:
    """A data file of the package."""
    return parse((TEXTS / f"{name}.md").read_text(encoding="utf-8"), f"texts/{name}.md")


def _text(name: str) -> Callable[[Case], Brief]:
    return lambda case: compose(*text_file(name).render(case), name=name)


def none() -> Brief:
    """The empty brief: the teacher sees what the student sees."""
    return compose(name="none")


def peer_spec(agent_id: str, peer_id: str, peer_task: str) -> Brief:
    """Who the peer is, and the public task text that the peer was given (scope)."""
    if agent_id == peer_id or not peer_task.strip():
        raise OpsdError(
            f"peer {peer_id!r} of {agent_id!r} with a task text of {len(peer_task)} characters",
            "a peer is another agent and has a task",
            "pass the other agent's id and the text of its feature",
        )
    introduction = (
        f"# What {peer_id} works on\n\n"
        f"You are {agent_id}. At the same time {peer_id} implements another feature in the same repository, and both "
        f"branches are merged afterwards. This is the task that {peer_id} was given:"
    )
    return compose(
        Section(f"introduction:{peer_id}", "scope", introduction, private=False),
        Section(f"task:{peer_id}", "scope", peer_task.strip()),
        name="peer_spec",
    )


def process() -> Brief:
    """Static directives for working in a pair (guidance)."""
    return _text("process")(Case("agent1", {}))


def _peer_specs(case: Case) -> Brief:
    if not case.peers:
        raise OpsdError(
            f"peer_spec for {case.agent_id} without peers", "it tells a peer's task", "use it with a pair of agents"
        )
    return compose(*(peer_spec(case.agent_id, peer, case.peers[peer]) for peer in sorted(case.peers)), name="peer_spec")


def _wrong_task(case: Case) -> Brief:
    """The peer spec as a pair of another task would have it: as long and as well formed, and of no use."""
    elsewhere = case.facts("wrong_task").elsewhere
    if elsewhere is None:
        raise OpsdError(
            f"wrong_task for {case.agent_id} without another task", "it is read from the dataset", "pass elsewhere="
        )
    texts = elsewhere()
    return compose(*(peer_spec(case.agent_id, peer, texts[peer]) for peer in sorted(case.peers)), name="wrong_task")


def _role(name: str) -> Callable[[Case], Brief]:
    own = () if name == "role_context_only" else (name,)
    return lambda case: compose(_peer_specs(case), *(_text(n)(case) for n in own), name=name)


def _mixed(case: Case) -> Brief:
    """The protocol of this task: the same for both agents and in every run, chosen by the hash of the task's key."""
    digest = hashlib.sha256(case.facts("mixed").key.encode()).digest()
    return compose(_text(MIXED[int.from_bytes(digest[:8], "big") % len(MIXED)])(case), name="mixed")


def _answer(name: str, kind: Literal["tests", "gold"], title: str) -> Callable[[Case], Brief]:
    def make(case: Case) -> Brief:
        task = case.facts(name)
        if task.material is None:
            raise OpsdError(
                f"brief {name} of {task.key} without material", "it is read from the task's files", "pass material="
            )
        patch = task.material(case.agent_id, kind).strip()
        if not patch:
            raise OpsdError(
                f"brief {name}: {task.key} has no {kind} for {case.agent_id}", "every state has its brief", "leave it out"
            )
        return compose(Section(kind, "answer", f"# {title}\n\n{patch}", answer=kind), name=name, allow_answer=True)

    return make


def _hindsight(case: Case) -> Brief:
    """The gold patch where the agent has made real edits of its own: there it says which of them were right."""
    patches = case.facts("hindsight_gold").student_patch
    if patches is not None and not made_real_edits(patches.get(case.agent_id, "")):
        raise NoBrief(
            f"hindsight_gold: {case.agent_id} of {case.facts('').key} made no edit of source code",
            "hindsight is given only where the student made real edits",
            "its turns carry no loss",
        )
    return compose(
        _answer("hindsight_gold", "gold", "A solution of your task, for judging the edits below")(case), allow_answer=True
    )


def _workflow(case: Case) -> Brief:
    task = case.facts("workflow")
    sections = read_workflow(task.files, task.key).file.render(case)
    return compose(*sections, *text_file("endgame").render(case), name="workflow", allow_answer=True)


def sources() -> dict[str, tuple[str, str]]:
    """Name -> (source, status) of the briefs whose text comes from a data file."""
    names = (*PROTOCOLS, *MENUS, *ROLES[1:], "process")
    return {n: (text_file(n).value("source"), text_file(n).value("status")) for n in names}


register_brief("none", lambda case: none())
register_brief("peer_spec", _peer_specs)
for _name in (*PROTOCOLS, *MENUS, "process"):
    register_brief(_name, _text(_name))
for _name in ROLES:
    register_brief(_name, _role(_name))
register_brief("mixed", _mixed)
register_brief("wrong_task", _wrong_task)
register_brief("workflow", _workflow)
register_brief("own_tests", _answer("own_tests", "tests", "The tests of your feature"))
register_brief("gold_patch", _answer("gold_patch", "gold", "A solution of your task"))
register_brief("hindsight_gold", _hindsight)
