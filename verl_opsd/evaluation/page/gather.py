"""Everything that the page says about a run, read from its directory once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_opsd.config import OpsdConfig, build_section
from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.page.kl_join import RowKey, join
from verl_opsd.evaluation.report import epoch_of, trained_episodes
from verl_opsd.evidence.chain import Finding, verify
from verl_opsd.evidence.graded import State
from verl_opsd.evidence.invalidation import Mark, marks
from verl_opsd.rundir import RunDir, read_json
from verl_opsd.tokens.branches import build_trajectories
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore


@dataclass
class RunData:
    """A run as the page needs it.

    Attributes:
        name: its name among the runs of the page.
        report: ``report.json``'s content, as ``report.build_report`` made it.
        log, findings: the lines of the evidence and what is wrong with them.
        states: episode id -> whether its files are those that were graded. marks: invalidations.
        divergences: per branch, float32[N] nats at its loss positions, where the run trained on it.
        divergences_missing: why there are none; "" where there are, or where nothing was trained.
    """

    name: str
    run: RunDir
    meta: dict[str, Any]
    opsd: OpsdConfig
    contract: EvalContract
    report: dict[str, Any]
    episodes: list[Episode]
    log: list[dict[str, Any]]
    findings: list[Finding]
    states: dict[str, tuple[State, str]]
    marks: list[Mark]
    stages: list[dict[str, Any]]
    divergences: dict[RowKey, NDArray[np.float32]] = field(default_factory=dict)
    divergences_missing: str = ""


def read_meta(run: RunDir) -> tuple[dict[str, Any], OpsdConfig]:
    """``meta.json`` and the configuration in it, whose contradictions were looked for before the run.

    Raises:
        OpsdError: the run has none, or it is of another version.
    """
    path = run.path / "meta.json"
    if not path.is_file():
        raise OpsdError(f"{path} does not exist", "a report is made from a run's directory", "name the run's directory")
    meta = read_json(path)
    if "opsd" not in meta:
        rule = "a report is made from a run that acted: its meta.json has the section `opsd` of its configuration"
        raise OpsdError(
            f"{path} has no section `opsd`", rule, "name such a run's directory, or evaluate again with this version"
        )
    config: OpsdConfig = build_section(OpsdConfig, meta["opsd"], "opsd")
    return meta, config


def read_episodes(run: RunDir) -> list[Episode]:
    """The stored episodes, [] where there is no store."""
    if not run.episodes.is_dir():
        return []
    return list(EpisodeStore(run.episodes).episodes())


def gather(
    run: RunDir, name: str, report: dict[str, Any], episodes: Sequence[Episode], states: Mapping[str, tuple[State, str]]
) -> RunData:
    """Reads the rest of a run.

    Args:
        report: ``report.json``'s content. episodes: of the run's store. states: of each episode.
    """
    meta, opsd = read_meta(run)
    log, findings = verify(run.path)
    data = RunData(
        name=name,
        run=run,
        meta=meta,
        opsd=opsd,
        contract=run.contract(),
        report=report,
        episodes=list(episodes),
        log=log,
        findings=findings,
        states=dict(states),
        marks=marks(run.path),
        stages=run.stages(),
    )
    try:
        data.divergences = _divergences(run, opsd, data.episodes)
    except OpsdError as error:
        data.divergences_missing = str(error)
    return data


def _divergences(run: RunDir, opsd: OpsdConfig, episodes: Sequence[Episode]) -> dict[RowKey, NDArray[np.float32]]:
    """Of the first pass over each round's rows: the policy as it was when the round began."""
    found: dict[RowKey, NDArray[np.float32]] = {}
    files = sorted((run.path / "telemetry").glob("*.npz"))
    trained = trained_episodes(run, opsd, episodes) if files else []
    for path in files:
        values = dict(np.load(path))
        first = epoch_of(values["step"], opsd.loss.epochs) == 0
        of_round = (
            trained if opsd.corpus is not None else [e for e in trained if int(e.episode_id.split("-")[1]) == int(path.stem)]
        )
        rows = [
            t
            for e in of_round
            for a in ("agent1", "agent2")
            for t in build_trajectories([r for r in e.turns if r.agent_id == a])
        ]
        names = values.pop("row_names", None)
        found |= join({k: v[first] for k, v in values.items() if v.ndim}, names, rows)
    return found


class _Tokenizer:
    """A ``tokenizer.json`` without transformers, whose import takes seconds."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def tokenizer_of(meta: dict[str, Any]) -> tuple[Any, str]:
    """What decodes the student's ids, special tokens kept, and ""; or None and why it is not at hand."""
    path = Path(meta["student"])
    if not path.is_dir():
        return None, f"the student's folder {path} is not on this machine"
    try:
        if (path / "tokenizer.json").is_file():
            return _Tokenizer(path / "tokenizer.json"), ""
        from transformers import AutoTokenizer  # seconds

        return AutoTokenizer.from_pretrained(path), ""
    except Exception as error:
        return None, f"the student's tokenizer in {path} can't be read: {error}"
