"""Privileged context: briefs, and where they stand in the teacher's view of a trajectory."""

from verl_opsd.privilege.briefs import (
    Brief,
    Section,
    compose,
    make_brief,
    none,
    peer_spec,
    process,
    register_brief,
    student_leak,
)
from verl_opsd.privilege.placement import ChatMarkers, UserTurn, chat_blocks, splice, teacher_view
from verl_opsd.privilege.view import Placement, TeacherView

__all__ = [
    "Brief",
    "ChatMarkers",
    "Placement",
    "Section",
    "TeacherView",
    "UserTurn",
    "chat_blocks",
    "compose",
    "make_brief",
    "none",
    "peer_spec",
    "process",
    "register_brief",
    "splice",
    "student_leak",
    "teacher_view",
]
