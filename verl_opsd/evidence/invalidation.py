"""Invalidation: what was found to be wrong later is marked in every report, never deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_opsd.errors import OpsdError
from verl_opsd.evidence.chain import LOG, append, lines
from verl_opsd.evidence.graded import EPISODE
from verl_opsd.rundir import RunDir, read_json

#: Name of the lines that invalidate.
INVALIDATED = "invalidated"
FIELDS = ("version", "contract", "brief")


@dataclass(frozen=True)
class Mark:
    """One invalidation.

    Attributes:
        field, value: what it holds for: ``version=3`` (the policy's), ``version=cooperbench==0.0.29`` (a package's),
            ``contract=HASH`` (or its first 8 and more digits), ``brief=NAME`` (that the teacher or the actors read).
        reason: why. time: seconds since the epoch.
        corpus: the run directory whose log holds it, where that is the one that this run was trained on; "" for its own.
    """

    field: str
    value: str
    reason: str
    time: float
    corpus: str = ""

    @property
    def policy_version(self) -> int | None:
        """The policy version that alone is meant; None: the whole run is, as all of it depends on its corpus."""
        return int(self.value) if self.field == "version" and "==" not in self.value and not self.corpus else None

    def covers(self, version: int | None) -> bool:
        """Whether a row of a policy version is meant; ``version=None``: a row over the whole run, which every mark reaches."""
        return self.policy_version is None or version is None or version == self.policy_version

    def __str__(self) -> str:
        """What is written beside a row that is meant."""
        corpus = f", in its corpus {self.corpus}" if self.corpus else ""
        return f"invalidated ({self.field}={self.value}{corpus}): {self.reason}"


def parse_where(text: str) -> tuple[str, str]:
    """``field=value``.

    Raises:
        OpsdError: another field, or a value that can't be one.
    """
    field, _, value = text.partition("=")
    good = {
        "version": value.isdecimal() or (len(parts := value.split("==")) == 2 and all(parts)),
        "contract": len(value) >= 8 and set(value) <= set("0123456789abcdef"),
        "brief": bool(value),
    }
    if not good.get(field):
        raise OpsdError(
            f"--where {text}",
            "version=NUMBER of the policy, version=PACKAGE==VERSION, contract=HASH (8 digits or more) or brief=NAME",
            "write one of these",
        )
    return field, value


def invalidate(run: Path, field: str, value: str, reason: str) -> bool:
    """Appends a mark to the log of ``run`` when something in it is meant; whether it was.

    Raises:
        OpsdError: without a reason.
    """
    if not reason.strip():
        raise OpsdError("--reason is empty", "a mark says why in every report", "give the reason")
    if not _meant(run, field, value):
        return False
    append(run, INVALIDATED, {"field": field, "value": value}, None, "recorded", reason)
    return True


def marks(run: Path) -> list[Mark]:
    """The marks of a run, those of the corpus that it was trained on included: they reach every row of it."""
    return _marks(run, set())


def reach(run: Path, versions: Iterable[int]) -> tuple[str, ...]:
    """What is to be said beside a row over episodes of these policy versions; () where no mark of the run means one of them."""
    acted = set(versions)
    return tuple(str(m) for m in marks(run) if any(m.covers(v) for v in acted))


def _marks(run: Path, seen: set[Path]) -> list[Mark]:
    run = run.resolve()
    if run in seen:
        return []
    seen.add(run)
    found = [
        Mark(x["value"]["field"], x["value"]["value"], x["detail"], x["time"]) for x in lines(run) if x["gate"] == INVALIDATED
    ]
    if corpus := _meta(run).get("opsd", {}).get("corpus"):
        above = Path(corpus).expanduser()
        found += [replace(m, corpus=m.corpus or str(above)) for m in _marks(above, seen)]
    return found


def runs_below(folders: Iterable[Path]) -> list[Path]:
    """The run directories among ``folders`` and below them: those that hold a log and say what ran.

    Copies of logs hold nothing else and are left as they are: with a line of its own a copy would no longer be the log's beginning.

    Raises:
        OpsdError: there is none.
    """
    logs = {p.parent for folder in folders for p in (folder / LOG, *folder.rglob(LOG)) if p.is_file()}
    found = sorted(run for run in logs if (run / "meta.json").is_file() or (run / "contract.json").is_file())
    if not found:
        raise OpsdError(
            f"no run in {', '.join(map(str, folders))}",
            f"a run directory holds {LOG}, and meta.json or contract.json; a copy of a log does not",
            "name run directories",
        )
    return found


def _meta(run: Path) -> Mapping[str, Any]:
    path = run / "meta.json"
    return read_json(path) if path.is_file() else {}


def _meant(run: Path, field: str, value: str) -> bool:
    meta = _meta(run)
    if field == "brief":
        read = (meta.get("opsd", {}).get(who, {}).get("name") for who in ("brief", "actor_brief"))
        return any(value == name or value in name.split("+") for name in map(str, read))
    if field == "contract":
        return (run / "contract.json").is_file() and RunDir(run).contract().hash.startswith(value)
    if "==" in value:
        package, version = value.split("==")
        known = dict(meta.get("versions", {})) | {"cooperbench": meta.get("harness", {}).get("version")}
        return known.get(package) == version
    return any(x["gate"] == EPISODE and x["value"]["version"] == int(value) for x in lines(run))
