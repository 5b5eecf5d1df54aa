"""Briefs before a run: every pair has its own, none holds more than it declares, and every view fits the model that scores it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_opsd.config import OpsdConfig
from verl_opsd.cooperbench.pair_briefs import base_tree, briefs_of, material, require_patches, require_workflows
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import Audit, Brief, ChatMarkers, NoBrief, audit, distinct_texts, require_answer_free
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.verl_adapter.requirements import tokenizer_of


@dataclass(frozen=True)
class MadeBriefs:
    """The briefs of a run's pairs, their audits, the tokens of the longest, and for each brief its pair and agent."""

    briefs: tuple[Brief, ...]
    audits: tuple[Audit, ...]
    longest: int
    owners: tuple[tuple[str, str], ...]


def check_briefs(opsd: OpsdConfig, pairs: list[PairTask], student_path: str) -> MadeBriefs:
    """Makes and audits every agent's brief, so that one that is unknown, missing, forbidden, leaking or too long stops here.

    Raises:
        OpsdError: see :func:`verl_opsd.privilege.make_brief`, :func:`verl_opsd.cooperbench.pair_briefs.require_patches`, :func:`verl_opsd.privilege.require_answer_free`,
            ``ChatMarkers.from_tokenizer``, :func:`check_views`.
    """
    if opsd.brief.files is not None:
        require_workflows(pairs, opsd.brief.files)
    made: list[Brief] = []
    audits: list[Audit] = []
    owners: list[tuple[str, str]] = []
    elsewhere = "wrong_task" in opsd.brief.name.split("+")
    for pair in pairs:
        for agent, brief in briefs_of(
            pair, opsd.brief.name, allow_answer=opsd.brief.allow_answer, files=opsd.brief.files
        ).items():
            if isinstance(brief, NoBrief):
                raise OpsdError(f"{pair.key}: no brief for {agent}", "every training state must have its brief", brief.way_out)
            if not brief.allow_answer and brief.text:
                require_patches(pair)
            known = functools.partial(material, pair, agent, elsewhere=elsewhere)
            found = audit(brief, known())
            if found.findings and not brief.allow_answer:  # what the base tree holds is no leak; it is read only now
                found = audit(brief, known(base_tree(pair)))
            require_answer_free(brief, found, f"{pair.key} {agent}")
            made.append(brief)
            audits.append(found)
            owners.append((pair.key, agent))
    tokenizer = tokenizer_of(student_path)
    ChatMarkers.from_tokenizer(tokenizer)  # every view is made by them
    longest = max((len(b.ids(tokenizer)) for b in made), default=0)
    from verl_opsd.verl_adapter.teacher_checks import teacher_positions

    check_views(opsd, longest, teacher_positions(opsd, student_path))
    return MadeBriefs(tuple(made), tuple(audits), longest, tuple(owners))


def positions_of(path: str) -> int | None:
    """Positions that a model was made for; None where its config does not say."""
    from transformers import AutoConfig

    positions: int | None = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
    return positions


def check_views(opsd: OpsdConfig, longest_brief: int, positions: int | None) -> None:
    """Every view fits: a branch has at most ``contract.context_length`` tokens, its view the brief's more.

    Args:
        longest_brief: tokens of the longest brief. positions: of the model that scores the views; None: not known.

    Raises:
        OpsdError: ``max_view_tokens`` is more than the model's positions, or a view may be longer than either, unless such views are
            left out or scored in windows (``opsd.brief.too_long``, which then needs ``max_view_tokens``).
    """
    limit, context = opsd.brief.max_view_tokens, opsd.contract.context_length
    if limit is not None and positions is not None and limit > positions:
        raise OpsdError(
            f"opsd.brief.max_view_tokens={limit} for a model of {positions} positions",
            "a view is scored inside the positions that the model was made for",
            f"set it to {positions} or less",
        )
    if opsd.brief.too_long != "refuse" and limit is None:
        raise OpsdError(
            f"opsd.brief.too_long={opsd.brief.too_long} without opsd.brief.max_view_tokens",
            "what is too long is stated as a number of tokens",
            f"set max_view_tokens, e.g. to {positions}",
        )
    allowed = limit if limit is not None else positions
    if opsd.brief.too_long == "refuse" and allowed is not None and context + longest_brief > allowed:
        raise OpsdError(
            f"opsd.contract.context_length={context} and a brief of {longest_brief} tokens: views of up to {context + longest_brief} "
            f"tokens, {allowed} fit{'' if limit is None else ' (opsd.brief.max_view_tokens)'}",
            "a view is never truncated",
            _fitting(opsd, longest_brief, allowed, positions),
        )


