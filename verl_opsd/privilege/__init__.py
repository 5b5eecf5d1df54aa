"""Privileged context: briefs, and where they stand in the teacher's view of a trajectory."""

from verl_opsd.privilege.audit import Audit, Material, audit, distinct_texts, require_answer_free, require_unseen, student_leak
from verl_opsd.privilege.briefs import Brief, Case, Section, TaskFacts, brief_names, compose, make_brief, register_brief
from verl_opsd.privilege.frames import ChatMarkers, chat_blocks
from verl_opsd.privilege.library import NoBrief, none, peer_spec, process
from verl_opsd.privilege.placement import UserTurn, splice, teacher_view
from verl_opsd.privilege.view import Placement, TeacherView, stated
from verl_opsd.privilege.windows import ViewTooLong

__all__ = [
    "Audit",
    "Brief",
    "Case",
    "ChatMarkers",
    "Material",
    "NoBrief",
    "Placement",
    "Section",
    "TaskFacts",
    "TeacherView",
    "UserTurn",
    "ViewTooLong",
    "audit",
    "brief_names",
    "chat_blocks",
    "compose",
    "distinct_texts",
    "make_brief",
    "none",
    "peer_spec",
    "process",
    "register_brief",
    "require_answer_free",
    "require_unseen",
    "splice",
    "stated",
    "student_leak",
    "teacher_view",
]
