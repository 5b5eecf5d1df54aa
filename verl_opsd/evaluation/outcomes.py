"""What an episode's grade says, in the words of the tables: how the patches met, why a feature failed, who did the work."""

from __future__ import annotations

from verl_opsd.tokens.records import AgentOutcome, Episode, Grade

#: A suite that fails in at most this many tests, with some passing, is a near miss.
NEAR_MISS = 2


def merge_of(grade: Grade) -> str:
    """One of ``shapes.MERGES``: the harness' status, with its ``clean`` split by how many handed something in."""
    return "clean_both" if grade.merge_kind == "clean" else grade.merge_kind


def is_empty(agent: AgentOutcome, grade: Grade | None) -> bool:
    """Whether an agent's patch is empty; of test files alone too, where the grader said so."""
    return not agent.patch.strip() or (grade is not None and grade.apply_status.get(agent.agent_id) == "skipped")


def patch_bytes(agent: AgentOutcome) -> int:
    """Bytes of an agent's patch; 0 where it holds nothing but white space."""
    return len(agent.patch.encode("utf-8", "surrogateescape")) if agent.patch.strip() else 0


def causes(episode: Episode) -> tuple[str, str]:
    """The cause (``shapes.CAUSES``) of each feature of a scored episode, exclusive: passed, then merge conflict, then submitted
    nothing, then near miss (at most 2 tests failed and some passed), then wrong code, or no test ran."""
    grade = episode.grade
    assert grade is not None
    found = []
    agents = {a.feature_id: a for a in episode.agents}
    for feature in grade.features:
        agent = agents.get(feature.feature_id)  # None: one agent ran alone
        if feature.passed:
            found.append("passed")
        elif grade.merge in ("conflicts", "missing_input"):
            found.append("merge_conflict")
        elif agent is None or is_empty(agent, grade):
            found.append("submitted_nothing")
        elif 0 < feature.tests_failed <= NEAR_MISS and feature.tests_passed > 0:
            found.append("near_miss")
        else:
            found.append("wrong_code")
    return found[0], found[1]
