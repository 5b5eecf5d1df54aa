"""The claims ledger: what is said about a run, how far it is established, and on what it stands. Its history is kept in the log.

measured           a number of the report stands behind it; ``support`` names one or more of its keys
verified in code   a test or a line of source stands behind it; ``support`` names files
not established    an inference; nothing is behind it yet
superseded         another claim took its place (``by``)
retracted          it was wrong; ``why`` says how that was found
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import append, lines

#: Name of the lines that hold a claim.
CLAIM = "claim"
STATUSES = ("measured", "verified in code", "not established", "superseded", "retracted")


@dataclass(frozen=True)
class Claim:
    """One claim as it stands now. ``earlier``: its former statuses, oldest first; ``time`` of the last change."""

    id: str
    text: str
    status: str
    support: tuple[str, ...] = ()
    by: str = ""
    why: str = ""
    time: float = 0.0
    earlier: tuple[str, ...] = ()


def claims(log: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """All claims of a log as they stand at its end, in the order in which they were first made."""
    found: dict[str, Claim] = {}
    for line in log:
        if line["gate"] != CLAIM:
            continue
        v, before = line["value"], found.get(line["value"]["id"])
        earlier = (*before.earlier, before.status) if before else ()
        found[v["id"]] = Claim(**v | {"support": tuple(v["support"])}, time=line["time"], earlier=earlier)
    return list(found.values())


def claim(run: Path, new: Claim, numbers: Collection[str], root: Path) -> None:
    """Appends a claim, or a new status of one.

    Args:
        numbers: keys of the report's numbers. root: folder that the files of ``verified in code`` are relative to.

    Raises:
        OpsdError: a status without what it stands on.
    """
    known = {c.id: c for c in claims(lines(run))}
    text = new.text or (known[new.id].text if new.id in known else "")
    files = [s.split("::")[0].split(":")[0] for s in new.support]
    needs: dict[str, tuple[bool, str]] = {
        "measured": (
            bool(new.support) and all(s in numbers for s in new.support),
            "--support KEY: keys of report.json's numbers",
        ),
        "verified in code": (
            bool(files) and all((root / f).is_file() for f in files),
            "--support FILE: tests or sources, below --root",
        ),
        "not established": (not new.support, "no --support: with one it is measured or verified"),
        "superseded": (new.by in known.keys() - {new.id}, "--by ID of another claim in the ledger"),
        "retracted": (new.id in known and bool(new.why), "--why, of a claim in the ledger"),
    }
    if new.status not in needs or not text or not new.id or not needs[new.status][0]:
        rule = (
            needs[new.status][1]
            if new.status in needs and text and new.id
            else f"a claim has a name, a text and a status of {', '.join(STATUSES)}"
        )
        raise OpsdError(
            f"claim {new.id!r}, status {new.status!r}, support {list(new.support)}",
            f"a status stands on something: {rule}",
            "name it, or claim less",
        )
    value = {k: v for k, v in asdict(new).items() if k not in ("time", "earlier")} | {
        "text": text,
        "support": list(new.support),
    }
    append(run, CLAIM, value, None, "recorded", new.why)
