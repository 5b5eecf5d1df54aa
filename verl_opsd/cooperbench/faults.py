"""Faults of the infrastructure, by kind. Each is an outcome of its own and never a score."""

from __future__ import annotations

from verl_opsd.errors import InfraFault

#: Kinds that grading raises. A test run past its limit is no fault: the merged code hung, and the feature fails.
GRADING_FAULTS = {
    "grader_died": "the sandbox of the grader ended, could not be started, or a step of the grader failed",
    "grader_timeout": "a step of the grader itself (git, copying), not a test run, ran past its limit",
}


def grading_fault(kind: str, what: str) -> InfraFault:
    """The fault of one of :data:`GRADING_FAULTS`."""
    return InfraFault(
        kind,
        f"{what} ({GRADING_FAULTS[kind]})",
        "an infrastructure fault is never a score of zero",
        "grade the same patches again; if it comes back, run `opsd doctor` for the sandbox",
    )
