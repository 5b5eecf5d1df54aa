"""Per-task workflows: briefs that are written for one pair, each in a brief file of its own (see ``textfile``).

    pair: pallets_jinja_task/task1621/f1_f2
    shape: partition
    region: first src/jinja2/filters.py 1-120
    region: second src/jinja2/filters.py 130-400
    --- section plan workflow first
    ...

``shape`` is ``partition`` (shared file, edits do not overlap; regions in lines of the base tree), ``handoff`` (edits overlap, one
artifact) or ``interface_first`` (shared symbol, independent bodies). The file is called after the pair, ``/`` as ``__``. The endgame
clause is added by the brief ``workflow``. Such texts name files, lines and code: their sections are answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.hunks import CONTEXT, Edit, collisions, edits, gap, regions_hold
from verl_opsd.privilege.textfile import MARK, BriefFile, parse

SHAPES = ("partition", "handoff", "interface_first")
_REGION = re.compile(r"(first|second) (\S+) (\d+)-(\d+)")
_WAY_OUT = "correct the workflow's file; docs/briefs.md describes the format"


@dataclass(frozen=True)
class Workflow:
    """One authored workflow. ``regions``: side -> file -> ranges of base lines that the side may edit (partition only)."""

    pair: str
    shape: str
    regions: Mapping[str, Mapping[str, list[Edit]]]
    file: BriefFile


def file_name(pair: str) -> str:
    """Name of a pair's workflow file."""
    return f"{pair.replace('/', '__')}.md"


def read_workflow(folder: Path | None, pair: str) -> Workflow:
    """The workflow of a pair.

    Raises:
        OpsdError: no folder is named, it has none for this pair, or the file is not of the format.
    """
    if folder is None or not (folder / file_name(pair)).is_file():
        raise OpsdError(
            f"no workflow for {pair} in {folder}",
            "every training state must have its brief",
            f"write {file_name(pair)} into the folder that opsd.brief.files names, or take the pair out of the subset",
        )
    try:
        text = (folder / file_name(pair)).read_bytes().decode()
    except UnicodeDecodeError as e:
        raise OpsdError(f"{folder / file_name(pair)}: {e}", "a workflow is a text in UTF-8", _WAY_OUT) from e
    return parse_workflow(text, file_name(pair), pair)


def parse_workflow(text: str, where: str, pair: str) -> Workflow:
    """Reads a workflow and checks what can be checked without the task.

    Raises:
        OpsdError: not of the format, of another pair, an unknown shape, regions without partition or the other way round, or regions
            of the two sides with fewer than three lines between them.
    """
    file = parse(text, where)
    stated, shape = file.value("pair"), file.value("shape")
    if stated != pair or shape not in SHAPES:
        raise OpsdError(
            f"{where}: pair {stated}, shape {shape}", f"the file is of {pair}, its shape one of {', '.join(SHAPES)}", _WAY_OUT
        )
    regions: dict[str, dict[str, list[Edit]]] = {"first": {}, "second": {}}
    for value in file.values("region"):
        match = _REGION.fullmatch(value)
        if not match or not 1 <= int(match[3]) <= int(match[4]):
            raise OpsdError(f"{where}: region {value!r}", "a region is `first|second FILE FROM-TO`", _WAY_OUT)
        regions[match[1]].setdefault(match[2], []).append(Edit(int(match[3]), int(match[4])))
    if [bool(of_side) for of_side in regions.values()] != [shape == "partition"] * 2:
        raise OpsdError(
            f"{where}: shape {shape} with regions {regions}", "a partition, and no other, has regions for both sides", _WAY_OUT
        )
    for name in regions["first"].keys() & regions["second"].keys():
        for a in regions["first"][name]:
            for b in regions["second"][name]:
                if gap(a, b) < CONTEXT:
                    raise OpsdError(
                        f"{where}: regions {a.first}-{a.last} and {b.first}-{b.last} of {name}, {max(0, gap(a, b))} lines apart",
                        f"a hunk has {CONTEXT} lines of context: two sides keep as many untouched lines between them",
                        "widen the gap, or make it a handoff",
                    )
    return Workflow(pair, shape, regions, file)