def _fitting(opsd: OpsdConfig, longest_brief: int, allowed: int, positions: int | None) -> str:
    """What makes every view fit, of those ways that are open."""
    needed, room = opsd.contract.context_length + longest_brief, allowed - longest_brief
    ways = []
    if room > opsd.contract.max_tokens:
        ways.append(f"lower the context length to {room}")
    if opsd.brief.max_view_tokens is not None and (positions is None or needed <= positions):
        ways.append(f"raise opsd.brief.max_view_tokens to {needed}")
    if room > 0:
        ways.append(f"leave long branches out: opsd.brief.too_long=leave_out opsd.brief.max_view_tokens={allowed}")
        ways.append("score them in windows: opsd.brief.too_long=window")
    return ", or ".join(ways or ["use a shorter brief"])


def check_worth(opsd: OpsdConfig, audits: Sequence[Audit]) -> tuple[bool, str]:
    """The worth-distilling gate (``teachers.worth``), on wherever a brief is distilled.

    Args:
        audits: of this run's briefs; a matrix that calls a leaking brief answer-free does not help it.

    Returns:
        whether it passed, and the detail for ``evidence.jsonl``.

    Raises:
        OpsdError: no matrix was measured, or it refuses the brief, and no override gives a reason.
    """
    from verl_opsd.evaluation.teacher_matrix import read_matrix
    from verl_opsd.teachers.worth import worth

    name, gate = opsd.brief.name, opsd.worth
    failed = ["no teacher matrix was measured"]
    if gate.matrix is not None:
        failed = [c.name for c in worth(read_matrix(Path(gate.matrix).expanduser()), name) if not c.passed]
    leaking = [a for a in audits if not a.answer_free]
    if leaking:
        failed.append(f"this run's audit: {len(leaking)} of {len(audits)} briefs are not answer-free")
    if failed and gate.override is None:
        raise OpsdError(
            f"brief {name} is not shown to be worth distilling: {'; '.join(failed)}",
            "a teacher is distilled when its gain is measured, answer-free and within the student's reach",
            "measure it (opsd teacher-matrix) and name the file as opsd.worth.matrix, or go on with the reason why: "
            "opsd.worth.override='REASON'",
        )
    overridden = f"; overridden: {gate.override}" if failed else ""
    return not failed, f"{name}: {'; '.join(failed) or 'all conditions'}{overridden}"


def record_worth(run: RunDir, passed: bool, detail: str) -> None:
    """Appends the gate's verdict, or that it was overridden and why."""
    if passed:
        run.evidence("worth_distilling", 1, 1, True, detail)
    else:
        run.evidence("worth_overridden", 0, None, None, detail)


def record_briefs(run: RunDir, opsd: OpsdConfig, made: MadeBriefs) -> None:
    """Appends the audit to ``evidence.jsonl``, and writes which brief each agent's teacher reads; of answers the kind, never the text."""
    named: dict[str, dict[str, dict[str, str]]] = {}
    for (pair, agent), brief in zip(made.owners, made.briefs, strict=True):
        digest = hashlib.sha256(brief.text.encode()).hexdigest()
        named.setdefault(pair, {})[agent] = {"name": brief.name, "kind": brief.kind, "text_sha256": digest}
    write_json(run.path / "briefs.json", named)
    verdicts = sorted({a.verdict for a in made.audits})
    free = sum(a.answer_free for a in made.audits)
    derivable = min((a.derivable for a in made.audits), default=1.0)
    run.evidence(
        "brief_audit",
        free,
        None if opsd.brief.allow_answer else len(made.audits),
        True,
        f"answer-free briefs of {opsd.brief.name} among {len(made.audits)} ({distinct_texts(made.briefs)} texts, at most {made.longest} "
        f"tokens, least derivable share {derivable:.2f}); {'; '.join(verdicts)}",
    )