def check_workflow(workflow: Workflow, gold_first: str, gold_second: str) -> None:
    """Checks the shape against the gold patches of both sides.

    Raises:
        OpsdError: a partition whose gold edits collide or leave their regions, or a handoff of patches that share no file.
    """
    found = collisions(gold_first, gold_second)
    tight = {file: pairs for file, pairs in found.items() if pairs}
    if workflow.shape == "handoff" and not found:
        raise OpsdError(
            f"{workflow.pair}: handoff, and the gold patches share no file", "a handoff is over a shared file", _WAY_OUT
        )
    if workflow.shape != "partition":
        return
    if tight:
        file, pairs = next(iter(tight.items()))
        (a, b), *_ = pairs
        raise OpsdError(
            f"{workflow.pair}: partition, but gold edits {a.first}-{a.last} and {b.first}-{b.last} of {file} are "
            f"{max(0, gap(a, b))} lines apart",
            f"a hunk has {CONTEXT} lines of context: two sides keep as many untouched lines between them",
            "make it a handoff: one side owns the file",
        )
    outside = [
        f"{side}: {where}"
        for side, gold in (("first", gold_first), ("second", gold_second))
        for where in regions_hold(workflow.regions[side], gold, set(found))
    ]
    if outside:
        raise OpsdError(
            f"{workflow.pair}: gold edits outside their regions: {outside}", "a side's work fits its region", _WAY_OUT
        )


def draft(pair: str, gold_first: str, gold_second: str) -> str:
    """A skeleton for an author: the shape that the gold edits allow, with regions where it is a partition.

    There is one region for each edit in a shared file; the author widens them.
    """
    found = collisions(gold_first, gold_second)
    separable = bool(found) and not any(found.values())
    lines = [f"pair: {pair}", f"shape: {'partition' if separable else 'handoff' if found else 'interface_first'}"]
    if separable:
        for side, gold in (("first", gold_first), ("second", gold_second)):
            lines += [f"region: {side} {f} {e.first}-{max(e.first, e.last)}" for f in found for e in edits(gold)[f]]
    body = [f"{MARK}plan workflow {side}\nYour role, {{{{agent}}}}: ..." for side in ("first", "second")]
    return "\n".join([*lines, *body]) + "\n"


def import_blocks(blocks: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Workflow files from frozen blocks that another program wrote.

    Args:
        blocks: ``{pair: {"shape": ..., "regions": [...], "kind": ..., "agents": {agent id: text}}}``; ``regions`` as in the header,
            left out without any; ``kind`` is ``workflow``, or ``gold`` where the text holds a reference diff.

    Yields:
        (file name, text), each read back before it is given.

    Raises:
        OpsdError: a block that is not of this form, or whose file is refused by :func:`parse_workflow`.
    """
    for pair, block in sorted(blocks.items()):
        known = isinstance(block, dict) and block.keys() <= {"shape", "regions", "kind", "agents"}
        agents = block.get("agents") if known else None
        if (
            not isinstance(agents, dict)
            or len(agents) != 2
            or not all(isinstance(t, str) and t.strip() for t in agents.values())
        ):
            raise OpsdError(
                f"block of {pair}: {json.dumps(block)[:80]}",
                "a block has shape, regions, kind, and agents: two texts by agent id",
                "correct it",
            )
        lines = [f"pair: {pair}", f"shape: {block.get('shape')}", *(f"region: {r}" for r in block.get("regions", []))]
        for side, agent in zip(("first", "second"), sorted(agents), strict=True):
            lines.append(f"{MARK}block {block.get('kind', 'workflow')} {side}\n{agents[agent].strip()}")
        text = "\n".join(lines) + "\n"
        read = {(s.side, s.text) for s in parse_workflow(text, file_name(pair), pair).file.sections}
        if read != {(side, agents[a].strip()) for side, a in zip(("first", "second"), sorted(agents), strict=True)}:
            raise OpsdError(
                f"block of {pair} with a line that begins with {MARK!r}",
                "such a line begins a section of the file",
                "indent it",
            )
        yield file_name(pair), text
